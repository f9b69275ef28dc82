"""Several weights of the same shape stacked in one tensor: each has its own inputs and its own Kronecker pair."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.backprop.covariances import Basis, KroneckerCovariance
from laplace.backprop.outer import Outer
from laplace.backprop.uses import EVERY, Use
from laplace.linalg.symmetric import total


@dataclass
class Stacked(Use):
    """Stacks outer products of one group each, one for each part of the tensor's rows."""

    outers: list[Outer]
    form = "kron"

    def __post_init__(self) -> None:
        self.first = self.outers[0].first

    @property
    def g(self) -> Tensor:  # type: ignore[override]
        return self.outers[0].g

    @property
    def shape(self) -> tuple[int, int, int]:
        k, n, p = self.outers[0].shape
        return k, n, p * len(self.outers)

    @property
    def factors(self) -> tuple[int, int, int]:
        """Return the number of parts as the number of groups, O and I."""
        return (len(self.outers), *self.outers[0].factors[1:])

    @property
    def positions(self) -> int:  # type: ignore[override]
        """Return the largest number of positions of any part."""
        return max(outer.positions for outer in self.outers)

    @property
    def held(self) -> int:
        return sum(outer.held for outer in self.outers)

    @property
    def nbytes(self) -> int:
        return sum(outer.nbytes for outer in self.outers)

    def contracted(self, part: slice) -> Tensor:
        return torch.cat([outer.contracted(part) for outer in self.outers], 2)

    def joined(self, others: list[Use]) -> Stacked:
        stacks = [self.outers, *(use.outers for use in others if isinstance(use, Stacked))]
        return Stacked([first.joined(rest) for first, *rest in zip(*stacks, strict=True)])

    def some(self, vectors: slice) -> Stacked:
        return Stacked([outer.some(vectors) for outer in self.outers]).within(self.chunk)

    def counting(self, counts: Tensor | None) -> None:
        for outer in self.outers:
            outer.counting(counts)

    def inputs(self) -> tuple[Tensor, Tensor]:
        grams, counts = zip(*(outer.inputs() for outer in self.outers), strict=True)
        return torch.cat(grams), torch.tensor(counts, dtype=torch.float64, device=grams[0].device).reshape(-1, 1, 1)

    def outputs(self) -> Tensor:
        return torch.cat([outer.outputs() for outer in self.outers])

    def output_squares(self) -> Tensor:
        return torch.cat([outer.output_squares() for outer in self.outers])

    def squares(self) -> Tensor:
        return torch.cat([outer.squares() for outer in self._chunked])

    def squares_in(self, left: Basis | None, right: Basis | None) -> Tensor:
        lefts, rights = _bases(left, len(self.outers)), _bases(right, len(self.outers))
        triples = zip(self._chunked, lefts, rights, strict=True)
        return torch.cat([outer.squares_in(one, other) for outer, one, other in triples])

    def variance(self, spread: KroneckerCovariance) -> Tensor:
        parts = self._parted(spread)
        return super().variance(spread) if parts is None else total(o.variance(s) for o, s in parts)

    def covariance(self, spread: KroneckerCovariance) -> Tensor:
        parts = self._parted(spread)
        return super().covariance(spread) if parts is None else total(o.covariance(s) for o, s in parts)

    def product(self, spread: KroneckerCovariance, v: Tensor) -> Tensor:
        parts = self._parted(spread)
        return super().product(spread, v) if parts is None else total(o.product(s, v) for o, s in parts)

    def joint(self, spread: KroneckerCovariance) -> Tensor:
        parts = self._parted(spread)
        return super().joint(spread) if parts is None else total(o.joint(s) for o, s in parts)

    def along(self, steps: Tensor, part: slice = EVERY) -> Tensor:
        parts = steps.chunk(len(self.outers), 1)
        return total(outer.along(some, part) for outer, some in zip(self._chunked, parts, strict=True))

    def back(self, coefficients: Tensor) -> Tensor:
        return torch.cat([outer.back(coefficients) for outer in self._chunked], 1)

    def cross(self, other: Use) -> Tensor:
        if not isinstance(other, Stacked):
            return super().cross(other)
        return total(x.cross(y) for x, y in zip(self._chunked, other.outers, strict=True))

    def cross_each(self, other: Use) -> Tensor:
        if not isinstance(other, Stacked):
            return super().cross_each(other)
        return total(x.cross_each(y) for x, y in zip(self._chunked, other.outers, strict=True))

    def double(self) -> Stacked:
        return Stacked([outer.double() for outer in self.outers]).within(self.chunk)

    @property
    def _chunked(self) -> list[Outer]:
        for outer in self.outers:
            outer.chunk = self.chunk
        return self.outers

    def _parted(self, spread: KroneckerCovariance) -> list[tuple[Outer, KroneckerCovariance]] | None:
        """Return the covariance of each part, or None if it does not have one pair of bases for each part."""
        variances, count = spread.variances, len(self.outers)
        if variances.shape != self.factors and (spread.left is not None or spread.right is not None):
            return None
        lefts, rights = _bases(spread.left, count), _bases(spread.right, count)
        spreads = map(KroneckerCovariance, variances.reshape(self.factors).split(1), lefts, rights)
        return list(zip(self._chunked, spreads, strict=True))


def _bases(basis: Basis | None, count: int) -> list[Basis] | list[None]:
    return [None] * count if basis is None else basis.apart()
