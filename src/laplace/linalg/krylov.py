"""Find eigenpairs of a symmetric matrix H from its products with blocks of vectors (block Krylov).

The basis Q keeps all blocks X_0, X_1, ... Each new block is the part of H X_j that is orthogonal to the blocks before
it, so that H Q^T = Q^T T + (X_next)^T R (last block's columns), with T = Q H Q^T small. The eigenpairs of T (Ritz
pairs) are those of H up to residuals, which follow from R without another product. Vectors are rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SEED = 0x10AD


@dataclass(frozen=True)
class Ritz:
    """Approximate eigenpairs, largest eigenvalue first."""

    values: Tensor  # (M,), float64
    weights: Tensor  # (M, M), columns: the eigenvectors in terms of the basis
    residuals: Tensor  # (M,), |H u - l u|


@dataclass(frozen=True)
class Krylov:
    """Holds a basis, H's projection onto it, and the block to multiply by H next."""

    basis: Tensor  # (M, P), orthonormal
    projected: Tensor  # (M, M), float64
    block: Tensor  # (B, P), orthonormal and orthogonal to the basis

    @classmethod
    def begun(cls, block: Tensor) -> Krylov:
        """Return an empty basis and the first block."""
        return cls(block[:0], block.new_zeros(0, 0, dtype=torch.float64), block)

    def grown(self, product: Tensor) -> tuple[Krylov, Ritz]:  # (B, P)
        """Return the basis extended by H times the block, with its Ritz pairs.

        The next block is empty once the basis contains everything that H maps the block to.
        """
        basis, m = torch.cat([self.basis, self.block]), len(self.basis)
        rows = product @ basis.T  # (B, M + B)
        rest = product - rows @ basis
        rest = rest - (rest @ basis.T) @ basis  # again: rounding left a part inside the basis
        rows = rows.double()
        projected = torch.cat([torch.cat([self.projected, rows[:, :m].T], 1), rows])
        projected = (projected + projected.T) / 2
        values, weights = torch.linalg.eigh(projected)
        values, weights = values.flip(0), weights.flip(1)
        q, r = torch.linalg.qr(rest.T)  # (P, B), (B, B)
        left, sizes, right = torch.linalg.svd(r.double())
        residuals = (sizes.unsqueeze(1) * (right @ weights[m:])).norm(dim=0)
        new = sizes > 30 * torch.finfo(product.dtype).eps * values.abs().max()
        block = (q @ left[:, new].to(q)).T
        block = torch.linalg.qr((block - (block @ basis.T) @ basis).T)[0].T  # again: scaling magnified the rounding
        return Krylov(basis, projected, block), Ritz(values, weights, residuals)

    def restarted(self, ritz: Ritz, keep: int) -> Krylov:
        """Return a smaller basis, the first `keep` Ritz vectors. Saves memory; accuracy stays almost the same."""
        return Krylov(vectors(self, ritz, keep), ritz.values[:keep].diag(), self.block)


def vectors(krylov: Krylov, ritz: Ritz, count: int) -> Tensor:  # (count, P)
    """Return the first `count` Ritz vectors."""
    return ritz.weights[:, :count].T.to(krylov.basis) @ krylov.basis


def start(count: int, size: int) -> Tensor:  # (count, size), float64
    """Return random orthonormal vectors, the same on every call. Returns the unit vectors if count >= size."""
    if count >= size:
        return torch.eye(size, dtype=torch.float64)
    random = torch.randn(size, count, dtype=torch.float64, generator=torch.Generator().manual_seed(_SEED))
    return torch.linalg.qr(random)[0].T.contiguous()
