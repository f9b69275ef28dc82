"""Decompose a wide matrix of low rank by randomised range finding (Halko, Martinsson and Tropp, 2011).

Few examples leave few directions: the output factor of a bias over N examples has rank N, however wide the layer is.
With Y = A S for random signs S, R columns, and Q an orthonormal basis of Y, the eigenvalues of Q^T A Q are those of A,
except for what lies outside of Q. Both parts of that are known. With P = I - Q Q^T,

    |A - Q Q^T A Q Q^T| <= 2 |P A Q| + |P A P|,    |P A P| <= tr(A) - tr(Q^T A Q)

because A is positive semi-definite. The result is taken if this is at most 3e-12 of the trace, which is rounding in
float64. It costs 4 D^2 R multiplications in place of 9 D^3 or more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.linalg.sketch import columns_for, reflections

_WIDE = 1024  # columns from which it is tried
_SHARE = 8  # the rank may be the number of columns over this: trying costs a tenth of a decomposition
_NOTHING = 1e-12  # share of the trace outside of the range that is rounding in float64


def low_rank_eigh(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:  # (D, D) -> (D,), (D, R), (R, R)
    """Return eigenvalues and eigenvectors in float64 if the rank of a positive semi-definite matrix is far below D.

    There are R leading eigenvalues, in no order, and D - R zeros. The eigenvectors are V and T of `reflections`. None
    if the matrix is narrow, in float32, where rounding hides the rank, or of higher rank.
    """
    d = matrix.shape[-1]
    if d < _WIDE or matrix.dtype != torch.float64:
        return None
    rank, trace = d // _SHARE, matrix.trace()
    if not _may_be_low(matrix, rank) or trace <= 0:
        return None
    q = torch.linalg.qr(matrix @ columns_for(d, rank, matrix)).Q
    image = matrix @ q
    inner = q.T @ image
    outside = torch.linalg.matrix_norm(image - q @ inner)
    if max(outside, trace - inner.trace()) > _NOTHING * trace:
        return None
    values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
    v, t = reflections((q @ vectors).unsqueeze(0))
    return torch.cat([values, values.new_zeros(d - rank)]), v[0], t[0]


def _may_be_low(matrix: Tensor, rank: int) -> bool:
    """Return whether a block of rank + 1 rows and columns is singular, as it is if the matrix has at most this rank."""
    block = matrix[: rank + 1, : rank + 1]
    least = 10 * _NOTHING * block.diagonal().mean()
    shifted = block - least * torch.eye(rank + 1, dtype=block.dtype, device=block.device)
    return bool(torch.linalg.cholesky_ex(shifted).info != 0)
