"""Provide laplace-torch's Kronecker matrices: `Kron` has the factors, `KronDecomposed` their eigendecompositions.

A block belongs to a parameter tensor, flattened in row-major order. It is F (one factor, of a bias) or F1 (x) F2. A
factor is a matrix, or a vector that stands for a diagonal matrix.

`KronDecomposed` adds a number delta to each block: Q1 (x) Q2 (diag(l1 (x) l2) + delta) (Q1 (x) Q2)^T, or, with damping,
(l1 + sqrt(delta)) (x) (l2 + sqrt(delta)). A power of the matrix is a power of these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace.errors import InputError, OptionError

__all__ = ["Kron", "KronDecomposed"]

Factors = Sequence[Sequence[Tensor]]


class Kron:
    """Holds one or two factors per parameter tensor.

    Args:
        kfacs: one list per tensor: [F], or [F1, F2] for F1 (x) F2.
    """

    def __init__(self, kfacs: Factors) -> None:
        self.kfacs = [list(factors) for factors in kfacs]

    @classmethod
    def init_from_model(
        cls, model: nn.Module | Iterable[Tensor], device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> Kron:
        """Return factors of zeros for each parameter.

        Args:
            model: a network, or its parameters.
            device: where the factors are made.
            dtype: their dtype.

        Raises:
            OptionError: a parameter has no dimension.
        """
        kfacs = []
        for p in model.parameters() if isinstance(model, nn.Module) else model:
            if p.dim() == 0:
                raise OptionError("a parameter without dimensions has no Kronecker factors.")
            sides = [p.shape[0]] if p.dim() == 1 else [p.shape[0], p[0].numel()]
            kfacs.append([torch.zeros(side, side, device=device, dtype=dtype) for side in sides])
        return cls(kfacs)

    def __add__(self, other: Kron) -> Kron:
        if not isinstance(other, Kron):
            raise InputError(f"a Kron can be added to a Kron, not to {type(other).__name__}.")
        pairs = zip(self.kfacs, other.kfacs, strict=True)
        return Kron([[a + b for a, b in zip(left, right, strict=True)] for left, right in pairs])

    __radd__ = __add__

    def __mul__(self, scalar: float | Tensor) -> Kron:
        factor = _one_number(scalar)
        return Kron([[f * factor ** (1 / len(factors)) for f in factors] for factors in self.kfacs])

    __rmul__ = __mul__

    def __len__(self) -> int:
        return len(self.kfacs)

    def decompose(self, damping: bool = False) -> KronDecomposed:
        """Return the eigendecompositions of the factors; eigenvalues below zero are rounding errors, and set to zero.

        Args:
            damping: whether a number that is added is split over the two factors.
        """
        pairs = [[_eigh(f) for f in factors] for factors in self.kfacs]
        vectors, values = [[[pair[i] for pair in block] for block in pairs] for i in (1, 0)]
        return KronDecomposed(vectors, values, damping=damping)

    def bmm(self, W: Tensor, exponent: float = 1) -> Tensor:
        """Return the matrix times vectors.

        Args:
            W: (P,), (B, P) or (B, K, P).
            exponent: a power of the matrix; others than 1 decompose it.
        """
        if exponent != 1:
            return self.decompose().bmm(W, exponent)
        return _blockwise(W, self.kfacs, lambda factors, block: _times(factors, block))

    def logdet(self) -> Tensor:
        """Return the log-determinant."""
        return torch.stack([_block_logdet(factors) for factors in self.kfacs]).sum()

    def diag(self) -> Tensor:  # (P,)
        """Return the diagonal."""
        diagonals = [[f if f.dim() == 1 else f.diagonal() for f in factors] for factors in self.kfacs]
        return torch.cat([_product(factors).flatten() for factors in diagonals])

    def to_matrix(self) -> Tensor:  # (P, P)
        """Return the matrix, dense."""
        return torch.block_diag(*[_dense(factors) for factors in self.kfacs])


class KronDecomposed:
    """Holds the eigendecompositions of a `Kron`, and one number per tensor that is added.

    Args:
        eigenvectors: one list per tensor, as the factors.
        eigenvalues: one list per tensor, as the factors.
        deltas: (L,), or one number; zeros if left out.
        damping: whether they are split over the two factors.
    """

    def __init__(
        self, eigenvectors: Factors, eigenvalues: Factors, deltas: Tensor | None = None, damping: bool = False
    ) -> None:
        self.eigenvectors = [list(block) for block in eigenvectors]
        self.eigenvalues = [list(block) for block in eigenvalues]
        self.damping = damping
        self.deltas = self.eigenvalues[0][0].new_zeros(len(self)) if deltas is None else deltas.expand(len(self))

    def detach(self) -> KronDecomposed:
        """Return the same matrix with deltas that are detached from their graph."""
        return KronDecomposed(self.eigenvectors, self.eigenvalues, self.deltas.detach(), self.damping)

    def __add__(self, deltas: Tensor) -> KronDecomposed:
        if not isinstance(deltas, Tensor):
            raise InputError(f"what is added must be a tensor, not {type(deltas).__name__}.")
        if deltas.dim() > 1 or deltas.numel() not in (1, len(self)):
            raise InputError(f"deltas has shape {tuple(deltas.shape)}; give one number, or {len(self)}.")
        return KronDecomposed(self.eigenvectors, self.eigenvalues, self.deltas + deltas.reshape(-1), self.damping)

    __radd__ = __add__

    def __mul__(self, scalar: float | Tensor) -> KronDecomposed:
        factor = _one_number(scalar)
        values = [[v * factor ** (1 / len(block)) for v in block] for block in self.eigenvalues]
        return KronDecomposed(self.eigenvectors, values, self.deltas, self.damping)

    __rmul__ = __mul__

    def __len__(self) -> int:
        return len(self.eigenvalues)

    def logdet(self) -> Tensor:
        """Return the log-determinant."""
        return torch.stack([values.log().sum() for values in self._spectra()]).sum()

    def bmm(self, W: Tensor, exponent: float = -1) -> Tensor:
        """Return a power of the matrix times vectors.

        Args:
            W: (P,), (B, P) or (B, K, P).
            exponent: the power; -1 solves.
        """
        blocks = list(zip(self.eigenvectors, self._spectra(), strict=True))

        def block(factors: tuple[list[Tensor], Tensor], w: Tensor) -> Tensor:
            vectors, values = factors
            rotated = _times([q.mT for q in vectors], w) * values.flatten() ** exponent
            return _times(vectors, rotated)

        return _blockwise(W, blocks, block)

    def inv_square_form(self, W: Tensor) -> Tensor:  # (B, K, P) -> (B, K, K)
        """Return W M^-1 W^T.

        Args:
            W: (B, K, P).
        """
        return W @ self.bmm(W).mT

    def diag(self, exponent: float = 1) -> Tensor:  # (P,)
        """Return the diagonal of a power of the matrix.

        Args:
            exponent: the power.
        """
        out = []
        for vectors, values in zip(self.eigenvectors, self._spectra(), strict=True):
            left = vectors[0] ** 2
            squares = left @ values**exponent
            out.append((squares if len(vectors) == 1 else squares @ (vectors[1] ** 2).mT).flatten())
        return torch.cat(out)

    def to_matrix(self, exponent: float = 1) -> Tensor:  # (P, P)
        """Return a power of the matrix, dense.

        Args:
            exponent: the power.
        """
        blocks = []
        for vectors, values in zip(self.eigenvectors, self._spectra(), strict=True):
            q = vectors[0] if len(vectors) == 1 else torch.kron(*vectors)
            blocks.append((q * values.flatten() ** exponent) @ q.mT)
        return torch.block_diag(*blocks)

    def _spectra(self) -> list[Tensor]:
        """Return the eigenvalues of each block: (p,), or (p1, p2)."""
        out = []
        for values, delta in zip(self.eigenvalues, self.deltas, strict=True):
            if self.damping and len(values) == 2:
                out.append(_product([v + delta.sqrt() for v in values]))
            else:
                out.append(_product(values) + delta)
        return out


def _one_number(scalar: Any) -> Any:
    if not isinstance(scalar, (int, float)) and not (isinstance(scalar, Tensor) and scalar.numel() == 1):
        raise InputError(f"a Kronecker matrix is multiplied by one number, not by {type(scalar).__name__}.")
    return scalar.reshape(()) if isinstance(scalar, Tensor) else scalar


def _eigh(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors; those of a diagonal factor are the unit vectors."""
    if factor.dim() == 1:
        return factor.clamp(min=0), torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    values, vectors = torch.linalg.eigh(factor)
    return values.clamp(min=0), vectors


