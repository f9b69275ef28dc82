"""Keep a low rank plus a diagonal per block: the k largest eigenpairs of `ekfac`, and the exact diagonal.

F_k = sum over the k largest E[o, i] of E (q_B[o] (x) q_A[i]) (...)^T and D = diag(F) - diag(F_k) with the exact diag(F)
(Lee et al. 2020). If D_j would be negative, row j of the low-rank part is multiplied by r_j = sqrt(F_jj / F_k,jj), and
D_j is 0. So the diagonal stays exact and the block positive semi-definite.

The precision is diag(s D + delta) + s R F_k R. The Woodbury identity is used with Kronecker columns, and no dense block
is formed. A new prior costs p k^2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from laplace.backprop.asked import Asked
from laplace.backprop.covariances import Basis, KroneckerCovariance
from laplace.backprop.gradients import JacobianOf, MomentsOf
from laplace.budget import Budget
from laplace.checks import shown, whole_number
from laplace.errors import OptionError
from laplace.linalg.lowrank import DiagonalPlusLowRank
from laplace.linalg.symmetric import check_positive
from laplace.structures.base import Contribution, Forms, Sums
from laplace.structures.block import Block, BlockGaussian
from laplace.structures.blockdiag import Eigh
from laplace.structures.dense import DENSE
from laplace.structures.ekfac import EIGENBASIS, Ekfac, Rotated
from laplace.structures.gaussian import Traces
from laplace.structures.kron_block import KronBlock
from laplace.weights.layout import Layout

DEFAULT_RANK = 100
_ROUNDED = 32  # a difference D_j of up to so many roundings of F_jj counts as zero
_CHUNK = 2**19  # numbers in the low-rank columns that are written out at a time
_ALONG = 2**23  # numbers in J u for all columns u. Each chunk of examples writes out all columns again


class Inf(Ekfac):
    """Keeps some Kronecker eigenvectors and the exact diagonal. Dense or diagonal blocks stay as in `kron`.

    Args:
        rank: how many eigenpairs a block keeps, or all if it has fewer. A float up to 1 is the share of the trace that
            the kept eigenpairs must reach. None means 100.
        weight_sharing: for weights used at many positions: 'expand' or 'reduce'.

    Raises:
        OptionError: a value is unknown, or outside its range.
    """

    name = "inf"
    options = ("rank", "weight_sharing")
    prior_structures = ("scalar", "layerwise", "diag")
    forms = Forms((*DENSE, *EIGENBASIS, {"left": "gok", "right": "gik", "values": "k", "F": "p"}))

    def __init__(self, rank: int | float | None = None, weight_sharing: str = "expand") -> None:
        super().__init__(weight_sharing)
        self.rank = None if rank is None else _checked(rank)

    def check(self, layout: Layout) -> None:
        largest = max(layout.sizes)
        if isinstance(self.rank, int) and self.rank > largest:
            name = layout.names[layout.sizes.index(largest)]
            raise OptionError(
                f"rank={self.rank} is more than any block has dimensions: the largest is {name!r} with {largest}. Give "
                f"rank= at most {largest}, or a share of the trace such as rank=0.95."
            )

    def form(self, own: Sums, whole: Sums) -> str:
        return f"inf, rank {len(own['values'])}" if "values" in own else super().form(own, whole)

    def rotated(self, bases: dict[str, KronBlock]) -> Largest:
        return Largest(bases, DEFAULT_RANK if self.rank is None else self.rank, self.budget)

    def block_work(self, moments: MomentsOf, vectors: int) -> tuple[float, float]:
        each, once = super().block_work(moments, vectors)
        rank = min(self.rank if isinstance(self.rank, int) else DEFAULT_RANK, moments.weights)
        return each + moments.weights, once + moments.weights * rank**2

    def block_bytes(self, moments: MomentsOf, itemsize: int) -> int:
        if moments.form == "dense":
            return super().block_bytes(moments, itemsize)
        diagonal, (groups, o, i) = 3 * 8 * moments.weights, moments.factors
        rank = DEFAULT_RANK if self.rank is None else self.rank
        k = min(rank, moments.weights) if isinstance(rank, int) else 0  # for a share, k is known after the fit
        return super().block_bytes(moments, itemsize) + diagonal + _rank_bytes(k, groups * (o + i))

    def block(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> Block:
        return InfBlock(sums, shape, eigh.dtype) if "F" in sums else super().block(sums, shape, eigh)


class Largest(Rotated):
    """Sums E and the exact diagonal in the second run, and keeps the largest entries of E."""

    def __init__(self, bases: dict[str, KronBlock], rank: int | float, budget: Budget) -> None:
        super().__init__(bases)
        self.rank, self.budget = rank, budget

    def block_sums(self, moments: MomentsOf, block: KronBlock) -> Contribution:
        return {**super().block_sums(moments, block), "F": moments.squares()}

    def kept(self, name: str, found: Sums, block: KronBlock) -> Sums:
        e = found["E"].flatten()
        values, index = e.sort(descending=True, stable=True)
        k = min(self._enough(values), int((values > 0).sum()))
        groups, o, i = found["E"].shape
        self.budget.require(
            _rank_bytes(k, groups * (o + i)), e.device, f"rank={self.rank} keeps {k:,} of {len(e):,} eigenpairs of "
            f"{name!r}, and", "Give a smaller rank=."
        )  # fmt: skip
        group, rows, columns = torch.unravel_index(index[:k], (groups, o, i))
        own = one_hot(group, groups).T.unsqueeze(1).to(block.like)  # (Gr, 1, k)
        left = _chosen(block.left, group, rows, o).T * own  # (Gr, O, k), zero outside the pair's group
        right = _chosen(block.right, group, columns, i).T * own
        return {"left": left, "right": right, "values": values[:k], "F": found["F"]}

    def _enough(self, values: Tensor) -> int:
        """Return how many of the sorted eigenvalues are kept."""
        if isinstance(self.rank, int):
            return self.rank
        share = values.double().cumsum(0)
        return int((share < self.rank * share[-1]).sum()) + 1


class InfBlock(Block):
    """Holds the low rank and the diagonal of one parameter tensor."""

    def __init__(self, sums: Sums, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        left, right, values, exact = (sums[key].double() for key in ("left", "right", "values", "F"))
        low = ((left.square() * values) @ right.square().mT).flatten()  # diag(F_k)
        exact = exact.clamp(min=0)
        rest = exact - low
        shrink = torch.where(rest < 0, (exact / low).sqrt(), 1.0)
        rounding = _ROUNDED * torch.finfo(dtype).eps * exact  # a bias has D = 0: the rest is rounding
        self.rest, self.values = torch.where(rest > rounding, rest, 0.0).to(dtype), values.to(dtype)
        self.columns = KroneckerColumns(left.to(dtype), right.to(dtype), shrink.to(dtype))

    def gaussian(self, scale: Tensor, precision: Tensor) -> InfGaussian:
        diagonal = scale * self.rest + precision
        check_positive(diagonal)
        return InfGaussian(diagonal, self.columns, scale * self.values)

    def matrix(self) -> Tensor:
        return DiagonalPlusLowRank(self.rest, self.columns, self.values).precision_matrix()


class InfGaussian(DiagonalPlusLowRank, BlockGaussian):
    """Has the precision diag(s D + delta) + s R F_k R."""

    u: KroneckerColumns

    def outputs(self, jacobian: JacobianOf, asked: Asked) -> Tensor:
        jacobian, asked = jacobian.double(), asked.double()
        whole = asked.of(jacobian, KroneckerCovariance(self.d.reciprocal().reshape(self.u.factors)))
        if not len(self.w):
            return whole.to(self.dtype)
        if not asked.examples_apart:
            return asked.left(whole, self._explained(jacobian, slice(None))).to(self.dtype)
        n, c = whole.shape[:2]
        step = max(1, _ALONG // (c * len(self.w)))
        parts = [slice(start, min(start + step, n)) for start in range(0, n, step)]
        left = [asked.part(s).left(whole[s], self._explained(jacobian, s)) for s in parts]
        return torch.cat(left).to(self.dtype)

    def traces(self, each: bool) -> Traces:
        if each:
            sigma = self.covariance_matrix().double()
            return sigma.diagonal(), sigma.square()
        t, m = self.group_traces([len(self.d)])
        return t.reshape(()), m.reshape(())

    def _explained(self, jacobian: JacobianOf, part: slice) -> Tensor:  # (k, n, C)
        return self.explained(torch.cat([jacobian.along(u / self.d, part) for u in self.u.columns()]))


@dataclass(frozen=True)
class KroneckerColumns:
    """Holds the columns r * (q_B (x) q_A), and writes them out in pieces."""

    left: Tensor  # (Gr, O, k)
    right: Tensor  # (Gr, I, k)
    shrink: Tensor  # r: (p,)

    @property
    def factors(self) -> tuple[int, int, int]:
        """Return Gr, O and I."""
        return self.left.shape[0], self.left.shape[1], self.right.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.shrink), self.left.shape[2]

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        (groups, o, i), k = self.factors, self.shape[1]
        step = max(1, _CHUNK // (i * max(1, k)))
        for group in range(groups):
            for first in range(0, o, step):
                left = self.left[group, first : first + step]
                start = (group * o + first) * i
                part = slice(start, start + len(left) * i)
                rows = (left.unsqueeze(1) * self.right[group]).flatten(0, 1)
                yield part, rows * self.shrink[part].unsqueeze(1)

    def columns(self) -> Iterator[Tensor]:
        """Yield all columns in order, some at a time, (c, p)."""
        p, k = self.shape
        step = max(1, _CHUNK // p)
        for start in range(0, k, step):
            part = slice(start, start + step)
            columns = torch.einsum("goc,gic->cgoi", self.left[..., part], self.right[..., part])
            yield columns.flatten(1) * self.shrink


def _chosen(basis: Basis | None, group: Tensor, index: Tensor, side: int) -> Tensor:  # (k, side)
    """Return the chosen vectors of the groups' bases."""
    return one_hot(index, side) if basis is None else basis.vectors[group, :, index]


def _rank_bytes(k: int, sides: int) -> int:
    """Return the bytes of k columns and of the k x k matrices of a prior."""
    return 8 * (3 * k * sides + 5 * k**2)


def _checked(rank: object) -> int | float:
    if isinstance(rank, float) and 0 < rank <= 1:
        return rank
    try:
        return whole_number(rank, "rank")
    except OptionError:
        raise OptionError(
            f"rank={shown(rank)} must be a whole number of at least 1 (eigenpairs per tensor), or a float above 0 and "
            "up to 1.0 (the share of the trace to keep)."
        ) from None
