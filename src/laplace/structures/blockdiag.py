"""Block-diagonal: the tensors' blocks side by side, each of its own kind, independent of each other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from laplace.algebra import Clipped, eigh, total
from laplace.backprop.gradients import Basis, Jacobian, Moments, MomentsOf
from laplace.budget import Budget
from laplace.structures.base import Contribution, Curvature, Gaussian, Structure, Sums, Traces, require_pairs
from laplace.structures.block import Block, BlockGaussian
from laplace.weights.layout import Layout


class BlockDiagonal(Structure):
    """A structure of independent blocks: says only what one block is."""

    @abstractmethod
    def block_sums(self, moments: MomentsOf) -> Contribution:
        """What one batch adds to one tensor's sums."""

    @abstractmethod
    def block(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> Block:
        """The factorised block of one tensor from its sums."""

    @abstractmethod
    def block_bytes(self, moments: MomentsOf, itemsize: int) -> int:
        """What one tensor takes: its sums, a batch's share of them, and their decomposition."""

    @abstractmethod
    def block_work(self, moments: MomentsOf, vectors: int) -> tuple[float, float]:
        """Multiplications for one tensor: per example, and once."""

    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        each, once = zip(*(self.block_work(m, vectors) for m in moments.parameters), strict=True)
        return sum(each), sum(once)

    def memory(self, moments: Moments, layout: Layout, itemsize: int) -> int:
        return sum(self.block_bytes(m, itemsize) for m in moments.parameters)

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        named = zip(layout.names, moments.parameters, strict=True)
        return {f"{name}/{key}": value for name, m in named for key, value in self.block_sums(m).items()}

    def curvature(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> BlockCurvature:
        decompose, parts = Eigh(dtype), by_tensor(sums, layout)
        shapes = zip(layout.names, layout.shapes, strict=True)
        blocks = [self.block(parts[name], shape, decompose) for name, shape in shapes]
        return BlockCurvature(blocks, layout, self.budget, decompose.clipped)


def by_tensor(sums: Sums, layout: Layout) -> dict[str, Sums]:
    """The sums of each tensor, without its name."""
    parts: dict[str, Sums] = {name: {} for name in layout.names}
    for key, value in sums.items():
        name, _, kind = key.rpartition("/")
        parts[name][kind] = value
    return parts


class BlockCurvature(Curvature):
    """H of independent blocks."""

    def __init__(self, blocks: Sequence[Block], layout: Layout, budget: Budget, of_factors: Clipped) -> None:
        self.blocks, self.layout, self.budget, self._of_factors = list(blocks), layout, budget, of_factors
        self.commutes = all(block.commutes for block in self.blocks)

    @property
    def clipped(self) -> Clipped:
        return sum((block.clipped for block in self.blocks), self._of_factors)

    def gaussian(self, scale: Tensor, precision: Sequence[Tensor]) -> BlockDiagonalGaussian:
        pairs = zip(self.blocks, precision, strict=True)
        return BlockDiagonalGaussian([b.gaussian(scale, d) for b, d in pairs], self.layout, self.budget)

    def matrix(self) -> Tensor:
        return torch.block_diag(*[block.matrix() for block in self.blocks])

    def sweep(self, jacobian: Jacobian, gaussians: Sequence[Gaussian]) -> Iterator[Tensor]:
        own = [gaussian.blocks for gaussian in gaussians if isinstance(gaussian, BlockDiagonalGaussian)]
        triples = zip(self.blocks, jacobian.parameters, zip(*own, strict=True), strict=True)
        for parts in zip(*[block.sweep(part, of) for block, part, of in triples], strict=True):
            yield total(parts)


class BlockDiagonalGaussian(Gaussian):
    """Independent Gaussians, one per tensor."""

    def __init__(self, blocks: Sequence[BlockGaussian], layout: Layout, budget: Budget) -> None:
        self.blocks, self.layout, self.budget = list(blocks), layout, budget

    def logdet(self) -> Tensor:
        return torch.stack([b.logdet() for b in self.blocks]).sum()

    def color(self, eps: Tensor) -> Tensor:
        return torch.cat([b.color(e) for b, e in self._with(eps)], -1)

    def marginal_variances(self) -> Tensor:
        return torch.cat([b.marginal_variances() for b in self.blocks])

    def quadratic(self, vector: Tensor) -> Tensor:
        return torch.stack([b.quadratic(v) for b, v in self._with(vector)]).sum(0)

    def precision_matrix(self) -> Tensor:
        return torch.block_diag(*[b.precision_matrix() for b in self.blocks])

    def covariance_matrix(self) -> Tensor:
        eyes = [torch.eye(size) for size in self.layout.sizes]
        like = self.marginal_variances()
        return torch.block_diag(*[b.covariance_times(e.to(like)) for b, e in zip(self.blocks, eyes, strict=True)])

    def variance(self, jacobian: Jacobian) -> Tensor:
        return self._sum(jacobian, "variance")

    def covariance(self, jacobian: Jacobian) -> Tensor:
        return self._sum(jacobian, "covariance")

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:
        return self._sum(jacobian, "product", v)

    def joint(self, jacobian: Jacobian) -> Tensor:
        return self._sum(jacobian, "joint")

    def dense_variance(self, jacobians: Tensor) -> Tensor:
        return torch.stack([b.covariance_times(j) @ j.mT for b, j in self._with(jacobians)]).sum(0)

    def traces(self, groups: str) -> Traces:
        dense = groups == "diag" and not all(b.independent for b in self.blocks)
        if dense:
            require_pairs(self.budget, self.marginal_variances())
        pairs = [b.traces(each=groups == "diag") for b in self.blocks]
        t = torch.cat([t.reshape(-1) for t, _ in pairs])
        if dense:
            return t, torch.block_diag(*[m if m.dim() == 2 else m.diag() for _, m in pairs])
        m = torch.cat([m.reshape(-1) for _, m in pairs])
        return (t.sum(0, keepdim=True), m.sum(0, keepdim=True)) if groups == "scalar" else (t, m)

    def _with(self, vector: Tensor) -> list[tuple[BlockGaussian, Tensor]]:
        return list(zip(self.blocks, self.layout.split(vector), strict=True))

    def _sum(self, jacobian: Jacobian, what: str, *args: Tensor) -> Tensor:
        pairs = zip(self.blocks, jacobian.parameters, strict=True)
        return total(block.outputs(part, what, *args) for block, part in pairs)


class Eigh:
    """Eigendecomposition of positive semi-definite matrices; equal ones (a layer's weight and bias) only once."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.clipped = dtype, Clipped()
        self.seen: list[tuple[Tensor, tuple[Tensor, Basis]]] = []
        self.bases: list[Basis] = []

    def __call__(self, matrix: Tensor) -> tuple[Tensor, Basis]:
        for other, result in self.seen:
            if other.shape == matrix.shape and torch.equal(other, matrix):
                return result
        values, vectors, clipped = eigh(matrix, self.dtype)
        self.clipped += clipped
        result = values, Basis(vectors)
        self.seen.append((matrix, result))
        return result

    def found(self, vectors: Tensor) -> Basis:
        """Eigenvectors that were found earlier as a basis; equal ones as one and the same."""
        for other in self.bases:
            if other.vectors.shape == vectors.shape and torch.equal(other.vectors, vectors):
                return other
        self.bases.append(Basis(vectors.to(self.dtype)))
        return self.bases[-1]