def _product(vectors: Sequence[Tensor]) -> Tensor:  # [(p,)] -> (p,), [(p,), (q,)] -> (p, q)
    return vectors[0] if len(vectors) == 1 else torch.outer(*vectors)


def _dense(factors: Sequence[Tensor]) -> Tensor:
    matrices = [f.diag() if f.dim() == 1 else f for f in factors]
    return matrices[0] if len(matrices) == 1 else torch.kron(*matrices)


def _times(factors: Sequence[Tensor], w: Tensor) -> Tensor:  # (..., p) -> (..., p)
    """Return (F1 (x) F2) w without the product."""
    matrices = [f.diag() if f.dim() == 1 else f for f in factors]
    if len(matrices) == 1:
        return w @ matrices[0].mT
    left, right = matrices
    shaped = w.reshape(*w.shape[:-1], left.shape[1], right.shape[1])
    return (left @ shaped @ right.mT).flatten(-2)


def _blockwise(W: Tensor, blocks: Sequence[Any], times: Callable[[Any, Tensor], Tensor]) -> Tensor:
    if W.dim() > 3:
        raise InputError(f"W has shape {tuple(W.shape)}; give (P,), (B, P) or (B, K, P).")
    sizes = [_side(block) for block in blocks]
    parts = [times(block, w) for block, w in zip(blocks, W.split(sizes, dim=-1), strict=True)]
    return torch.cat(parts, -1)


def _side(block: Any) -> int:
    factors = block[0] if isinstance(block, tuple) else block
    side = 1
    for factor in factors:
        side *= factor.shape[0]
    return side


def _block_logdet(factors: Sequence[Tensor]) -> Tensor:
    logs = [f.log().sum() if f.dim() == 1 else torch.logdet(f) for f in factors]
    return logs[0] if len(logs) == 1 else len(factors[1]) * logs[0] + len(factors[0]) * logs[1]
