"""Eigenvalues that are equal: what is kept in an eigenbasis depends on the data alone, not on rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import LaplaceWarning
from laplace.linalg.symmetric import eigh, settled
from networks import cut

N, CLASSES = 36, 3
Problem = tuple[nn.Module, Tensor]


class OverPositions(nn.Module):
    """A network that sees several positions, whose mean is its output."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(features, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, I) -> (N, CLASSES)
        return self.head(torch.tanh(self.inner(x))).mean(1)


def strided(symmetric: bool = False) -> Problem:
    """Of odd sides, so that the first and the last offset of the kernel see the same pixels: their means are equal."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(27, CLASSES),
    )
    x = torch.randn(N, 1, 9, 9)
    return model, x + x.flip(3) + x.flip(2) + x.flip(2, 3) if symmetric else x


def features(kind: str) -> Problem:
    """At several positions, with inputs that are repeated, zero, or sum to zero over the positions."""
    x = torch.randn(N, 4, 6)
    if kind == "repeated":
        x[..., 3:] = x[..., :3]
    elif kind == "zero":
        x[..., 2:] = 0
    elif kind == "centred":  # the mean over the positions has rank 2, what is seen at each of them 6
        x[..., 2:] -= x[..., 2:].mean(1, keepdim=True)
    return OverPositions(6), x


def units() -> Problem:
    """Hidden units that are the same."""
    model, x = features("repeated")
    with torch.no_grad():
        model.inner.weight[2:4] = model.inner.weight[:2]
        model.inner.bias[2:4] = model.inner.bias[:2]
        model.head.weight[:, 2:4] = model.head.weight[:, :2]
    return model, x


def linear() -> Problem:
    """No positions; inputs that come in pairs."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    with torch.no_grad():
        model[0].weight[4:] = model[0].weight[:4]
        model[0].bias[4:] = model[0].bias[:4]
        model[2].weight[:, 4:] = model[2].weight[:, :4]
    return model, torch.randn(N, 3).repeat(1, 2)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "strided convolution": strided,
    "symmetric images": partial(strided, symmetric=True),
    "repeated features": partial(features, "repeated"),
    "zero features": partial(features, "zero"),
    "features with mean zero": partial(features, "centred"),
    "identical units": units,
    "linear": linear,
}
SHUFFLED = torch.randperm(N, generator=torch.Generator().manual_seed(1))
QUICK = [(13, SHUFFLED), (N, torch.arange(N).flip(0))]
SLOW = [(7, torch.arange(N)), (1, torch.arange(N))]


def posterior(name: str, structure: str, sharing: str, dtype: torch.dtype, size: int, order: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = PROBLEMS[name]()
    x, y = x.to(dtype), torch.arange(N) % CLASSES
    structure, _, rank = structure.partition(" ")
    options = {"rank": int(rank)} if rank else {}
    la = Laplace(
        model.to(dtype), "classification", "all", structure, weight_sharing=sharing, prior_precision=0.1, **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)
        la.fit(cut(x[order], y[order], size))
    return [la.posterior_variance, la.predict(x).outputs.variance, la.log_marginal_likelihood().reshape(1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", list(PROBLEMS))
def test_posterior_does_not_depend_on_batches_or_their_order(name, dtype):
    _require_one_posterior(name, "inf 6" if "strided" in name else "ekfac", "reduce", dtype, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("structure", ["ekfac", "inf", "inf 6"])
@pytest.mark.parametrize("name", list(PROBLEMS))
def test_posterior_of_either_structure_and_sharing_does_not_depend_on_batches(name, structure, sharing, dtype):
    _require_one_posterior(name, structure, sharing, dtype, QUICK + SLOW)


def _require_one_posterior(
    name: str, structure: str, sharing: str, dtype: torch.dtype, orders: list[tuple[int, Tensor]]
) -> None:
    ask = partial(posterior, name, structure, sharing, dtype)
    first = ask(N, torch.arange(N))
    bound = 1e-6 if dtype == torch.float64 else 1e-3
    for size, order in orders:
        for a, b in zip(ask(size, order), first, strict=True):
            assert float(((a - b).abs() / b.abs()).max()) <= bound


def symmetric(values: Tensor, noise: float) -> Tensor:
    """A matrix with these eigenvalues and always the same eigenspaces, up to noise."""
    q = torch.linalg.qr(torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(0)).double())[0]
    e = noise * torch.randn_like(q)
    return (q * values) @ q.T + e + e.T


@pytest.mark.parametrize("places", [(0, 1, 2, 3), (2, 3, 5, 6), (1, 2, 4, 7)])
def test_pairs_of_equal_sums_have_one_basis(places):
    """Differences of neighbours in an arithmetic progression are alike: no progression tells them apart."""
    a, b, c, d = places
    u, v = torch.zeros(2, 8).double()
    u[a], u[b], v[c], v[d] = 1, 1, 1, 1
    other = (u + v) / 2, (u - v) / 2
    found = [eigh(torch.outer(x, x) / 2 + torch.outer(z, z) / 2, torch.float64, ties=True)[1] for x, z in [(u, v)]]
    noisy = torch.outer(*[other[0]] * 2) + torch.outer(*[other[1]] * 2) + 1e-16 * torch.eye(8).double().flip(0)
    found.append(eigh(noisy, torch.float64, ties=True)[1])
    torch.testing.assert_close(found[0].abs(), found[1].abs(), rtol=0, atol=1e-7)


def test_basis_of_equal_eigenvalues_survives_rounding():
    values = torch.tensor([0, 0, 0, 1e-4, 1e-4, 0.5, 0.5, 0.5, 0.7, 1.0]).double()
    torch.manual_seed(1)
    exact = eigh(symmetric(values, 0), torch.float64, ties=True)[1]
    for _ in range(5):
        rounded = eigh(symmetric(values, 1e-16), torch.float64, ties=True)[1]
        torch.testing.assert_close(rounded.abs(), exact.abs(), rtol=0, atol=1e-6)


def test_basis_changes_smoothly_as_eigenvalues_part():
    """From equal to apart in small steps, there is no step at which the eigenvectors turn much."""
    gaps = torch.linspace(0, 3e-6, 300).tolist()
    bases = [eigh(symmetric(torch.tensor([0.2, 0.5, 0.5 + gap, 1.0]).double(), 0), torch.float64, True) for gap in gaps]
    overlaps = [(a[1].T @ b[1]).abs() for a, b in pairwise(bases)]
    assert min(float(overlap.amax(0).min()) for overlap in overlaps) > 0.99


def test_eigenvectors_that_are_apart_stay():
    matrix = symmetric(torch.tensor([0.0, 0.1, 0.3, 1.0]).double(), 0)
    _, plain, _ = eigh(matrix, torch.float64)
    assert torch.equal(plain, eigh(matrix, torch.float64, ties=True)[1])


def test_what_is_settled_is_orthonormal_and_leaves_the_matrix():
    matrix = symmetric(torch.tensor([0.0, 0.0, 0.3, 0.3 + 1e-9, 1.0]).double(), 0)
    values, vectors = torch.linalg.eigh(matrix)
    found = settled(values.clamp(min=0), vectors, 1e-6, 1e-12)
    torch.testing.assert_close(found.T @ found, torch.eye(5).double(), rtol=0, atol=1e-14)
    torch.testing.assert_close((found * values) @ found.T, matrix, rtol=0, atol=1e-8)
