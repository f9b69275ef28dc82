"""Combine one block per tensor into a block-diagonal curvature. Blocks may be of different kinds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace.backprop.asked import ALL_EXAMPLES, EACH_EXAMPLE, EACH_OUTPUT, Asked, Times
from laplace.backprop.covariances import Basis, ReflectedBasis
from laplace.backprop.gradients import Jacobian, Moments, MomentsOf
from laplace.budget import Budget
from laplace.errors import OptionError, warn
from laplace.linalg.folded import same, written_out
from laplace.linalg.kronecker import Kronecker
from laplace.linalg.low_rank_eigh import low_rank_eigh
from laplace.linalg.sketch import nystroem, reflections
from laplace.linalg.symmetric import TOLERATED, Clipped, clip, may_be_rounded, total
from laplace.structures.base import Contribution, Structure, Sums
from laplace.structures.block import Block, BlockGaussian
from laplace.structures.dealing import Solved, dealing, decomposed
from laplace.structures.gaussian import Curvature, Gaussian, Traces, require_pairs
from laplace.weights.layout import Layout


class BlockDiagonal(Structure):
    """Treats tensors as independent. A subclass only defines the block of one tensor."""

    @abstractmethod
    def block_sums(self, moments: MomentsOf) -> Contribution:
        """Return what one batch adds to one tensor's sums."""

    @abstractmethod
    def block(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> Block:
        """Return the factorised block of one tensor from its sums."""

    def block_bytes(self, moments: MomentsOf, itemsize: int) -> int:
        """Return the bytes for one tensor: its sums, the contribution of a batch, and the decomposition.

        The default is one number per weight for each.
        """
        return 3 * itemsize * moments.weights

    def block_work(self, moments: MomentsOf, vectors: int) -> tuple[float, float]:
        """Return the multiplications for one tensor, per example and once. The default is one per weight and vector."""
        return vectors * moments.weights, 0.0

    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        each, once = zip(*(self.block_work(m, vectors) for m in moments.parameters), strict=True)
        return sum(each), sum(once)

    def memory(self, moments: Moments, layout: Layout, itemsize: int) -> int:
        return sum(self.block_bytes(m, itemsize) for m in moments.parameters)

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        named = zip(layout.names, moments.parameters, strict=True)
        return {f"{name}/{key}": value for name, m in named for key, value in self._checked_sums(m).items()}

    def _checked_sums(self, moments: MomentsOf) -> Contribution:
        found: Any = self.block_sums(moments)
        if not isinstance(found, Mapping):
            raise OptionError(
                f"{self.name}.block_sums returned a {type(found).__name__}; a mapping from names to tensors is needed, "
                "as in {'fisher': moments.squares()}."
            )
        return dict(found)

    def curvature(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> BlockCurvature:
        decompose, parts = Eigh(dtype), by_tensor(sums, layout)
        shapes = zip(layout.names, layout.shapes, strict=True)
        blocks = [self._checked_block(self.block(parts[name], shape, decompose), name, dtype) for name, shape in shapes]
        return BlockCurvature(blocks, layout, self.budget, decompose.clipped)

    def _checked_block(self, block: Any, name: str, dtype: torch.dtype) -> Block:
        if not isinstance(block, Block):
            raise OptionError(
                f"{self.name}.block returned a {type(block).__name__} for {name!r}; a Block is needed, such as "
                "DiagBlock(diagonal, shape) or DenseBlock(matrix, shape, eigh.dtype)."
            )
        diagonal = block.as_diagonal()
        if diagonal is not None and diagonal.dtype != dtype:
            raise OptionError(
                f"{self.name}.block returned {diagonal.dtype} for {name!r}; the posterior is in {dtype}. Write "
                ".to(eigh.dtype)."
            )
        return block


def by_tensor(sums: Sums, layout: Layout) -> dict[str, Sums]:
    """Group the sums by tensor, and remove its name from the keys."""
    parts: dict[str, Sums] = {name: {} for name in layout.names}
    for key, value in sums.items():
        name, _, kind = key.rpartition("/")
        parts[name][kind] = value
    return parts


def joined(diagonals: Iterable[Tensor | None]) -> Tensor | None:  # (p,) each -> (P,)
    """Return the diagonals of all blocks as one vector. None if a block is not diagonal."""
    found = list(diagonals)
    there = [diagonal for diagonal in found if diagonal is not None]
    return torch.cat(there) if len(there) == len(found) else None


class BlockCurvature(Curvature):
    """Holds H as independent blocks.

    Args:
        blocks: one block per tensor, in the order of the layout.
        layout: names, shapes and order of the tensors.
        budget: the memory that may be taken, usually `structure.budget`.
        of_factors: eigenvalues that were set to zero while the blocks were made.
    """

    blockwise = True

    def __init__(
        self, blocks: Sequence[Block], layout: Layout, budget: Budget, of_factors: Clipped | None = None
    ) -> None:
        self.blocks, self.layout, self.budget, self._of_factors = list(blocks), layout, budget, of_factors or Clipped()
        self.commutes = all(block.commutes for block in self.blocks)
        self._said = False

    @property
    def clipped(self) -> Clipped:
        return sum((block.clipped for block in self.blocks), self._of_factors)

    def gaussian(self, scale: Tensor, precision: Sequence[Tensor | Kronecker]) -> BlockDiagonalGaussian:
        if not self._said:
            self._say_what_is_blurred(scale, precision)
        pairs = zip(self.blocks, precision, strict=True)
        return BlockDiagonalGaussian([b.gaussian(scale, d) for b, d in pairs], self.layout, self.budget)

    def _say_what_is_blurred(self, scale: Tensor, precision: Sequence[Tensor | Kronecker]) -> None:
        """Warn, once, if the prior precision is not far above the rounding errors of float32 sums."""
        blocks = list(zip(self.layout.names, self.blocks, precision, strict=True))
        share = float(scale.detach()) / TOLERATED
        near = [(n, b, _smallest(d)) for n, b, d in blocks if b.blur_bound and _smallest(d) < share * b.blur_bound]
        needed = {name: share * b.blur for name, b, smallest in near if b.blur and smallest < share * b.blur}
        lost = list(needed)
        if lost:
            self._said = True
            worst = max(lost, key=needed.__getitem__)
            warn(
                f"sums of {worst!r} are products in float32, whose rounding is more than {TOLERATED:.0%} of a prior "
                f"precision below {needed[worst]:.2g}. The evidence, and variances in directions that the data says "
                f"little about, may be wrong by more than that ({len(lost)} of {len(blocks)} tensors). Raise the prior "
                "precision, or fit with model.double()."
            )

    def matrix(self) -> Tensor:
        return torch.block_diag(*[block.matrix() for block in self.blocks])

    def as_diagonal(self) -> Tensor | None:
        return joined(block.as_diagonal() for block in self.blocks)

    def sweep(self, jacobian: Jacobian, gaussians: Sequence[Gaussian]) -> Iterator[Tensor]:
        own = [gaussian.blocks for gaussian in gaussians if isinstance(gaussian, BlockDiagonalGaussian)]
        triples = zip(self.blocks, jacobian.parameters, zip(*own, strict=True), strict=True)
        for parts in zip(*[block.sweep(part, of) for block, part, of in triples], strict=True):
            yield total(parts)


def _smallest(precision: Tensor | Kronecker) -> float:
    """Return the smallest eigenvalue of a tensor's prior precision."""
    if isinstance(precision, Kronecker):
        sides = [torch.linalg.eigvalsh(side)[0] for side in (precision.left, precision.right)]
        return float(precision.strength.detach() * sides[0] * sides[1])
    values = precision.detach()
    return float((values if values.dim() < 2 else torch.linalg.eigvalsh(values)).min())


class BlockDiagonalGaussian(Gaussian):
    """Holds one independent Gaussian per tensor."""

    blockwise = True

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

    def as_diagonal(self) -> Tensor | None:
        return joined(b.as_diagonal() for b in self.blocks)

    def covariance_matrix(self) -> Tensor:
        eyes = [torch.eye(size) for size in self.layout.sizes]
        like = self.marginal_variances()
        return torch.block_diag(*[b.covariance_times(e.to(like)) for b, e in zip(self.blocks, eyes, strict=True)])

    def covariance_times(self, vectors: Tensor) -> Tensor:  # (..., P) -> (..., P)
        """Return the covariance times each vector."""
        return torch.cat([b.covariance_times(v) for b, v in self._with(vectors)], -1)

    def precision_times(self, vectors: Tensor) -> Tensor:  # (..., P) -> (..., P)
        """Return the precision times each vector."""
        return torch.cat([b.precision_times(v) for b, v in self._with(vectors)], -1)

    def variance(self, jacobian: Jacobian) -> Tensor:
        return self._sum(jacobian, EACH_OUTPUT)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        return self._sum(jacobian, EACH_EXAMPLE)

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:
        return self._sum(jacobian, Times(v))

    def joint(self, jacobian: Jacobian) -> Tensor:
        return self._sum(jacobian, ALL_EXAMPLES)

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

    def _sum(self, jacobian: Jacobian, asked: Asked) -> Tensor:
        return total(block.outputs(part, asked) for block, part in zip(self.blocks, jacobian.parameters, strict=True))


class Eigh:
    """Computes eigendecompositions of positive semi-definite matrices, once for equal matrices.

    A layer's weight and bias have equal factors. With `ties`, a fixed rule chooses the eigenvectors of equal
    eigenvalues, so that rounding does not. Callers need it if they store more than eigenvalues in the eigenbasis.
    """

    def __init__(self, dtype: torch.dtype, ties: bool = False) -> None:
        self.dtype, self.ties, self.clipped = dtype, ties, Clipped()
        self.seen: list[tuple[Tensor, tuple[Tensor, Basis]]] = []
        self.bases: list[Basis] = []

    def __call__(self, matrix: Tensor) -> tuple[Tensor, Basis]:
        if (known := self.known(matrix)) is not None:
            return known
        whole = written_out(matrix)
        result = self._of_low_rank(whole)
        if result is None:
            values, vectors, clipped = self._decomposed(whole)
            self.clipped += clipped
            result = values, Basis(vectors)
        self.seen.append((matrix, result))
        return result

    def _of_low_rank(self, matrix: Tensor) -> tuple[Tensor, Basis] | None:
        """Return the decomposition of a single matrix of low rank, with a basis in few numbers."""
        found = None if self.ties or len(matrix) > 1 or dealing() else low_rank_eigh(matrix[0])
        if found is None:
            return None
        values, clipped = clip(found[0], torch.float64)
        self.clipped += clipped
        v, t = (part.to(self.dtype).unsqueeze(0) for part in found[1:])
        return values.to(self.dtype).unsqueeze(0), ReflectedBasis(v, t)

    def known(self, matrix: Tensor) -> tuple[Tensor, Basis] | None:
        """Return the decomposition of an equal matrix, if there was one."""
        for other, result in self.seen:
            if same(other, matrix):
                return result
        return None

    @cached_property
    def in_float32(self) -> RoundedEigh:
        """Return what decomposes wide matrices in float32."""
        return RoundedEigh(self)

    def _decomposed(self, matrix: Tensor) -> Solved:
        return decomposed(matrix, self.dtype, self.ties)

    def of_sketch(self, sketch: Tensor, trace: Tensor) -> tuple[Tensor, Basis]:  # (Gr, D, R), (Gr,) -> (Gr, D), Q
        """Return the eigenvalues and a basis of a matrix of which a sketch was kept."""
        if (known := self.known(sketch)) is not None:
            return known
        values, vectors = nystroem(sketch, trace)
        result = values.to(self.dtype), ReflectedBasis(*(part.to(self.dtype) for part in reflections(vectors)))
        self.seen.append((sketch, result))
        return result

    def found(self, vectors: Tensor) -> Basis:
        """Return stored eigenvectors as a basis. Equal eigenvectors give the same object."""
        for other in self.bases:
            if other.vectors.shape == vectors.shape and torch.equal(other.vectors, vectors):
                return other
        self.bases.append(Basis(vectors.to(self.dtype)))
        return self.bases[-1]


class RoundedEigh(Eigh):
    """Decomposes wide matrices in float32, for priors that cover its rounding. Leaves others to `exact`."""

    def __init__(self, exact: Eigh) -> None:
        super().__init__(exact.dtype, exact.ties)
        self.exact = exact

    def __call__(self, matrix: Tensor) -> tuple[Tensor, Basis]:
        if (known := self.exact.known(matrix)) is not None:  # of the layer's weight, whose norm is larger
            return known
        return super().__call__(matrix) if may_be_rounded(matrix, self.dtype) else self.exact(matrix)

    def _decomposed(self, matrix: Tensor) -> Solved:
        return decomposed(matrix, self.dtype, self.ties, rounded=True)
