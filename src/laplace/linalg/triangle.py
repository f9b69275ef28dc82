"""Keep a wide sum of x x^T as its lower triangle.

The triangle is cut into strips of neighbouring rows, each as long as its last row, which are multiplied out as ordinary
matrices. Eight strips are 9/16 of the whole matrix, sixteen are 17/32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.linalg.folded import Folded
from laplace.linalg.symmetric import strips


class Triangle(Folded):
    """Is a matrix of which the strips of the lower triangle are kept, one after the other in one row of numbers.

    Only `GramSum` adds to it, while nobody else has it.
    """

    @classmethod
    def zeros(cls, d: int, like: Tensor) -> Triangle:
        """Return the triangle of a matrix of zeros, in the dtype and on the device of `like`."""
        return cls(like.new_zeros(sum((b - a) * b for a, b in strips(d))), d, like.dtype)

    def add_rows(self, rows: Tensor) -> None:  # (M, D)
        """Add rows^T rows. The product is taken in the dtype of the rows."""
        if rows.dtype != self.dtype:
            term = Triangle.zeros(self.shape[-1], rows)
            term.add_rows(rows)
            self.kept.add_(term.kept)
            return
        for (a, b), strip in self._strips():
            strip.addmm_(rows[:, a:b].T, rows[:, :b])

    def add_matrix(self, matrix: Tensor) -> None:  # (D, D)
        """Add a symmetric matrix."""
        for (a, b), strip in self._strips():
            strip.add_(matrix[a:b, :b])

    def converted(self, dtype: torch.dtype) -> Triangle:
        """Return the same matrix in a dtype; this object if it has that."""
        return self if dtype == self.dtype else Triangle(self.kept.to(dtype), self.shape[-1], dtype)

    def written_out(self) -> Tensor:  # (1, D, D)
        """Return the matrix. The numbers are copied, and it is not kept."""
        d = self.shape[-1]
        whole = self.kept.new_empty(d, d)
        for (a, b), strip in self._strips():
            whole[a:b, :b] = strip
            whole[:a, a:b] = strip[:, :a].T
        return whole.unsqueeze(0)

    def finite(self) -> bool:
        return bool(self.kept.sum().isfinite()) or bool(self.kept.isfinite().all())

    def _strips(self) -> list[tuple[tuple[int, int], Tensor]]:
        """Return the bounds of each strip, a and b, and its numbers, (b - a, b)."""
        bounds = strips(self.shape[-1])
        parts = self.kept.split([(b - a) * b for a, b in bounds])
        return [((a, b), part.view(b - a, b)) for (a, b), part in zip(bounds, parts, strict=True)]
