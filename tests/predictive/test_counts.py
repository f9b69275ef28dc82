"""Counts with an uncertain rate: every side of the distribution against integrals in high precision, and each other."""

from __future__ import annotations

import math

import mpmath as mp
import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.likelihoods import Poisson
from laplace.predictive.counts import PoissonLogNormal, PoissonMixture
from laplace.predictive.outputs import OutputGaussian, OutputSamples

F64 = torch.float64
RATES = (1e-3, 0.5, 10.0, 403.0, 2981.0, 1e6)
SPREADS = (1e-8, 0.2, 1.0, 25.0)


def counts(rate, s):
    return PoissonLogNormal(torch.tensor(math.log(rate), dtype=F64), torch.tensor(s, dtype=F64))


def integral(y, f, s):
    """log p(y), 25 digits: sums over nodes around the mode, a third of the integrand's width apart."""
    with mp.workdps(25):
        y, f, s = mp.mpf(y), mp.mpf(f), mp.mpf(s)

        def logs(u):
            return y * u - mp.exp(u) - (u - f) ** 2 / (2 * s)

        low, high = min(f, mp.log(y) if y else -mp.log(s)) - 1, max(f, mp.log(y) if y else f) + 1
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if y - mp.exp(middle) > (middle - f) / s else (low, middle)
        step = min(1 / mp.sqrt(mp.exp(low) + 1 / s), mp.mpf("0.6")) / 3
        total = mp.mpf(0)
        for direction, i in ((1, 0), (-1, 1)):
            while (fall := logs(low + direction * i * step) - logs(low)) > -40:
                total, i = total + mp.exp(fall), i + 1
        return float(logs(low) + mp.log(step * total) - mp.loggamma(y + 1) - mp.log(2 * mp.pi * s) / 2)


def reached(rate, s):
    """Some counts that the distribution gives."""
    rates = [rate * math.exp(z * math.sqrt(s)) for z in (-2, 0, 3)]
    found = {round(r + w * math.sqrt(r)) for r, w in zip(rates, (-2, 0, 2), strict=True)} | {round(rate) + 1}
    return sorted({max(0, y) for y in found} | ({0} if rate < 20 or s > 0.5 else set()))


@pytest.mark.parametrize("rate", RATES)
def test_log_probabilities_are_the_integral_to_a_hundred_millionth(rate):
    for s in SPREADS:
        ys = reached(rate, s)
        found = counts(rate, s).log_prob(torch.tensor(ys, dtype=F64))
        expected = torch.tensor([integral(y, math.log(rate), s) for y in ys], dtype=F64)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("f", "s"), [(0.0, 100.0), (5.0, 1e4), (-80.0, 25.0), (-80.0, 1e4), (80.0, 400.0)])
def test_very_wide_rates_are_integrated_as_well(f, s):
    found = PoissonLogNormal(torch.tensor(f, dtype=F64), torch.tensor(s, dtype=F64)).log_prob(torch.arange(4.0))
    expected = torch.tensor([integral(y, f, s) for y in range(4)], dtype=F64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("rate", "s"), [(1e-3, 1e-8), (0.5, 25.0), (10.0, 0.2), (403.0, 1.0), (2981.0, 0.01), (30.0, 4.0)]
)
def test_cumulative_probabilities_are_sums_of_probabilities(rate, s):
    y = torch.arange(20_000, dtype=F64)
    distribution = counts(rate, s)
    p = distribution.log_prob(y).exp()
    found, rest = distribution.cdf(y), distribution.survival(y)
    torch.testing.assert_close(found, p.cumsum(0), rtol=0, atol=1e-10)
    torch.testing.assert_close(found + rest, torch.ones_like(y), rtol=0, atol=1e-10)
    assert float(distribution.cdf(torch.tensor(-1.0))) == 0.0
    assert float(distribution.survival(torch.tensor(-0.5))) == 1.0
    torch.testing.assert_close(distribution.cdf(torch.tensor(3.7)), found[3])


def test_moments_are_those_of_the_probabilities():
    for rate, s in [(0.5, 0.2), (10.0, 1e-8), (403.0, 0.05), (2981.0, 0.01)]:
        distribution, y = counts(rate, s), torch.arange(20_000, dtype=F64)
        p = distribution.log_prob(y).exp()
        torch.testing.assert_close(distribution.mean, (p * y).sum(), rtol=1e-9, atol=0)
        torch.testing.assert_close(distribution.variance, (p * (y - distribution.mean) ** 2).sum(), rtol=1e-8, atol=0)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("q", [1e-6, 0.025, 0.5, 0.975, 1 - 1e-9])
def test_quantiles_are_the_first_counts_that_hold_enough(rate, q):
    s = torch.tensor([1e-8, 0.2, 25.0], dtype=F64)
    distribution = PoissonLogNormal(torch.full_like(s, math.log(rate)), s)
    k = distribution.icdf(torch.tensor(q, dtype=F64))
    assert torch.equal(k, k.round())
    exact = k < 2**50
    below = distribution.survival(k - 1) > 1 - q if q > 0.5 else distribution.cdf(k - 1) < q
    enough = distribution.survival(k) <= 1 - q if q > 0.5 else distribution.cdf(k) >= q
    assert (below & enough)[exact].all()


