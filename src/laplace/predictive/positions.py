"""Positions: where in its output tensor a network has its C outputs.

Likelihoods, links and structures know one shape, rows of C outputs. A network that returns (N, T, C), (N, C, H, W) or
(N,) has one row for each position of each example, example after example. Masked positions have no row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laplace.checks import shown
from laplace.errors import InputError, OptionError


def class_dim_of(value: Any) -> int | None:
    """Return the option `class_dim`. Refuse what is not a dimension."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value == 0):
        raise OptionError(
            f"class_dim={shown(value)} must say which dimension of the outputs has the classes (or the outputs of one "
            "position): -1 for (N, T, C), 1 for (N, C, H, W), None if there is no such dimension. Dimension 0 holds "
            "the examples."
        )
    return value


@dataclass(frozen=True)
class Positions:
    """Describes the shape of a batch of outputs."""

    n: int  # examples
    shape: tuple[int, ...]  # of an example's positions: () for (N, C), (T,), (H, W)
    c: int
    dim: int | None  # which dimension of the network's output has the C; None if it has no such dimension, and C = 1

    @classmethod
    def of(cls, f: Tensor, class_dim: int | None) -> Positions:
        """Return the positions of a network's output."""
        if f.dim() == 0:
            raise InputError(
                "the network's output is a single number; one or more for each example are needed: (N, C)."
            )
        if class_dim is None or f.dim() == 1:
            return cls(f.shape[0], tuple(f.shape[1:]), 1, None)
        dim = class_dim + f.dim() if class_dim < 0 else class_dim
        if not 1 <= dim < f.dim():
            raise InputError(
                f"the network's output has shape {tuple(f.shape)}, which has no dimension class_dim={class_dim} beside "
                f"that of the examples. Valid: 1 to {f.dim() - 1}, or -1 for the last."
            )
        return cls(f.shape[0], (*f.shape[1:dim], *f.shape[dim + 1 :]), f.shape[dim], dim)

    @property
    def count(self) -> int:
        """Return how many positions one example has."""
        return math.prod(self.shape)

    @property
    def grid(self) -> tuple[int, ...]:
        """Return (N, *positions), the shape that has one entry for each row."""
        return self.n, *self.shape

    @property
    def several(self) -> bool:
        """Return whether examples have positions at all."""
        return bool(self.shape)

    def rows(self, f: Tensor, lead: int = 0) -> Tensor:  # (..., *the network's own shape) -> (..., N * T, C)
        """Return outputs as rows. The first `lead` dimensions stay in front."""
        f = f.unsqueeze(-1) if self.dim is None else f.movedim(lead + self.dim, -1)
        return f.flatten(lead, -2)

    def shaped(self, rows: Tensor, lead: int = 0) -> Tensor:  # (..., N * T, C) -> (..., *the network's own shape)
        """Return rows in the shape of the network's output. The first `lead` dimensions stay in front."""
        f = rows.unflatten(lead, self.grid)
        if self.dim is None:
            return f.squeeze(-1)
        return f.movedim(-1, lead + self.dim)

    def matrices(self, rows: Tensor) -> Tensor:  # (N * T, C, C) -> (N, *positions, C, C)
        """Return the covariance of each row at its position; the variance if the output has no dimension for C."""
        f = rows.unflatten(0, self.grid)
        return f.squeeze(-1).squeeze(-1) if self.dim is None else f

    def each(self, rows: Tensor) -> Tensor:  # (N * T,) -> (N, *positions)
        """Return one number per row at its position."""
        return rows.reshape(self.grid)

    def labels(self, y: Tensor) -> Tensor:  # -> (N * T, ...)
        """Return the labels of the rows.

        There is one label per position, (N, *positions), or as many as the likelihood asks for, in the dimension of the
        C.
        """
        if not self.several:
            return y.unsqueeze(1) if self.dim is None and y.dim() == 1 else y
        if self.dim is not None and y.shape == self.grid:
            return y.flatten()
        if self._placed(y):
            return self.rows(y)
        raise InputError(
            f"the labels have shape {tuple(y.shape)}; outputs of shape {self._own} need {self.grid}, a class at each "
            f"position, or {self._own}, a number for each output."
        )

    def given(self, values: Tensor, what: str) -> Tensor:  # -> (N * T,) or (N * T, C)
        """Return one value, or C values, per row. `values` may be per example, per position or per output."""
        if not self.several:
            return values
        if values.shape == (self.n,):
            return values.repeat_interleave(self.count)
        if values.shape == self.grid:
            return values.flatten()
        if self._placed(values):
            return self.rows(values)
        raise InputError(
            f"the {what} have shape {tuple(values.shape)}; outputs of shape {self._own} need ({self.n},), one for each "
            f"example, or {self.grid}, one for each position."
        )

    def mask(self, mask: Tensor) -> Tensor:  # -> (N * T,)
        """Return whether each row counts."""
        if mask.shape != self.grid:
            raise InputError(
                f"the mask has shape {tuple(mask.shape)}; it must be {self.grid}, true at each position whose label "
                "counts."
            )
        if bool(((mask != 0) & (mask != 1)).any()):
            raise InputError("the mask must hold true and false, or 1 and 0. For other factors pass `weights`.")
        return mask.flatten() != 0

    @property
    def _own(self) -> tuple[int, ...]:
        """Return the shape of the network's output."""
        return self.grid if self.dim is None else (*self.grid[: self.dim], self.c, *self.grid[self.dim :])

    def _placed(self, values: Tensor) -> bool:
        """Return whether `values` has these positions, with any number of values at each."""
        shape = tuple(values.shape)
        if self.dim is None:
            return shape == self.grid
        return len(shape) > len(self.grid) and (*shape[: self.dim], *shape[self.dim + 1 :]) == self.grid
