"""Formulas at their ends: narrow and wide posteriors, confident logits, both dtypes, against 60 digits."""

from __future__ import annotations

import math

import mpmath as mp
import pytest
import torch

from laplace.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian, Ordinal, Poisson
from laplace.likelihoods.bernoulli import probit as binary_probit
from laplace.linalg.sampling import Draws
from laplace.predictive.entropy import entropy_of_label
from laplace.predictive.links import (
    bridge,
    bridge_concentration,
    bridge_norm,
    bridge_norm_concentration,
    delta,
    onto_simplex,
    probit,
)
from laplace.predictive.outputs import OutputGaussian

VARIANCES = (1e-8, 1e-4, 1.0, 100.0, 1e4)
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-11}


def cases(dtype):
    """Logits up to 80 on either side, and unequal variances."""
    torch.manual_seed(0)
    for classes in (2, 3, 10):
        for s in VARIANCES:
            for largest in (1.0, 20.0, 80.0):
                f = largest * (2 * torch.rand(classes, dtype=dtype) - 1)
                f[:2] = torch.tensor([largest, -largest])
                yield f, s * (0.5 + torch.rand(classes, dtype=dtype))


def shares(weights):
    return [w / mp.fsum(weights) for w in weights]


def probit_formula(f, v):
    return shares([mp.exp(a / mp.sqrt(1 + mp.pi / 8 * b)) for a, b in zip(f, v, strict=True)])


def bridge_formula(f, v):
    c, inverse = len(f), mp.fsum(mp.exp(-a) for a in f)
    return shares([(1 - mp.mpf(2) / c + mp.exp(a) / c**2 * inverse) / b for a, b in zip(f, v, strict=True)])


def bridge_norm_formula(f, v):
    m = mp.fsum(v) / len(v) / mp.sqrt(mp.mpf(len(f)) / 2)
    return bridge_formula([a / mp.sqrt(m) for a in f], [b / m for b in v])


def delta_formula(f, v):
    """For independent outputs."""
    p = shares([mp.exp(a) for a in f])
    product = [a * b for a, b in zip(p, v, strict=True)]
    quadratic = mp.fsum(a * b for a, b in zip(p, product, strict=True))
    return [a + a / 2 * (b - 2 * c + 2 * quadratic - mp.fsum(product)) for a, b, c in zip(p, v, product, strict=True)]


