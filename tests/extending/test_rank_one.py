"""A structure of one's own: the diagonal of H plus the leading eigenvector of each tensor's Kronecker product."""

from __future__ import annotations

import torch
from torch import nn

from laplace import Laplace
from laplace.structures import Block, BlockDiagonal, BlockGaussian, KroneckerCovariance
from laplace.testing import StructureConformance


class RankOne(BlockDiagonal):
    def block_sums(self, moments):
        sums = {"squares": moments.squares()}
        if moments.form == "kron":
            sums["B"] = moments.outputs()
            if moments.first:
                a, count = moments.inputs()
                sums |= {"A_left" if moments.inputs_left else "A": a, "count": count}
        return sums

    def block(self, sums, shape, eigh):
        squares = sums["squares"].double()
        w = leading(sums) if "B" in sums else squares.new_zeros(len(squares), 1)
        w = w * (squares / w.square().sum(1).clamp(min=1e-300)).sqrt().clamp(max=1)[:, None]  # never above the diagonal
        return RankOneBlock((squares - w.square().sum(1)).clamp(min=0), w, shape, eigh.dtype)


def leading(sums):  # (p, groups)
    a, b = sums["A" if "A" in sums else "A_left"].double(), sums["B"].double()
    a = (a.diag_embed() if a.dim() == 2 else a) / sums["count"]
    left, right = (b, a) if "A" in sums else (a, b)
    values, vectors = zip(*(torch.linalg.eigh(side) for side in (left, right)), strict=True)
    size = (values[0][:, -1] * values[1][:, -1]).clamp(min=0).sqrt()
    each = torch.einsum("g,go,gi->goi", size, *(v[..., -1] for v in vectors))
    return torch.block_diag(*each.flatten(1).unsqueeze(2))


class RankOneBlock(Block):
    def __init__(self, d, w, shape, dtype):  # H = diag(d) + W W^T
        self.d, self.w, self.shape, self.dtype = d, w, shape, dtype

    def matrix(self):
        return (self.d.diag() + self.w @ self.w.mT).to(self.dtype)

    def gaussian(self, scale, precision):
        d, w = scale.double() * self.d + precision.double(), scale.double().sqrt() * self.w
        return RankOneGaussian(d, w, self.shape, self.dtype)


class RankOneGaussian(BlockGaussian):
    def __init__(self, d, w, shape, dtype):
        self.d, self.w, self.shape, self.dtype = d, w, shape, dtype
        self.inner = torch.eye(w.shape[1]).double() + w.mT @ (w / d[:, None])
        lower = torch.linalg.cholesky(self.inner)
        self.v = torch.linalg.solve_triangular(lower, (w / d[:, None]).mT, upper=False)  # covariance 1/d - V^T V

    def logdet(self):
        return self.d.log().sum() + self.inner.logdet()

    def color(self, eps):
        root = torch.linalg.cholesky(self.d.diag() + self.w @ self.w.mT)
        return torch.linalg.solve_triangular(root.mT, eps.double().mT, upper=True).mT.to(self.dtype)

    def marginal_variances(self):
        return (1 / self.d - self.v.square().sum(0)).to(self.dtype)

    def quadratic(self, v):
        return ((v.double().square() * self.d).sum(-1) + (v.double() @ self.w).square().sum(-1)).to(self.dtype)

    def precision_matrix(self):
        return (self.d.diag() + self.w @ self.w.mT).to(self.dtype)

    def covariance_times(self, v):
        return (v.double() / self.d - v.double() @ self.v.mT @ self.v).to(self.dtype)

    def traces(self, each):
        covariance = (1 / self.d).diag() - self.v.mT @ self.v
        squares = covariance.square()
        return (covariance.diagonal(), squares) if each else (covariance.trace(), squares.sum())

    def outputs(self, jacobian, asked):
        jacobian = jacobian.double()
        whole = asked.of(jacobian, KroneckerCovariance.independent(1 / self.d, self.shape))
        return (whole - asked.of_rows(jacobian.along(self.v))).to(self.dtype)


class TestRankOne(StructureConformance):
    tasks = ("classification",)

    def structure(self):
        return RankOne()


def test_rank_one_has_the_exact_diagonal_and_the_leading_eigenvector_of_the_factors(tmp_path):
    torch.manual_seed(0)
    layers = nn.Embedding(5, 4), nn.ConvTranspose1d(3, 2, 2), nn.Flatten(), nn.Linear(10, 3)
    model, x, y = nn.Sequential(*layers).double(), torch.randint(5, (20, 3)), torch.arange(20) % 3
    batches = [(x[:7], y[:7]), (x[7:], y[7:])]
    la, diag, kron = (Laplace(model, "classification", "all", s).fit(batches) for s in (RankOne(), "diag", "kron"))
    triples = zip(*(of.posterior.fit.curvature.blocks for of in (la, diag, kron)), strict=True)
    for own, exact, factors in triples:
        squares = exact.matrix().diagonal()
        torch.testing.assert_close(own.matrix().diagonal(), squares)
        values, vectors = torch.linalg.eigh(factors.matrix())
        size = torch.minimum(values[-1].sqrt() * vectors[:, -1].abs(), squares.sqrt())
        expected = size * vectors[:, -1].sign()
        torch.testing.assert_close(own.w @ own.w.mT, torch.outer(expected, expected))
    assert "RankOne" in repr(la)
    assert "RankOne" in repr(la.coverage())
    la.save(tmp_path / "mine")
    assert torch.equal(Laplace.load(tmp_path / "mine", model, hessian_structure=RankOne())(x), la(x))
