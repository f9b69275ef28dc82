"""The link 'one_vs_rest': against brute-force integration, against draws, and in its limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oracle
from laplace.predictive.links import probit
from laplace.predictive.logistic import expected_sigmoid
from laplace.predictive.one_vs_rest import _integrated, one_vs_rest, softmax_of_independent
from laplace.predictive.outputs import OutputGaussian

Case = tuple[Tensor, Tensor]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL of q from p."""
    return (p * (p.clamp(min=1e-300) / q).log()).sum(-1)


def drawn(f: Tensor, covariance: Tensor, n: int = 2**14) -> Tensor:  # (N, C), (N, C, C) -> (N, C)
    """The mean of softmax over quasi-random draws, the same for all."""
    uniform = torch.quasirandom.SobolEngine(f.shape[1], scramble=True, seed=0).draw(n, dtype=torch.float64)
    eps = torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12))
    values, vectors = torch.linalg.eigh(covariance)
    roots = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    return torch.stack([(mean + eps @ root.T).softmax(-1).mean(0) for mean, root in zip(f, roots, strict=True)])


def last_layers(classes: int, prior: float, n: int = 12) -> Case:
    """Logits and their covariances by the Kronecker factors of a last layer, at inputs near and far from the data."""
    rng, features = seeded(classes), min(32, max(8, classes))
    centres = torch.randn(classes, features, generator=rng, dtype=torch.float64)
    noise = torch.randn(20 * classes, features, generator=rng, dtype=torch.float64)
    phi = centres[torch.arange(len(noise)) % classes] + noise
    bias = -centres.square().sum(1) / 2
    p = (phi @ centres.T + bias).softmax(-1)
    alpha, q_a = torch.linalg.eigh(phi.T @ phi / len(phi))
    beta, q_b = torch.linalg.eigh(p.sum(0).diag() - p.T @ p)
    spread = torch.linspace(0.8, 2.2, n, dtype=torch.float64).unsqueeze(1)
    new = centres[torch.arange(n) % classes] + spread * torch.randn(n, features, generator=rng, dtype=torch.float64)
    beta = beta.clamp(min=0).unsqueeze(1)
    w = (new @ q_a).square() @ (1 / (beta * alpha + prior)).T + (1 / (beta + prior)).T
    return new @ centres.T + bias, torch.einsum("co,no,do->ncd", q_b, w, q_b)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("size", [1e-3, 0.2, 1.0, 10.0, 300.0])
def test_it_is_the_integral_over_independent_outputs(classes: int, size: float) -> None:
    rng = seeded(classes)
    f = 3 * torch.randn(4, classes, generator=rng, dtype=torch.float64)
    u = size * (0.5 + torch.rand(4, classes, generator=rng, dtype=torch.float64))
    exact = torch.stack([oracle.softmax_of_independent(*row) for row in zip(f, u, strict=True)])
    torch.testing.assert_close(exact.sum(1), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-6)
    found = softmax_of_independent(f, u)
    assert float((found - exact).abs().max()) < 6e-4
    likely = exact > 1e-4
    assert float((found / exact).log()[likely].abs().max()) < 0.06


@pytest.mark.parametrize(
    ("f", "u"),
    [
        ([0.0, 1.0, -3.0, 2.0], [0.01, 100.0, 9.0, 0.4]),
        ([-12.0, 6.6, 8.0], [142.0, 0.02, 0.126]),
        ([0.0, 0.0, 0.0], [1e4, 0.01, 1.0]),
        ([0.0, -30.0], [0.0, 1e3]),
        ([5.0, 0.0, 0.0, -50.0], [0.0, 1.0, 30.0, 1e4]),
        ([10.0, 0.0, 0.0], [400.0, 0.0, 0.0]),
    ],
)
def test_outputs_of_very_different_variances_are_integrated_too(f: list[float], u: list[float]) -> None:
    mean, variance = (torch.tensor(values, dtype=torch.float64) for values in (f, u))
    exact = oracle.softmax_of_independent(mean, variance)
    assert float((softmax_of_independent(mean[None], variance[None])[0] - exact).abs().max()) < 1e-3


@pytest.mark.parametrize("classes", [2, 4, 10])
def test_variances_may_lie_five_decades_apart(classes: int) -> None:
    rng, n = seeded(classes), 6
    u = 10 ** (5 * torch.rand(n, classes, generator=rng, dtype=torch.float64) - 2)
    spread = 3 + u.sqrt().mean(1, keepdim=True) * torch.rand(n, 1, generator=rng, dtype=torch.float64)
    f = spread * torch.randn(n, classes, generator=rng, dtype=torch.float64)
    exact = torch.stack([oracle.softmax_of_independent(*row) for row in zip(f, u, strict=True)])
    assert float((softmax_of_independent(f, u) - exact).abs().max()) < 5e-4


@pytest.mark.parametrize("size", [1e-3, 0.1, 0.5, 1.0])
def test_small_variances_are_integrated_closely(size: float) -> None:
    f = 3 * torch.randn(6, 5, generator=seeded(), dtype=torch.float64)
    u = size * torch.rand(6, 5, generator=seeded(1), dtype=torch.float64)
    exact = torch.stack([oracle.softmax_of_independent(*row) for row in zip(f, u, strict=True)])
    assert float((softmax_of_independent(f, u) - exact).abs().max()) < 1e-5


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_two_classes_are_exact_whatever_their_covariance(shift):
    f = torch.randn(50, 2, generator=seeded(), dtype=torch.float64) * 4
    half = torch.randn(50, 2, 2, generator=seeded(1), dtype=torch.float64) * torch.logspace(-2, 1.5, 50)[:, None, None]
    s = half @ half.mT + shift
    difference = s[:, 0, 0] + s[:, 1, 1] - 2 * s[:, 0, 1]
    exact = expected_sigmoid(f[:, 0] - f[:, 1], difference)
    found = one_vs_rest(f, OutputGaussian(f, s.diagonal(dim1=1, dim2=2), s).contrast_variance)
    assert float((found[:, 0] - exact).abs().max()) < 3e-4


