"""Second derivatives: right where torch's own are wrong or missing, and refused where they are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

from exact import assert_close
from laplace import Laplace
from laplace.backprop.twice import twice_differentiable
from laplace.errors import ModelError


def by_differences(model: nn.Module, x: Tensor, y: Tensor, task: str) -> Tensor:
    """The Hessian of the loss at unit noise, by central differences of its gradient."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    start = nn.utils.parameters_to_vector(parameters).detach().clone()

    def gradient(weights: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(weights, parameters)
        f = model.eval()(x)
        loss = (
            nn.functional.cross_entropy(f, y, reduction="sum") if task == "classification" else (f - y).pow(2).sum() / 2
        )
        found = torch.autograd.grad(loss, parameters)
        return torch.cat([(g.to_dense() if g.is_sparse else g).flatten() for g in found])

    steps = 1e-5 * torch.eye(len(start), dtype=start.dtype)
    rows = [(gradient(start + step) - gradient(start - step)) / 2e-5 for step in steps]
    nn.utils.vector_to_parameters(start, parameters)
    return torch.stack(rows)


def fitted(model: nn.Module, x: Tensor, y: Tensor, task: str, structure: str = "full", **options: Any) -> Laplace:
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    return Laplace(model, task, "all", structure, curvature="hessian", **options).fit(batches)


def regression(n_inputs: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(7, n_inputs, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, old_weight_norm])
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_hessian_of_normed_weights_is_that_of_differences(norm, dim):
    x, y = regression()
    model = nn.Sequential(norm(nn.Linear(3, 4), dim=dim), nn.Tanh(), nn.Linear(4, 2)).double()
    expected = by_differences(model, x, y, "regression")
    assert_close(fitted(model, x, y, "regression").H, expected, 1e-6)
    assert_close(fitted(model, x, y, "regression", "diag").H, expected.diagonal(), 1e-6)


class Cube(torch.autograd.Function):
    """x^3, whose backward is right; `halved` says by how much its double backward is wrong."""

    halved = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        square = x.detach() ** 2 + Cube.halved * (x**2 - x.detach() ** 2)
        return 3 * square * g


class Cubes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Cube.apply(self.first(x)))


@pytest.mark.parametrize("structure", ["full", "diag", "lowrank"])
def test_wrong_double_backward_is_refused_with_what_to_write(structure, monkeypatch):
    x, y = regression()
    model = Cubes().double()
    fitted(model, x, y, "regression", structure)
    monkeypatch.setattr(Cube, "halved", 0.5)
    with pytest.raises(ModelError, match=r"'first.weight'.*finite differences.*curvature='ggn'.*remove_parametriz"):
        fitted(model, x, y, "regression", structure)


class Lopsided(torch.autograd.Function):
    """a b elementwise; its double backward forgets that b's gradient is a."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return g * b, g * a.detach()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(3, 2), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return Lopsided.apply(self.first(x), self.scale.expand(len(x), 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hessian_that_is_not_symmetric_is_refused(dtype):
    x, y = regression()
    with pytest.raises(ModelError, match=r"not symmetric.*curvature='ggn'"):
        fitted(Scaled().to(dtype), x.to(dtype), y.to(dtype), "regression")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.Softplus])
def test_right_hessians_are_not_refused(act, scale, dtype):
    """Kinks, saturated softmaxes and half precision are no faults of a double backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), act(), nn.LayerNorm(8), nn.Linear(8, 5), act(), nn.Linear(5, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
        model[0].bias.zero_()
    model, x = model.to(dtype), torch.randn(60, 3).to(dtype)
    x[:5] = 0  # at the very kink
    Laplace(model, "classification", "all", "full", curvature="hessian").fit([(x, model(x).argmax(1))])
    Laplace(model, "regression", "all", "full", curvature="hessian").fit([(x, model(x).detach())])


def test_row_of_padding_is_constant():
    torch.manual_seed(0)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3, padding_idx=1), nn.Linear(3, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids).tanh().mean(1))

    model, ids, y = Words().double(), torch.randint(0, 5, (7, 4)), torch.randint(0, 2, (7,))
    with torch.no_grad():
        model.table.weight[1] = 0.3
    h = fitted(model, ids, y, "classification").H
    expected = by_differences(model, ids, y, "classification")
    moved = torch.ones(15, dtype=torch.bool)
    moved[3:6] = False
    moved = torch.cat([moved, torch.ones(8, dtype=torch.bool)])
    assert_close(h[moved][:, moved], expected[moved][:, moved], 1e-6)
    assert not h[~moved].any()


