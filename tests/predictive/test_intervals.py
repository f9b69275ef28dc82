"""Intervals and quantiles hold the share that they are asked for, up to the far tails, whatever the network's dtype."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import OptionError
from laplace.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Multilabel,
    Ordinal,
    Poisson,
    from_log_prob,
)
from laplace.linalg.sampling import Draws
from laplace.predictive.outputs import OutputGaussian, OutputSamples

LEVELS = [1e-6, 0.5, 0.95, 1 - 1e-7, 1 - 1e-8, 1 - 1e-12]
DTYPES = [torch.float32, torch.float64]


def prediction(likelihood, outputs, link=None):
    """As `la.predict` makes it of these outputs."""
    link = likelihood.link_named(link)
    p = None
    if likelihood.links and isinstance(outputs, OutputGaussian):
        p = likelihood.links[link].apply(outputs, Draws(1))
    elif likelihood.links:
        p = likelihood.inverse_link(outputs.samples).mean(0)
    return likelihood.prediction(outputs, p, torch.full((), 0.3), link, Draws(20))


def gaussian(c, dtype, n=4):
    torch.manual_seed(c)
    return OutputGaussian(2 * torch.randn(n, c, dtype=dtype), 0.1 + torch.rand(n, c, dtype=dtype))


def z_of(level):
    """The quantile of |z| for z ~ N(0, 1), 30 digits."""
    with mp.workdps(30):
        return float(mp.sqrt(2) * mp.erfinv(mp.mpf(level)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("likelihood", [Gaussian(), HeteroscedasticGaussian()], ids=lambda given: given.name)
def test_intervals_of_regression_are_exact_at_every_level(likelihood, level, dtype):
    p = prediction(likelihood, gaussian(2, dtype))
    low, high = p.interval(level)
    half = z_of(level) * p.total.double().sqrt()
    assert low.dtype == high.dtype == dtype
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(high.double(), p.mean.double() + half, rtol=max(eps, 1e-9), atol=1e-13)
    torch.testing.assert_close(low.double(), p.mean.double() - half, rtol=max(eps, 1e-9), atol=1e-13)
    if dtype is torch.float64:
        torch.testing.assert_close(high - p.mean, half, rtol=1e-8, atol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("likelihood", [Poisson(), Bernoulli(), Multilabel()], ids=lambda given: given.name)
def test_intervals_of_rates_and_labels_are_exact_at_every_level(likelihood, level, dtype):
    outputs = gaussian(1, dtype)
    low, high = prediction(likelihood, outputs).interval(level)
    half = z_of(level) * outputs.variance.double().sqrt()
    for end, f in ((low, outputs.mean.double() - half), (high, outputs.mean.double() + half)):
        expected = likelihood.inverse_link(f)
        torch.testing.assert_close(end.double(), expected, rtol=max(1e-7, 2 * torch.finfo(dtype).eps), atol=0)


@pytest.mark.parametrize("q", [1e-9, 1e-3, 0.3, 0.5, 0.9, 1 - 1e-6])
def test_quantiles_of_ordered_classes_hold_their_share(q):
    """The share of f, counted on a dense grid of its distribution function, that gives a class less than that."""
    likelihood, outputs = Ordinal([-1.0, 0.0, 2.0]), gaussian(1, torch.float64)
    found = prediction(likelihood, outputs).quantile(q)
    z = torch.cat([torch.linspace(-8, 8, 400_001, dtype=torch.float64)])
    mass = torch.special.ndtr(z).diff(prepend=torch.zeros(1, dtype=torch.float64))
    for row, f, s in zip(found, outputs.mean, outputs.variance, strict=True):
        p = likelihood.inverse_link((f + s.sqrt() * z)[:, None])
        share = ((p <= row) * mass[:, None]).sum(0)
        torch.testing.assert_close(share, torch.full_like(share, q), rtol=1e-3, atol=3e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_ends_of_ordered_classes_are_in_order_and_probabilities(level):
    for s in (0.0, 1e-8, 1.0, 1e4):
        outputs = OutputGaussian(torch.tensor([[-80.0], [0.3], [80.0]]), torch.full((3, 1), s))
        low, high = prediction(Ordinal(5), outputs).interval(level)
        assert (low >= 0).all()
        assert (high <= 1).all()
        assert (low <= high).all()


@pytest.mark.parametrize("level", LEVELS)
def test_intervals_of_classes_lie_within_the_draws(level):
    outputs = gaussian(3, torch.float32)
    for link in ("probit", "bridge"):
        low, high = prediction(Categorical(), outputs, link).interval(level)
        assert low.dtype == torch.float32
        assert (low >= 0).all()
        assert (high <= 1).all()
        assert (low <= high).all()
    if level > 0.99:
        drawn = torch.cat(list(outputs.draws(Draws(1000, torch.Generator().manual_seed(0)))), 1).softmax(-1)
        low, high = prediction(Categorical(), outputs).interval(level)
        torch.testing.assert_close(high, drawn.amax(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(low, drawn.amin(0), rtol=0.05, atol=1e-4)


@pytest.mark.parametrize(
    "likelihood", [Poisson(), Bernoulli(), Ordinal(3), Categorical()], ids=lambda given: given.name
)
def test_quantiles_of_sampled_networks_are_those_of_the_draws(likelihood):
    torch.manual_seed(0)
    samples = torch.randn(50, 4, 3 if isinstance(likelihood, Categorical) else 1)
    found = prediction(likelihood, OutputSamples(samples)).quantile([0.25, 0.999999999])
    drawn = likelihood.inverse_link(samples).double()
    expected = np.quantile(drawn.numpy(), [0.25, 0.999999999], axis=0)
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), rtol=1e-6, atol=1e-7)


def test_of_a_custom_likelihood_and_of_latent_outputs_too():
    def log_prob(f, y):
        return -(f - y).square().sum(-1)

    for likelihood in (from_log_prob(log_prob).response, from_log_prob(log_prob, inverse_link=torch.exp)):
        outputs = gaussian(1, torch.float32)
        p = None if not likelihood.links else likelihood.links["mc"].apply(outputs, Draws(50))
        made = likelihood.prediction(outputs, p, torch.ones(()), likelihood.link_named(None), Draws(20))
        low, high = made.interval(1 - 1e-8)
        torch.testing.assert_close((high - low) / 2, z_of(1 - 1e-8) * made.total.sqrt(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("level", [0, 1, -0.1, 1.5, math.nan, math.inf, 1 - 1e-17, "0.9x", None, [0.5, 0.6]])
def test_levels_that_are_none_are_refused_with_what_is_allowed(level):
    p = prediction(Gaussian(), gaussian(1, torch.float32))
    with pytest.raises(OptionError, match=r"level=.*strictly between 0 and 1"):
        p.interval(level)
    if not isinstance(level, list):
        with pytest.raises(OptionError, match=r"q=.*strictly between 0 and 1"):
            p.quantile(level)


def test_quantile_takes_a_number_or_several_and_keeps_the_shape():
    p = prediction(Poisson(), gaussian(2, torch.float32))
    assert p.quantile(0.2).shape == (4, 2)
    assert p.quantile([0.2]).shape == (1, 4, 2)
    assert p.quantile(torch.tensor([0.2, 0.4])).shape == (2, 4, 2)
    torch.testing.assert_close(p.quantile([0.2, 0.4])[0], p.quantile(0.2))


def test_intervals_come_in_the_networks_shape():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(6, 4, 3)
    la = Laplace(model, "poisson").fit([(x, torch.randint(4, (6, 4, 2)).float())])
    low, high = la.predict(x).interval(1 - 1e-9)
    assert low.shape == high.shape == (6, 4, 2)
    assert (low < high).all()
