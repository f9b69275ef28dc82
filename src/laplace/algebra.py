"""Matrix products and decompositions that several rooms need."""

from __future__ import annotations

import torch
from torch import Tensor

_MANY = 512  # columns from which half a product is worth four calls


def gram(rows: Tensor) -> Tensor:  # (M, D) -> (D, D)
    """rows^T rows; for many columns only the lower triangle is computed, in four strips, and mirrored."""
    d = rows.shape[1]
    if d < _MANY:
        return rows.T @ rows
    out = rows.new_zeros(d, d)
    for k in range(4):
        a, b = k * d // 4, (k + 1) * d // 4
        torch.mm(rows[:, a:b].T, rows[:, :b], out=out[a:b, :b])
    return out.tril_().add_(out.tril(-1).T)
