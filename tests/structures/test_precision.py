"""In float32 the outputs' variances are those of float64, also where the data leaves next to nothing of the prior's."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import labels
from laplace import Laplace
from laplace.network.inputs import Inputs
from networks import cut

BOUNDS = {1e-6: 2e-2, 1e-2: 3e-5, 1.0: 3e-6, 1e4: 1e-6}  # prior precision: error; the first is that of H itself
RANKS = {"lowrank": {"all": 54, "last_layer": 5}, "inf": {"all": 30, "last_layer": 4}}
N = 80


class Shared(nn.Module):
    """Weights that are used at one position and at many, 54 of them; with one output no eigenvalues are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix, self.head = nn.Conv1d(1, 3, 2), nn.Linear(9, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(torch.tanh(self.conv(x.unsqueeze(1))).flatten(1))))


@functools.cache
def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        Shared().double(),
        torch.randn(N, 4).double(),
        labels("regression", N, 1).float().double(),
    )  # float32's numbers


def fitted(structure: str, subset: str, dtype: torch.dtype) -> Laplace:
    model, x, y = problem()
    options = {"rank": RANKS[structure][subset]} if structure in RANKS else {}
    la = Laplace(copy.deepcopy(model).to(dtype), "regression", subset, structure, **options)
    return la.fit(cut(x.to(dtype), y.to(dtype), 30))


@functools.cache
def curvature(structure: str, subset: str) -> tuple[Tensor, Tensor]:
    """The Jacobian at the training inputs, and H, in float64."""
    model, x, _ = problem()
    la = fitted(structure, subset, torch.float64)
    return oracle.jacobian_loop(model, list(la.posterior.fit.layout.names), x)[
        :, 0
    ], la.posterior.fit.curvature.matrix()


@pytest.mark.parametrize("kind", ["scalar", "layerwise"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "block", "lowrank", "inf"])
def test_variances_in_float32_are_those_of_float64(structure, subset, kind):
    _, x, _ = problem()
    jac, h = curvature(structure, subset)
    la = fitted(structure, subset, torch.float32)
    (run,) = la.runner.runs(la.posterior.fit, Inputs(x.float()), whole=True)
    sizes = la.posterior.fit.layout.sizes
    for prior, bound in BOUNDS.items():
        each = [prior * (1 + i * (kind == "layerwise")) for i in range(len(sizes))]
        la.prior_precision = torch.tensor(each if kind == "layerwise" else prior)
        delta = torch.cat([torch.full((n,), d).double() for n, d in zip(sizes, each, strict=True)])
        joint = jac @ torch.linalg.inv(h + delta.diag()) @ jac.T
        found, variance = la.posterior.gaussian, joint.diagonal()
        got = {
            "variance": (found.variance(run.jacobian()).flatten(), variance),
            "covariance": (found.covariance(run.jacobian()).flatten(), variance),
            "product": (found.product(run.jacobian(), torch.ones(N, 1)).flatten(), variance),
            "joint": (found.joint(run.jacobian()).reshape(N, N), joint),
            "sweep": (next(iter(la.posterior.fit.curvature.sweep(run.jacobian(), [found]))).flatten(), variance),
        }
        for what, (mine, exact) in got.items():
            assert mine.dtype is torch.float32
            error = float(((mine.double() - exact).abs() / variance).max())
            assert error <= bound, f"{what} at {prior}: {error:.1e}"
