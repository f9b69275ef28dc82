"""Tell from a symmetric matrix whether float32 was, or will be, enough for it.

An error E of a positive semi-definite matrix M does no harm, however small the prior, if

    -s M <= E <= s M    for a small s:

no variance changes by more than a share s. The same then holds for sums of such matrices. An error of norm e does so if
the smallest eigenvalue of M is at least e / s, which a Cholesky factorisation of M - e / s I shows. It costs D^3 / 3
multiplications, a small part of what it saves. A decomposition shows it itself.

With a prior precision delta, M + delta I stands in place of M: a prior far above e makes float32 enough for any M.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Errors were measured: see the two functions. The bounds leave 0.3 % of a variance to rounding, of the 1 % promised.
_PRODUCTS = 1e-4  # smallest eigenvalue for products of up to 64 columns, at a unit diagonal
_DECOMPOSED = 1e-3  # smallest eigenvalue for a decomposition, relative to the norm
_ERROR = 3e-6  # of a decomposition in float32, relative to the norm
_COVERED = 1e-4  # share of a variance that an error may change by unasked, no more than other rounding in float32 does
_STRIDE = 2


def float32_products_suffice(matrix: Tensor) -> bool:  # (..., D, D), in float64
    """Return whether rounding did no harm to a sum of products x x^T that were taken in float32, and added in float64.

    The entry i, j is rounded by at most 4e-8 sqrt(M_ii M_jj), for up to 1,024 positions in each product. So we scale to
    a unit diagonal. Rows that are zero, as those of dead units, are exact, and are left out.
    """
    scale = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(matrix.dtype).tiny).rsqrt()
    scaled = matrix * (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    scaled.diagonal(dim1=-2, dim2=-1).fill_(1 - _PRODUCTS)
    return not torch.linalg.cholesky_ex(scaled).info.any()


def least_in_float32(matrix: Tensor) -> Tensor:  # (D, D) -> ()
    """Return the smallest eigenvalue with which an eigendecomposition in float32 does no harm.

    Its error is 3e-6 of the largest eigenvalue, which is at most the largest sum of a row.
    """
    return _DECOMPOSED * torch.linalg.vector_norm(matrix, 1, dim=-1).max()


def prior_covers(delta: float, largest: float) -> bool:
    """Return whether a prior precision makes up for a decomposition in float32 of a matrix of the norm `largest`."""
    return _ERROR * largest <= _COVERED * delta


def may_exceed(matrix: Tensor, least: Tensor, constant: bool) -> bool:  # (D, D), in float32
    """Return whether no eigenvalue may be below `least`. False if one surely is.

    A block of every second row and column has no eigenvalue below the smallest of the matrix. So if the block's is too
    small, the matrix's is, too, for an eighth of the cost of looking at all of it.

    `constant`: the rows sum to zero, and the eigenvalue of the constant vector does not count.
    """
    block = matrix[::_STRIDE, ::_STRIDE] + (matrix.diagonal().mean() / len(matrix) if constant else 0)
    block.diagonal().sub_(least)
    return not torch.linalg.cholesky_ex(block).info.any()
