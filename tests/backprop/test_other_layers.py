"""Bilinear layers, transformers' Conv1D and every normalisation: exact by rules of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, assert_exact, labels
from laplace import Laplace
from networks import cut

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")

NORMS = {
    "batch": lambda: nn.BatchNorm1d(4),
    "layer": lambda: nn.LayerNorm(5),
    "layer, two dimensions, no bias": lambda: nn.LayerNorm((4, 5), bias=False),
    "rms": lambda: nn.RMSNorm(5),
    "rms, with eps": lambda: nn.RMSNorm((4, 5), eps=0.1),
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm1d(4, affine=True),
    "instance, running": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
}


class Normed(nn.Module):
    def __init__(self, norm: nn.Module, frames: bool) -> None:
        super().__init__()
        self.inp, self.norm, self.head, self.frames = nn.Linear(5, 5), norm, nn.Linear(5, 2), frames

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        h = torch.tanh(self.norm(h.flatten(0, 1) if self.frames else h)).mean(-2)
        return self.head(h.unflatten(0, x.shape[:2]).mean(1) if self.frames else h)


@pytest.mark.parametrize("frames", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_normalisations_are_exact(norm, frames):
    torch.manual_seed(0)
    model = Normed(NORMS[norm](), frames).double()
    x = torch.randn(7, *([3] if frames else []), 4, 5, dtype=torch.float64)
    with torch.no_grad():
        for p in model.norm.parameters():
            p.add_(0.5 * torch.randn_like(p))
    model.train()
    model(x)  # running statistics
    assert_exact(model.eval(), x, sizes=(4, 1, 2), kinds=("ggn",), rules={"norm": "norm"})


class Pairs(nn.Module):
    def __init__(self, positions: bool, bias: bool) -> None:
        super().__init__()
        self.positions, self.a, self.b = positions, nn.Linear(3, 3), nn.Linear(3, 2)
        self.bi, self.head = nn.Bilinear(3, 2, 4, bias=bias), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.bi(torch.tanh(self.a(x)), input2=torch.tanh(self.b(x))))
        return self.head(h.mean(1) if self.positions else h)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("positions", [True, False])
def test_bilinear_layers_are_exact(positions, bias):
    torch.manual_seed(0)
    x = torch.randn(7, *([3] if positions else []), 3, dtype=torch.float64)
    assert_exact(Pairs(positions, bias).double(), x, sizes=(4, 1, 2), kinds=("ggn",), rules={"bi": "bilinear"})


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kronecker_factors_of_a_bilinear_layer_are_those_of_products_of_features(sharing):
    torch.manual_seed(0)
    model, x = Pairs(True, True).double(), torch.randn(6, 3, 3, dtype=torch.float64)
    y, names = labels("regression", 6, 2), [k for k, _ in model.named_parameters()]
    la = Laplace(model, "regression", "all", "kron", weight_sharing=sharing).fit(cut(x, y, 4))
    expected = oracle.kron_all(model, names, x, torch.eye(2, dtype=torch.float64).expand(6, 2, 2), sharing)
    assert_close(la.H.to_matrix(), torch.block_diag(*[expected[name] for name in names]))


def test_a_wide_bilinear_layer_has_no_kronecker_form(monkeypatch):
    monkeypatch.setattr("laplace.backprop.layers.bilinear._WIDE", 5)
    torch.manual_seed(0)
    model, x = Pairs(True, True).double(), torch.randn(6, 3, 3, dtype=torch.float64)
    assert_exact(model, x, sizes=(4, 2), kinds=("ggn",), rules={"bi": "bilinear"})
    la = Laplace(model, "regression", "all", "kron").fit([(x, labels("regression", 6, 2))])
    assert {row.name: row.kept for row in la.coverage()}["bi.weight"] == "dense 24"


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_conv1d_is_a_linear_layer_transposed_and_known_by_its_name(sharing, monkeypatch):
    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(4, 3), nn.Tanh(), Mean(), nn.Linear(4, 2)).double()
    linear = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Mean(), model[3]).double()
    linear[0].weight.data, linear[0].bias.data = model[0].weight.data.T, model[0].bias.data
    x, y = torch.randn(7, 3, 3, dtype=torch.float64), labels("regression", 7, 2)
    assert_exact(model, x, kinds=("ggn",), rules={"0": "conv1d of transformers"})
    for structure in ("kron", "ekfac"):
        one, two = (
            Laplace(m, "regression", "all", structure, weight_sharing=sharing).fit(cut(x, y, 4))
            for m in (model, linear)
        )
        assert_close(one.log_marginal_likelihood(), two.log_marginal_likelihood())
        assert_close(one(x)[1], two(x)[1])


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)
