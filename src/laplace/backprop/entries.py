"""Gradients of single entries: for tensors of which only some weights are uncertain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laplace.backprop.activations import contract
from laplace.backprop.outer import Outer
from laplace.backprop.transposed import Transposed
from laplace.backprop.uses import DenseUse, SumUse, Use

_WORTH = 16  # entries of a matrix product that cost as much as one sum of gathered products


def at(use: Use, index: Tensor) -> Use:  # (p',)
    """Return a use of only the weights at some indices."""
    if isinstance(use, Outer):
        return Entries(use, index)
    if isinstance(use, SumUse):
        return SumUse([at(one, index) for one in use.uses])
    if isinstance(use, Transposed):
        return at(use.outer, use.places(index))
    return DenseUse(use.g[..., index]) if isinstance(use, DenseUse) else Picked(use, index)


@dataclass
class Picked(Use):
    """Picks some weights of a use that offers no shortcut to them."""

    use: Use
    index: Tensor  # (p',)
    form = "dense"

    @property
    def g(self) -> Tensor:  # type: ignore[override]
        return self.use.g

    @property
    def shape(self) -> tuple[int, int, int]:
        return *self.use.shape[:2], len(self.index)

    @property
    def held(self) -> int:
        k, _, p = self.use.shape
        return k * p + self.use.held

    @property
    def nbytes(self) -> int:
        return self.use.nbytes

    def contracted(self, part: slice) -> Tensor:
        return self.use.contracted(part)[..., self.index]

    def some(self, vectors: slice) -> Picked:
        return Picked(self.use.some(vectors), self.index).within(self.chunk)

    def double(self) -> Picked:
        return Picked(self.use.double(), self.index).within(self.chunk)


@dataclass
class Entries(Use):
    """Computes some entries of sum_t g a^T, each at a row (an output) and a column (an input feature), and no others.

    If they are most of the rows and columns that they touch, one product of these is cheaper than many short sums.
    """

    outer: Outer
    index: Tensor  # (p,), into the flattened (Gr * O, I)
    form = "dense"

    @property
    def g(self) -> Tensor:  # type: ignore[override]
        return self.outer.g

    @property
    def shape(self) -> tuple[int, int, int]:
        k, n, _ = self.outer.shape
        return k, n, len(self.index)

    @property
    def nbytes(self) -> int:
        return self.outer.nbytes

    def some(self, vectors: slice) -> Entries:
        return Entries(self.outer.some(vectors), self.index).within(self.chunk)

    def double(self) -> Entries:
        return Entries(self.outer.double(), self.index).within(self.chunk)

    def contracted(self, part: slice) -> Tensor:
        start, stop, _ = part.indices(self.shape[1])
        step = max(1, self.chunk // self._width)
        parts = [self._contracted(slice(s, min(s + step, stop))) for s in range(start, stop, step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _contracted(self, part: slice) -> Tensor:  # (K, n, p)
        g = self.outer.g[:, part].flatten(2, 3)  # (K, n, Gr * O, T)
        rows, columns = self._touched
        if not self._multiplied:
            a = self.outer.a.features(part, self._column).to(g.dtype)
            return (g[:, :, self._row] * a).sum(3)
        a = self.outer.a.features(part, columns).to(g.dtype)
        product = contract(a.unsqueeze(1), g[:, :, rows].unsqueeze(2)).squeeze(2)  # (K, n, rows, columns)
        at = torch.searchsorted(rows, self._row) * len(columns) + torch.searchsorted(columns, self._column)
        return product.flatten(2)[..., at]

    @property
    def _multiplied(self) -> bool:
        """Return whether all touched rows are multiplied by all touched columns."""
        rows, columns = self._touched
        return self.outer.positions > 1 and len(rows) * len(columns) <= _WORTH * len(self.index)

    @property
    def _width(self) -> int:
        """Return how many numbers are written out for one example."""
        (k, _, p), t, (rows, columns) = self.shape, self.outer.positions, self._touched
        if self._multiplied:
            return t * (k * len(rows) + len(columns)) + k * len(rows) * len(columns)
        return (2 * k + 1) * t * p

    @cached_property
    def _row(self) -> Tensor:  # (p,), of the Gr * O outputs
        return self.index // self.outer.factors[2]

    @cached_property
    def _column(self) -> Tensor:  # (p,), of the Gr * I features
        _, o, i = self.outer.factors
        return self._row // o * i + self.index % i

    @cached_property
    def _touched(self) -> tuple[Tensor, Tensor]:
        return self._row.unique(), self._column.unique()
