"""Weights that are stored with inputs as rows: G = sum over positions of a g^T, the transpose of an `Outer`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.backprop.covariances import Basis, KroneckerCovariance, RowCovariance
from laplace.backprop.outer import Outer
from laplace.backprop.uses import EVERY, Use


@dataclass
class Transposed(Use):
    """Answers from a use with rows and columns swapped: it transposes questions and answers."""

    outer: Outer
    form, inputs_left = "kron", True

    def __post_init__(self) -> None:
        self.first = self.outer.first

    @property
    def g(self) -> Tensor:  # type: ignore[override]
        return self.outer.g

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.outer.shape

    @property
    def factors(self) -> tuple[int, int, int]:
        """Return (Gr, I, O)."""
        groups, o, i = self.outer.factors
        return groups, i, o

    @property
    def positions(self) -> int:  # type: ignore[override]
        """Return T."""
        return self.outer.positions

    @property
    def held(self) -> int:
        return self.outer.held

    def contracted(self, part: slice) -> Tensor:
        return self._turned(self.outer.contracted(part))

    @property
    def nbytes(self) -> int:
        return self.outer.nbytes

    def places(self, index: Tensor) -> Tensor:  # (p',)
        """Return the indices of weights in the tensor that is not transposed."""
        groups, i, o = self.factors
        group, row, column = torch.unravel_index(index, (groups, i, o))
        return (group * o + column) * i + row

    def joined(self, others: list[Use]) -> Transposed:
        return Transposed(self.outer.joined([use.outer for use in others if isinstance(use, Transposed)]))

    def some(self, vectors: slice) -> Transposed:
        return Transposed(self.outer.some(vectors)).within(self.chunk)

    def counting(self, counts: Tensor | None) -> None:
        self.outer.counting(counts)

    def inputs(self) -> tuple[Tensor, float]:
        return self.outer.inputs()

    def input_rows(self) -> Tensor | None:
        return self.outer.input_rows()

    def input_sketch(self, rank: int) -> tuple[Tensor, Tensor, float | Tensor]:
        return self.outer.input_sketch(rank)

    def outputs(self) -> Tensor:
        return self.outer.outputs()

    def output_rows(self) -> Tensor | None:
        return self.outer.output_rows()

    def output_sketch(self, rank: int) -> tuple[Tensor, Tensor]:
        return self.outer.output_sketch(rank)

    def output_squares(self) -> Tensor:
        return self.outer.output_squares()

    def squares(self) -> Tensor:
        return self._turned(self._chunked.squares())

    def squares_in(self, left: Basis | None, right: Basis | None) -> Tensor:
        return self._chunked.squares_in(right, left).mT

    def variance(self, spread: KroneckerCovariance) -> Tensor:
        if isinstance(spread, RowCovariance):
            return super().variance(spread)
        return self._chunked.variance(self._spread(spread))

    def covariance(self, spread: KroneckerCovariance) -> Tensor:
        if isinstance(spread, RowCovariance):
            return super().covariance(spread)
        return self._chunked.covariance(self._spread(spread))

    def product(self, spread: KroneckerCovariance, v: Tensor) -> Tensor:
        if isinstance(spread, RowCovariance):
            return super().product(spread, v)
        return self._chunked.product(self._spread(spread), v)

    def joint(self, spread: KroneckerCovariance) -> Tensor:
        if isinstance(spread, RowCovariance):
            return super().joint(spread)
        return self._chunked.joint(self._spread(spread))

    def along(self, steps: Tensor, part: slice = EVERY) -> Tensor:
        groups, i, o = self.factors
        return self._chunked.along(steps.unflatten(1, (groups, i, o)).mT.flatten(1), part)

    def back(self, coefficients: Tensor) -> Tensor:
        return self._turned(self._chunked.back(coefficients))

    def trace(self) -> Tensor:
        return self._chunked.trace()

    def load(self, steps: int) -> int:
        return self.outer.load(steps)

    def settled(self, part: slice) -> Use:
        settled = self._chunked.settled(part)
        return Transposed(settled) if isinstance(settled, Outer) else super().settled(part)

    def cross(self, other: Use) -> Tensor:
        return self._chunked.cross(other.outer) if isinstance(other, Transposed) else super().cross(other)

    def cross_each(self, other: Use) -> Tensor:
        return self._chunked.cross_each(other.outer) if isinstance(other, Transposed) else super().cross_each(other)

    def double(self) -> Transposed:
        return Transposed(self.outer.double()).within(self.chunk)

    @property
    def _chunked(self) -> Outer:
        self.outer.chunk = self.chunk
        return self.outer

    def _turned(self, flat: Tensor) -> Tensor:  # (..., Gr * O * I) -> (..., Gr * I * O)
        return flat.unflatten(-1, self.outer.factors).mT.flatten(-3)

    def _spread(self, spread: KroneckerCovariance) -> KroneckerCovariance:
        """Return the covariance of the transposed weights. Without bases, it may come in any shape."""
        return KroneckerCovariance(spread.variances.reshape(self.factors).mT, spread.right, spread.left)
