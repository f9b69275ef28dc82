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


def eigh(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # (..., D, D) -> (..., D), (..., D, D)
    """Eigenvalues, not below zero, and eigenvectors of positive semi-definite matrices, in `dtype`.

    Up to 512 dimensions the work is done in float64. A matrix whose rows sum to zero, as those of softmax do, has the
    constant vector taken out before, so that its zero eigenvalue is an exact one: rounding there would compete with the
    prior once it is multiplied by the other Kronecker factor.
    """
    d = matrix.shape[-1]
    work = matrix.double() if d <= _MANY else matrix.to(dtype)
    if d > 1 and matrix.shape[:-2].numel() == 1 and _rows_sum_to_zero(matrix, dtype):
        values, vectors = _eigh_without_constant(work.reshape(d, d))
        values, vectors = values.reshape(matrix.shape[:-1]), vectors.reshape(matrix.shape)
    else:
        values, vectors = torch.linalg.eigh(work)
    return values.clamp(min=0).to(dtype), vectors.to(dtype).contiguous()


def _rows_sum_to_zero(matrix: Tensor, dtype: torch.dtype) -> bool:
    small = 100 * torch.finfo(dtype).eps * matrix.abs().sum(-1)
    return bool((matrix.sum(-1).abs() <= small).all())


def _eigh_without_constant(b: Tensor) -> tuple[Tensor, Tensor]:
    """In the basis of the Householder reflection I - c w w^T that takes the constant vector to a unit vector."""
    d = b.shape[0]
    constant = b.new_full((d,), d**-0.5)
    w = constant.clone()
    w[0] += 1
    c = 2 / (w @ w)
    bw = b @ w
    reflected = b - c * (torch.outer(w, bw) + torch.outer(bw, w)) + c**2 * (w @ bw) * torch.outer(w, w)
    values, inner = torch.linalg.eigh(reflected[1:, 1:])
    rest = torch.cat([torch.zeros_like(inner[:1]), inner]) - c * torch.outer(w, w[1:] @ inner)
    return torch.cat([values[:1] * 0, values]), torch.cat([constant.unsqueeze(1), rest], 1)