def independent_delta(f, v):
    return delta(f, v, (f.double().softmax(-1) * v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("link", "formula"),
    [
        (probit, probit_formula),
        (bridge, bridge_formula),
        (bridge_norm, bridge_norm_formula),
        (independent_delta, delta_formula),
    ],
    ids=["probit", "bridge", "bridge_norm", "delta"],
)
def test_links_are_their_formulas_up_to_rounding(link, formula, dtype):
    for f, v in cases(dtype):
        p = link(f[None], v[None])[0]
        with mp.workdps(60):
            numbers = formula([mp.mpf(a) for a in f.tolist()], [mp.mpf(a) for a in v.tolist()])
            expected = torch.tensor([float(a) for a in numbers], dtype=torch.float64)
        error = (p.double() - expected).abs().max() / expected.abs().max().clamp(min=1)
        assert float(error) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_link_stays_on_the_simplex_and_every_dirichlet_is_one(dtype):
    for f, v in cases(dtype):
        f, v = f[None], v[None]
        for p in (probit(f, v), bridge(f, v), bridge_norm(f, v), onto_simplex(delta(f, v, f.softmax(-1) * v))[0]):
            assert ((p >= 0) & (p <= 1)).all()
            assert float(p.sum() - 1) == pytest.approx(0, abs=1e-5)
        for alpha in (bridge_concentration(f, v), bridge_norm_concentration(f, v)):
            assert alpha.isfinite().all()
            assert (alpha > 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_binary_probit_is_its_formula(dtype):
    for s in VARIANCES:
        f = torch.tensor([-80.0, -1.0, 0.0, 3.0, 80.0], dtype=dtype)
        found = binary_probit(f, torch.full_like(f, s)).double()
        with mp.workdps(40):
            root = mp.sqrt(1 + mp.pi / 8 * mp.mpf(float(torch.tensor(s, dtype=dtype))))
            expected = [float(1 / (1 + mp.exp(-mp.mpf(a) / root))) for a in f.tolist()]
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=80 * DTYPES[dtype], atol=0)  # 80 times that of the exponent


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("s", [1e-8, 1e-5, 1e-2, 1.0, 1e2, 1e4])
def test_epistemic_uncertainty_is_the_mutual_information_of_narrow_and_wide_posteriors(s, dtype):
    """Against the integral; a Monte-Carlo mean of n draws is off by some of its n^-1/2."""
    f = torch.tensor([[-2.0], [0.3], [4.0]], dtype=dtype)
    outputs, n = OutputGaussian(f, torch.full_like(f, s)), 20_000
    for likelihood in (Bernoulli(), Ordinal([-1.0, 0.5])):
        p = likelihood.links["quadrature"].apply(outputs, Draws(1))
        found = likelihood.uncertainty(outputs, p, torch.ones(()), Draws(n))[0].reshape(-1)
        z = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
        weights = torch.softmax(-z.square() / 2, 0)
        for value, mean in zip(found.double(), f.double(), strict=True):
            each = likelihood.inverse_link((mean + math.sqrt(s) * z)[:, None])
            each = torch.cat([each, 1 - each], 1) if each.shape[1] == 1 else each
            center = weights @ each
            exact = float(weights @ (torch.xlogy(each, each / center) - each + center).sum(1))
            assert float(value) == pytest.approx(exact, rel=0.1, abs=1e-13)


def test_wide_posteriors_are_uncertain_of_every_class_and_their_labels_are_not():
    f = torch.zeros(1, 3)
    outputs = OutputGaussian(f, torch.full_like(f, 1e8))
    p = torch.full((1, 3), 1 / 3)
    epistemic, aleatoric = Categorical().uncertainty(outputs, p, torch.ones(()), Draws(20_000))
    assert float(epistemic) == pytest.approx(math.log(3), abs=1e-3)
    assert float(aleatoric) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_entropy_of_a_rare_label_has_a_small_relative_error(dtype):
    p = torch.tensor([0.0, 1e-30, 1e-10, 1e-5, 0.3, 0.5, 1.0], dtype=dtype)
    with mp.workdps(50):
        exact = [mp.mpf(a) for a in p.tolist()]
        exact = [float(-a * mp.log(a) - (1 - a) * mp.log(1 - a)) if 0 < a < 1 else 0.0 for a in exact]
    torch.testing.assert_close(entropy_of_label(p).double(), torch.tensor(exact).double(), rtol=1e-6, atol=0)


def test_counts_of_enormous_rates_are_drawn_in_the_end():
    f = torch.tensor([[40.0], [100.0], [5.0]], dtype=torch.float64)
    drawn = Poisson().sample(f, 4, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn[:, :2].log(), f[:2].expand(4, 2, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("s", [1e-8, 1.0, 100.0])
def test_predicted_noise_is_its_closed_form(s, dtype):
    f = torch.tensor([[0.3, -80.0], [1.0, 20.0]], dtype=dtype)
    outputs = OutputGaussian(f, torch.full_like(f, s))
    epistemic, aleatoric = HeteroscedasticGaussian().uncertainty(outputs, None, torch.ones(()), Draws(2))
    torch.testing.assert_close(epistemic, torch.full_like(epistemic, s))
    expected = torch.tensor([[math.exp(-80 + s / 2)], [math.exp(20 + s / 2)]], dtype=torch.float64)
    torch.testing.assert_close(aleatoric.double(), expected, rtol=100 * torch.finfo(dtype).eps, atol=0)
