"""Keep a sum of x x^T over few rows x as the rows.

Few rows have fewer numbers than their product: the output factor of a bias over 32 examples of a layer with 3,072
outputs is 32 rows, or a matrix of 75 MB in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.linalg.folded import Folded
from laplace.linalg.symmetric import plain_gram


class FewRows(Folded):
    """Is the matrix rows^T rows, of which only the rows (M, D) are kept."""

    @classmethod
    def of(cls, rows: Tensor, dtype: torch.dtype) -> FewRows:  # (M, D)
        """Return the sum over some rows, whose product is taken in `dtype`."""
        return cls(rows, rows.shape[1], dtype)

    def written_out(self) -> Tensor:  # (1, D, D)
        """Return the matrix. It costs M D^2 / 2 multiplications, and is not kept."""
        return plain_gram(self.kept.to(self.dtype)).unsqueeze(0)

    def finite(self) -> bool:
        """Return whether the trace of the matrix, which no entry exceeds, is a number in its dtype."""
        norm = torch.linalg.vector_norm(self.kept)
        norm = norm if norm.isfinite() else torch.linalg.vector_norm(self.kept, dtype=torch.float64)
        return float(norm) < torch.finfo(self.dtype).max ** 0.5