@pytest.mark.parametrize(
    ("classes", "prior", "most"),
    [(3, 1e-3, 1e-4), (10, 1.0, 1e-2), (10, 1e-3, 1e-2), (150, 1.0, 1e-2), (150, 0.03, 2e-2)],
)
def test_it_is_close_to_draws_for_posteriors_of_last_layers(classes, prior, most):
    f, s = last_layers(classes, prior)
    truth, variance = drawn(f, s), s.diagonal(dim1=1, dim2=2)
    found = one_vs_rest(f, OutputGaussian(f, variance, s).contrast_variance)
    assert float(divergence(truth, found).mean()) < most
    if prior < 1:  # where only the prior bounds the common shift, probit is ruined by it
        assert float(divergence(truth, probit(f, variance)).mean()) > 10 * most


@pytest.mark.parametrize("size", [1e-3, 0.2, 1.0, 5.0])
def test_far_classes_are_integrated_by_their_two_sums(size: float) -> None:
    rng, n, classes = seeded(), 6, 120
    f = 3 * torch.randn(n, classes, generator=rng, dtype=torch.float64)
    f[:, 0] += torch.linspace(2, 20, n, dtype=torch.float64)  # near ties, and one class far above all others
    u = size * (0.5 + torch.rand(n, classes, generator=rng, dtype=torch.float64))
    found, exact = (
        softmax_of_independent(f, u),
        torch.stack([oracle.softmax_of_independent(*row) for row in zip(f, u, strict=True)]),
    )
    torch.testing.assert_close(found.sum(1), torch.ones(n, dtype=torch.float64))
    assert float((found - exact).abs().max()) < 6e-4
    assert float((found / exact).log()[exact > 1e-4].abs().max()) < 0.06
    alone = torch.cat([softmax_of_independent(f[i : i + 1], u[i : i + 1]) for i in range(n)])
    torch.testing.assert_close(alone, found)  # whichever rows it is grouped with
    together = _integrated(f - f.amax(1, keepdim=True), u)[0]  # without two sums
    assert float((found - together).abs().max()) < 1e-4


def test_gradients_pass_through_near_and_far_classes() -> None:
    f = (2 * torch.randn(5, 40, generator=seeded(), dtype=torch.float64)).requires_grad_()
    u = torch.rand(5, 40, generator=seeded(1), dtype=torch.float64).requires_grad_()
    with torch.no_grad():
        f[:, 3] += 8
    label = torch.tensor([3, 3, 7, 20, 39])

    def loss() -> Tensor:
        return -softmax_of_independent(f, u)[torch.arange(5), label].log().sum()

    loss().backward()
    assert f.grad is not None
    assert u.grad is not None
    for tensor, gradient in ((f, f.grad), (u, u.grad)):
        for where in [(0, 3), (2, 7), (4, 39), (1, 11)]:
            with torch.no_grad():
                tensor[where] += 1e-4
                above = loss()
                tensor[where] -= 2e-4
                below = loss()
                tensor[where] += 1e-4
            slope = float(above - below) / 2e-4
            assert float(gradient[where]) == pytest.approx(slope, rel=2e-2, abs=1e-3)


def test_limits_and_symmetries() -> None:
    f = 3 * torch.randn(9, 6, generator=seeded(), dtype=torch.float64)
    v = torch.rand(9, 6, generator=seeded(1), dtype=torch.float64) * 5
    p = softmax_of_independent(f, v)
    torch.testing.assert_close(p.sum(1), torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(softmax_of_independent(f, torch.zeros_like(f)), f.softmax(-1))
    assert float((softmax_of_independent(f, torch.full_like(f, 1e-6)) - f.softmax(-1)).abs().max()) < 1e-6
    torch.testing.assert_close(softmax_of_independent(f + 1000, v), p)
    order = torch.randperm(6, generator=seeded())
    torch.testing.assert_close(softmax_of_independent(f[:, order], v[:, order]), p[:, order])
    uniform = softmax_of_independent(f, torch.full_like(f, 1e12))
    assert float((uniform - 1 / 6).abs().max()) < 1e-3
    torch.testing.assert_close(torch.cat([softmax_of_independent(f[i : i + 1], v[i : i + 1]) for i in range(9)]), p)
    assert softmax_of_independent(f[:0], v[:0]).shape == (0, 6)


@pytest.mark.parametrize("size", [0.01, 0.3, 30.0])
def test_float32_is_near_float64(size: float) -> None:
    f = 5 * torch.randn(40, 12, generator=seeded(), dtype=torch.float64)
    v = size * torch.rand(40, 12, generator=seeded(1), dtype=torch.float64)
    single = softmax_of_independent(f.float(), v.float())
    assert single.dtype is torch.float32
    assert float((single - softmax_of_independent(f, v)).abs().max()) < 5e-6


def test_logits_without_bounds_stay_finite() -> None:
    f = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0], [1e3, 999.0, -1e6]])
    for v in (0.0, 1e-30, 1.0, 1e10):
        variance = torch.full_like(f, v).requires_grad_()
        logits = f.clone().requires_grad_()
        p = softmax_of_independent(logits, variance)
        assert p.isfinite().all()
        p.clamp(min=1e-30).log()[:, 0].sum().backward()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()
        assert variance.grad is not None
        assert variance.grad.isfinite().all()
