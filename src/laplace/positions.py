"""Where a network's outputs are: C of them for each example, or at each of an example's positions.

Likelihoods, links and structures know one shape, rows of C outputs. A network that returns (N, T, C), (N, C, H, W) or
(N,) has a row for each position of each example, example after example; positions that are masked have none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from laplace.errors import InputError, OptionError, shown

IGNORED: Final = -100  # the class label that stands for none, as in torch's cross_entropy


def class_dim_of(value: Any) -> int | None:
    """The option `class_dim`, checked."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value == 0):
        raise OptionError(
            f"class_dim={shown(value)} must say which dimension of the outputs has the classes (or the outputs of one "
            "position): -1 for (N, T, C), 1 for (N, C, H, W), None where there is no such dimension. Dimension 0 holds "
            "the examples."
        )
    return value


@dataclass(frozen=True)
class Positions:
    """The shape of a batch of outputs."""

    n: int  # examples
    shape: tuple[int, ...]  # of an example's positions: () for (N, C), (T,), (H, W)
    c: int
    dim: int | None  # which dimension of the network's output has the C; None where C = 1 has none

    @classmethod
    def of(cls, f: Tensor, class_dim: int | None) -> Positions:
        """Those of a network's output."""
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
        """Positions of one example."""
        return math.prod(self.shape)

    @property
    def grid(self) -> tuple[int, ...]:
        """(N, *positions): one entry for each row."""
        return self.n, *self.shape

    @property
    def several(self) -> bool:
        """Whether examples have positions at all."""
        return bool(self.shape)

    def rows(self, f: Tensor, lead: int = 0) -> Tensor:  # (..., *the network's own shape) -> (..., N * T, C)
        """Outputs as rows; `lead` dimensions come before."""
        f = f.unsqueeze(-1) if self.dim is None else f.movedim(lead + self.dim, -1)
        return f.flatten(lead, -2)

    def shaped(self, rows: Tensor, lead: int = 0) -> Tensor:  # (..., N * T, C) -> (..., *the network's own shape)
        """Rows in the shape that the network gives."""
        f = rows.unflatten(lead, self.grid)
        if self.dim is None:
            return f.squeeze(-1)
        return f.movedim(-1, lead + self.dim)

    def matrices(self, rows: Tensor) -> Tensor:  # (N * T, C, C) -> (N, *positions, C, C)
        """Covariances of each row at their positions; variances where there is one output without a dimension."""
        f = rows.unflatten(0, self.grid)
        return f.squeeze(-1).squeeze(-1) if self.dim is None else f

    def each(self, rows: Tensor) -> Tensor:  # (N * T,) -> (N, *positions)
        """One number for each row at its position."""
        return rows.reshape(self.grid)

    def labels(self, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The labels of the rows, and the indices of those that count; None where all do."""
        own, counted = self._own, None
        if y.shape == self.grid and self.dim is not None:  # one label for each row
            y = y.flatten()
            classes = self.c > 1 and not y.is_floating_point() and not y.is_complex()
            counted = y != IGNORED if classes else None
        elif y.shape == own and (self.several or self.dim is None):
            y = self.rows(y)
        elif self.several:
            raise InputError(
                f"the labels have shape {tuple(y.shape)}; outputs of shape {own} need {self.grid}, a class at each "
                f"position, or {own}, a number for each output."
            )
        if mask is not None:
            flat = self._checked(mask).to(y.device)
            counted = flat if counted is None else counted & flat
        if counted is None or bool(counted.all()) or len(y) != len(counted):  # which the likelihood will refuse
            return y, None
        return y[counted], counted.nonzero().flatten()

    @property
    def _own(self) -> tuple[int, ...]:
        """The network's own shape."""
        if self.dim is None:
            return self.grid
        return *self.grid[: self.dim], self.c, *self.grid[self.dim :]

    def _checked(self, mask: Tensor) -> Tensor:  # (N * T,)
        if mask.shape != self.grid:
            raise InputError(
                f"the mask has shape {tuple(mask.shape)}; it must have shape {self.grid}, true at each position whose "
                "label counts."
            )
        if bool(((mask != 0) & (mask != 1)).any()):
            raise InputError("the mask must hold true and false, or 1 and 0.")
        return mask.flatten() != 0
