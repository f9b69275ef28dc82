"""Each link against numerical integration of softmax over the Gaussian, and against its formula."""

from __future__ import annotations

import math

import pytest
import torch

import oracle
from laplace.linalg.sampling import Draws
from laplace.predictive.links import (
    MonteCarlo,
    bridge,
    bridge_concentration,
    bridge_norm,
    delta,
    onto_simplex,
    probit,
    softmax,
)
from laplace.predictive.outputs import OutputGaussian, root


def cases(classes):
    """Logits, and covariances with variances up to 1."""
    torch.manual_seed(classes)
    for scale in (0.05, 0.4, 1.0):
        for _ in range(4):
            f = 1.5 * torch.randn(classes, dtype=torch.float64)
            half = torch.randn(classes, classes, dtype=torch.float64)
            s = half @ half.T
            yield f, s * scale / s.diagonal().max()


@pytest.mark.parametrize("classes", [2, 3])
def test_probit_and_delta_are_within_five_hundredths_of_the_integral(classes):
    for f, s in cases(classes):
        exact = oracle.softmax_gaussian_integral(f, s)
        p = f.softmax(-1)
        second = delta(f[None], s.diagonal()[None], (s @ p)[None])[0]
        assert float((second - exact).abs().max()) < 0.05
        # The extended probit looks at variances alone: exact for independent logits.
        independent = oracle.softmax_gaussian_integral(f, s.diagonal().diag())
        assert float((probit(f[None], s.diagonal()[None])[0] - independent).abs().max()) < 0.05


def test_delta_is_exact_to_second_order():
    f, s = next(iter(cases(3)))
    p = f.softmax(-1)
    errors = []
    for scale in (1e-2, 1e-3):
        exact = oracle.softmax_gaussian_integral(f, scale * s)
        errors.append(float((delta(f[None], scale * s.diagonal()[None], (scale * s @ p)[None])[0] - exact).abs().max()))
    assert errors[1] < errors[0] / 50


@pytest.mark.parametrize("classes", [2, 3])
def test_monte_carlo_is_within_its_standard_error(classes):
    generator = torch.Generator().manual_seed(0)
    for f, s in cases(classes):
        outputs = OutputGaussian(f[None], s.diagonal()[None], s[None])
        p = MonteCarlo(softmax)(outputs, Draws(20_000, generator))[0]
        assert float((p - oracle.softmax_gaussian_integral(f, s)).abs().max()) < 5 * 0.5 / 20_000**0.5


def dirichlet(f, v):
    c = len(f)
    return (1 - 2 / c + f.exp() / c**2 * (-f).exp().sum()) / v


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_bridge_is_its_formula(classes):
    for f, s in cases(classes):
        v = s.diagonal()
        alpha = dirichlet(f, v)
        torch.testing.assert_close(bridge_concentration(f[None], v[None])[0], alpha)
        torch.testing.assert_close(bridge(f[None], v[None])[0], alpha / alpha.sum())
        m = v.mean() / math.sqrt(classes / 2)
        normed = dirichlet(f / m.sqrt(), v / m)
        torch.testing.assert_close(bridge_norm(f[None], v[None])[0], normed / normed.sum())


@pytest.mark.parametrize("link", [bridge, bridge_norm, probit])
def test_equal_variances_keep_the_ranking_of_the_classes(link):
    torch.manual_seed(0)
    f = torch.randn(50, 6, dtype=torch.float64)
    p = link(f, torch.full_like(f, 0.7))
    assert torch.equal(p.argsort(-1), f.argsort(-1))
    torch.testing.assert_close(p.sum(-1), torch.ones(50, dtype=torch.float64))


def test_bridge_does_not_depend_on_a_shift_of_the_logits():
    f, v = torch.randn(4, 5, dtype=torch.float64), torch.rand(4, 5, dtype=torch.float64)
    torch.testing.assert_close(bridge(f, v), bridge(f + 3.7, v))


@pytest.mark.parametrize("link", [bridge, bridge_norm])
def test_bridge_survives_extreme_logits(link):
    f = torch.tensor([[200.0, 0.0, -200.0], [90.0, -90.0, 0.0]])
    p = link(f, torch.full_like(f, 1e-3))
    assert p.isfinite().all()
    assert p.argmax(-1).eq(0).all()


def test_probit_tends_to_uniform_for_large_variances_and_to_softmax_for_small_ones():
    f = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(probit(f, torch.full_like(f, 1e12)), torch.full_like(f, 0.25), atol=1e-5, rtol=0)
    torch.testing.assert_close(probit(f, torch.zeros_like(f)), f.softmax(-1))


def test_what_leaves_the_simplex_is_clipped_and_counted():
    p, outside = onto_simplex(torch.tensor([[1.2, -0.2], [0.5, 0.5]]))
    assert outside == 1
    assert torch.equal(p, torch.tensor([[1.0, 0.0], [0.5, 0.5]]))


def test_root_of_a_singular_covariance_still_squares_to_it():
    u = torch.randn(4, 3, 1, dtype=torch.float64)
    s = u @ u.mT
    torch.testing.assert_close(root(s) @ root(s).mT, s)