@pytest.mark.parametrize(("rate", "s"), [(0.5, 1.0), (403.0, 1.0), (2981.0, 0.2)])
def test_draws_follow_the_cumulative_probabilities(rate, s):
    torch.manual_seed(0)
    distribution = counts(rate, s)
    drawn = distribution.sample((20_000,))
    quantiles = distribution.icdf(torch.linspace(0.05, 0.95, 7, dtype=F64))
    shares = (drawn <= quantiles[:, None]).double().mean(1)
    assert float((shares - distribution.cdf(quantiles)).abs().max()) < 4 * 0.5 / 20_000**0.5


def test_draws_of_enormous_rates_are_finite():
    drawn = counts(1e6, 400.0).sample((1000,))
    assert drawn.isfinite().all()
    assert (drawn >= 0).all()


@pytest.mark.parametrize(
    ("y", "f", "s"), [(0, 0.0, 1.0), (0, 1.0, 30.0), (3, 1.0, 25.0), (400, 6.0, 1.0), (2, 1.0, 1e-8)]
)
def test_derivatives_are_those_of_the_integral(y, f, s):
    parameters = [torch.tensor(v, dtype=F64, requires_grad=True) for v in (f, s)]
    PoissonLogNormal(*parameters).log_prob(torch.tensor(float(y))).backward()
    with mp.workdps(20):

        def moment(power):
            edges = sorted({f - 9 * math.sqrt(s), f + 9 * math.sqrt(s), f, math.log(max(y, 1))})

            def integrand(u):
                kept = mp.exp(y * u - mp.exp(u) - y * math.log(max(y, 1)) + y - (u - f) ** 2 / (2 * s))
                return kept * power(y, mp.exp(u))

            return mp.quad(integrand, mp.linspace(edges[0], edges[-1], 16))

        total = moment(lambda y, r: 1)
        by_f = float(moment(lambda y, r: y - r) / total)
        by_s = float(moment(lambda y, r: (y - r) ** 2 - r) / total / 2)
    assert float(parameters[0].grad) == pytest.approx(by_f, rel=1e-8, abs=1e-10)
    assert float(parameters[1].grad) == pytest.approx(by_s, rel=1e-8, abs=1e-10)


def test_certain_rates_are_a_poisson_distribution():
    y = torch.arange(40.0, dtype=F64)
    distribution = PoissonLogNormal(torch.tensor(2.0, dtype=F64), torch.tensor(0.0, dtype=F64))
    expected = torch.distributions.Poisson(torch.tensor(2.0, dtype=F64).exp())
    torch.testing.assert_close(distribution.log_prob(y), expected.log_prob(y))
    torch.testing.assert_close(distribution.variance, expected.variance)


@pytest.mark.parametrize("samples", [False, True])
def test_float32_networks_get_what_float64_says_of_the_same_outputs(samples):
    f, s = torch.tensor([[13.8, 6.0, -6.0]]), torch.tensor([[0.2, 1.0, 4.0]])
    y = torch.tensor([[1_200_000.0, 380.0, 0.0]])
    drawn = f + s.sqrt() * torch.randn(50, 1, 3, generator=torch.Generator().manual_seed(0))
    outputs = OutputSamples(drawn) if samples else OutputGaussian(f, s)
    wide = OutputSamples(drawn.double()) if samples else OutputGaussian(f.double(), s.double())
    one = torch.ones(())
    found = Poisson().distribution(outputs, None, one).log_prob(y)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, Poisson().distribution(wide, None, one).log_prob(y.double()).float())
    at_one = Poisson().log_prob(f, y)
    torch.testing.assert_close(at_one, Poisson().log_prob(f.double(), y.double()).float())


def test_a_mixture_of_draws_agrees_with_itself():
    torch.manual_seed(0)
    mixture = PoissonMixture(1.0 + torch.randn(3, 2, 30, dtype=F64))
    y = torch.arange(3000, dtype=F64)[:, None, None]
    p = mixture.log_prob(y).exp()
    torch.testing.assert_close(mixture.cdf(y), p.cumsum(0))
    torch.testing.assert_close(mixture.mean, (p * y).sum(0))
    torch.testing.assert_close(mixture.variance, (p * (y - mixture.mean) ** 2).sum(0))
    median = mixture.icdf(torch.tensor(0.5))
    assert (mixture.cdf(median) >= 0.5).all()
    assert (mixture.cdf(median - 1) < 0.5).all()
    shares = (mixture.sample((20_000,)) <= median).double().mean(0)
    torch.testing.assert_close(shares, mixture.cdf(median), rtol=0, atol=0.02)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_the_distribution_comes_in_the_shape_of_one_number_per_example(pred_type):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    x, y = torch.randn(20, 3), torch.randint(5, (20,)).float()
    la = Laplace(model, "poisson", "all", "full").fit([(x, y)])
    p = la.predict(x, pred_type=pred_type)
    assert p.distribution.batch_shape == (20,)
    torch.testing.assert_close(p.distribution.log_prob(y), p.rows.distribution.log_prob(y[:, None]).squeeze(1))
    if pred_type == "glm":
        torch.testing.assert_close(p.distribution.mean, p.mean)
        torch.testing.assert_close(p.distribution.variance, p.total)
