"""A structure of one's own with one dense block per row of a tensor: exact, and without anything of size p x p."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import oracle
from laplace import Laplace
from laplace.errors import MemoryBudgetError
from laplace.network.inputs import Inputs
from laplace.structures import Block, BlockDiagonal, BlockGaussian, RowCovariance
from laplace.testing import StructureConformance
from zoo import build


class Rows(BlockDiagonal):
    scattered = True

    def block_sums(self, moments):
        return {"rows": moments.row_grams()}  # (O, I, I), float64

    def block(self, sums, shape, eigh):
        return RowBlock(sums["rows"], shape, eigh.dtype)

    def block_bytes(self, moments, itemsize):  # sums, a batch's contribution, Cholesky factor and its inverse
        return 4 * 8 * moments.weights**2 // moments.rows


class RowBlock(Block):
    def __init__(self, h, shape, dtype):
        self.h, self.shape, self.dtype = h, shape, dtype

    def matrix(self):
        return torch.block_diag(*self.h).to(self.dtype)

    def gaussian(self, scale, precision):  # precision: one number, or one per weight
        each = precision.double().reshape(-1).expand(math.prod(self.shape)).reshape(self.h.shape[:2])
        return RowGaussian(scale.double() * self.h + each.diag_embed(), self.dtype)


class RowGaussian(BlockGaussian):
    def __init__(self, precision, dtype):  # (O, I, I)
        self.precision, self.dtype = precision, dtype
        self.lower = torch.linalg.cholesky(precision)
        eye = torch.eye(precision.shape[-1]).to(precision)
        self.root = torch.linalg.solve_triangular(self.lower.mT, eye, upper=True)  # R with R R^T = covariance

    def rows(self, v):  # (..., p) -> (..., O, I)
        return v.double().unflatten(-1, self.precision.shape[:2])

    def logdet(self):
        return 2 * self.lower.diagonal(dim1=1, dim2=2).log().sum()

    def color(self, eps):
        return torch.einsum("oij,soj->soi", self.root, self.rows(eps)).flatten(1).to(self.dtype)

    def marginal_variances(self):
        return self.root.square().sum(2).flatten().to(self.dtype)

    def quadratic(self, v):
        return torch.einsum("...oi,oij,...oj->...", self.rows(v), self.precision, self.rows(v)).to(self.dtype)

    def precision_matrix(self):
        return torch.block_diag(*self.precision).to(self.dtype)

    def covariance_times(self, v):
        turned = torch.einsum("oij,...oi->...oj", self.root, self.rows(v))
        return torch.einsum("oij,...oj->...oi", self.root, turned).flatten(-2).to(self.dtype)

    def traces(self, each):
        covariance = self.root @ self.root.mT
        diagonal, squares = covariance.diagonal(dim1=1, dim2=2), covariance.square()
        return (diagonal.flatten(), torch.block_diag(*squares)) if each else (diagonal.sum(), squares.sum())

    def outputs(self, jacobian, asked):
        return asked.of(jacobian, RowCovariance(self.root.to(self.dtype)))


class TestRows(StructureConformance):
    tasks = ("classification",)

    def structure(self):
        return Rows()

    def expected_curvature(self, exact, case):
        return oracle.by_row(exact, case.fit.layout.shapes)


def test_rows_of_an_exact_hessian_are_a_part_of_it():
    model, x, y, _ = build("conv", "classification")
    rows, whole = (
        Laplace(model, "classification", "all", structure, curvature="hessian").fit([(x, y)]).posterior.fit
        for structure in (Rows(), "full")
    )
    expected = oracle.by_row(whole.curvature.matrix(), whole.layout.shapes)
    torch.testing.assert_close(rows.curvature.matrix(), expected)


class Mixed(nn.Module):
    """An embedding, a transposed convolution, which store inputs as rows, and a stack of weights."""

    def __init__(self, outputs):
        super().__init__()
        self.table, self.up = nn.Embedding(5, 4), nn.ConvTranspose1d(4, 4, 2, groups=2)
        self.one, self.attention = nn.ConvTranspose1d(4, 4, 3), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, outputs)

    def forward(self, x):
        h = self.one(torch.tanh(self.up(self.table(x.long()).mT))).mT
        return self.head(self.attention(h, h, h, need_weights=False)[0].mean(1))


NETWORKS = ["mlp", "conv", "residual", "transformer", "tied", "recurrent", "functional", "mixed"]


SINGLE = ["mlp", "conv", "mixed"]


@pytest.mark.parametrize(
    ("network", "dtype"), [*((n, torch.float64) for n in NETWORKS), *((n, torch.float32) for n in SINGLE)]
)
def test_rows_are_those_of_the_dense_curvature_and_covariance(network, dtype):
    if network == "mixed":
        torch.manual_seed(0)
        model, x, y = Mixed(3).double().eval(), torch.randint(5, (11, 3)), torch.randint(3, (11,))
        names = [name for name, _ in model.named_parameters()]
    else:
        model, x, y, names = build(network, "classification")
    _, exact = oracle.curvature_all(model, names, x, y, "classification")
    jac = oracle.jacobian_loop(model, names, x[:5])
    model, x = (model.to(dtype), x.to(dtype)) if x.is_floating_point() else (model.to(dtype), x)
    la = Laplace(model, "classification", "all", Rows(), prior_precision=2.0).fit([(x[:4], y[:4]), (x[4:], y[4:])])
    expected = oracle.by_row(exact, la.posterior.fit.layout.shapes)
    close = {"rtol": 1e-8, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-3, "atol": 2e-4}
    torch.testing.assert_close(la.posterior.fit.curvature.matrix().double(), expected, **close)
    covariance = jac @ torch.linalg.inv(expected + 2 * torch.eye(len(expected)).double()) @ jac.mT
    outputs = la.posterior.gaussian
    (run,) = la.runner.runs(la.posterior.fit, Inputs(x[:5]), whole=True)
    torch.testing.assert_close(outputs.variance(run.jacobian()).double(), covariance.diagonal(dim1=1, dim2=2), **close)
    torch.testing.assert_close(outputs.covariance(run.jacobian()).double(), covariance, **close)


def test_rows_of_a_wide_layer_fit_into_memory_and_its_dense_block_does_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 400), nn.Tanh(), nn.Linear(400, 3))
    x, y = torch.randn(20, 16), torch.randint(3, (20,))
    options = {"memory_budget": 200_000_000}
    la = Laplace(model, "classification", "all", Rows(), **options).fit([(x, y)])
    assert la.predict(x).epistemic.isfinite().all()
    with pytest.raises(MemoryBudgetError):
        Laplace(model, "classification", "all", "block", **options).fit([(x, y)])