def test_missing_double_backward_is_refused_with_what_to_write():
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Parameter(torch.randn(6, 3)), nn.Linear(3, 2)

        def forward(self, ids: Tensor) -> Tensor:
            starts = torch.arange(0, ids.numel(), ids.shape[1])
            return self.last(torch.embedding_bag(self.table, ids.flatten(), starts)[0].tanh())

    ids, y = torch.arange(28).reshape(7, 4) % 6, torch.arange(7) % 2
    with pytest.raises(ModelError, match=r"cannot be differentiated twice.*curvature='ggn'"):
        fitted(Bags(), ids, y, "classification")


class Looked(nn.Module):
    """Rows of a table, averaged by the table itself or here."""

    def __init__(self, table: nn.Module, weighted: bool = False) -> None:
        super().__init__()
        self.table, self.head, self.weighted = table, nn.Linear(3, 2), weighted

    def forward(self, ids: Tensor) -> Tensor:  # (N, T)
        rows = self.table(ids, per_sample_weights=ids.double().cos()) if self.weighted else self.table(ids)
        return self.head(rows.tanh() if rows.dim() == 2 else rows.tanh().mean(1))


TABLES = {
    "sparse": lambda: Looked(nn.Embedding(6, 3, sparse=True)),
    "sparse, padded": lambda: Looked(nn.Embedding(6, 3, sparse=True, padding_idx=2)),
    "bag, mean": lambda: Looked(nn.EmbeddingBag(6, 3)),
    "bag, mean, padded": lambda: Looked(nn.EmbeddingBag(6, 3, padding_idx=-4)),
    "bag, sum, sparse": lambda: Looked(nn.EmbeddingBag(6, 3, mode="sum", sparse=True)),
    "bag, weighted": lambda: Looked(nn.EmbeddingBag(6, 3, mode="sum"), weighted=True),
    "bag, max": lambda: Looked(nn.EmbeddingBag(6, 3, mode="max")),
}


@pytest.mark.parametrize("structure", ["full", "diag", "lowrank"])
@pytest.mark.parametrize("case", TABLES)
def test_hessian_of_tables_is_that_of_differences(case, structure):
    torch.manual_seed(1)
    model, ids, y = TABLES[case]().double(), torch.randint(0, 6, (7, 4)), torch.arange(7) % 2
    expected = by_differences(model, ids, y, "classification")
    if "padded" in case:
        expected[6:9] = 0  # its gradient does not follow the row of padding
    if structure == "lowrank":
        la = fitted(model, ids, y, "classification", structure, rank=3)
        assert_close(la.spectrum.eigenvalues.double(), torch.linalg.eigvalsh(expected).flip(0)[:3], 1e-5)
        return
    la = fitted(model, ids, y, "classification", structure)
    assert_close(la.H, expected if structure == "full" else expected.diagonal(), 1e-6)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
def test_bags_with_offsets_are_the_same_twice_differentiable(mode, last, padding):
    """Empty bags, and bags of padding alone, included."""
    torch.manual_seed(0)
    bags = nn.EmbeddingBag(6, 3, mode=mode, include_last_offset=last, padding_idx=padding).double()
    ids = torch.tensor([1, 5, 2, 2, 2, 0, 1, 1, 3])
    offsets = torch.tensor([0, 2, 2, 5, 8, *([9] if last else [])])
    with twice_differentiable():
        found = bags(ids, offsets)
        (slope,) = torch.autograd.grad(found.sin().sum(), bags.weight, create_graph=True)
        assert torch.autograd.grad(slope.sum(), bags.weight)[0].abs().sum() > 0
    expected = bags(ids, offsets)
    assert_close(found, expected)
    assert_close(slope, torch.autograd.grad(expected.sin().sum(), bags.weight)[0])
