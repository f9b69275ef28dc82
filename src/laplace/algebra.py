"""Matrix products and decompositions that several rooms need."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.errors import NumericalError, warn

EIGH = 6.0  # multiplications of an eigendecomposition, in units of the cube of its side
SYMMETRIC = 0.6  # share of the multiplications that `gram` takes of a whole product
_HELD = 2**22  # numbers collected before a product, at most
_ENOUGH = 512  # rows that a product is as fast with as with more
_MANY = 512  # columns from which half a product is worth several calls
_ALIGNED = 16  # strips begin at multiples of it: kernels work on whole registers
_LONG = 2**11  # rows from which it is worth them for few columns, too
_PRECISE = 256  # columns up to which sums and decompositions are in float64
_ROUNDED = 1e3  # roundings of the largest eigenvalue, down to which a negative one is rounding


def gram(rows: Tensor) -> Tensor:  # (M, D) -> (D, D)
    """rows^T rows; where that pays, only the lower triangle is computed, in strips, and mirrored.

    Few rows do not span all columns. Their product is in float64, so that what they do not span is zero, however small
    the prior.
    """
    m, d = rows.shape
    if m < 2 * d:
        rows = rows.double()
    if d < _MANY and (d < _ALIGNED or m < _LONG):
        return rows.T @ rows
    return _mirror(_add_half(rows.new_zeros(d, d), rows))


def precise_gram(rows: Tensor) -> Tensor:  # (M, D) -> (D, D)
    """The same in float64: directions that the rows do not have are zero, whatever the prior and the noise."""
    return gram(rows.double())


def _add_half(total: Tensor, rows: Tensor) -> Tensor:  # (D, D), (M, D)
    """Add rows^T rows to the lower triangle."""
    for a, b in _strips(len(total)):
        total[a:b, :b].addmm_(rows[:, a:b].T, rows[:, :b])
    return total


def _mirror(total: Tensor) -> Tensor:  # (D, D)
    """Write the lower triangle to the upper one."""
    for a, b in _strips(len(total)):
        total[:a, a:b] = total[a:b, :a].T
    return total


def _strips(d: int) -> list[tuple[int, int]]:
    """Neighbouring rows of a matrix; a strip is multiplied out up to its end."""
    count = 8 if d >= _MANY else 3
    ends = [k * d // count // _ALIGNED * _ALIGNED for k in range(count)]
    return list(zip(ends, [*ends[1:], d], strict=True))


def total(terms: Iterable[Tensor]) -> Tensor:
    """Their sum; one is held beside it at a time."""
    return functools.reduce(operator.add, terms)


@dataclass(frozen=True)
class Clipped:
    """Eigenvalues of positive semi-definite matrices that were below zero, and were set to it."""

    count: int = 0
    lowest: float = 0.0  # the most negative one, relative to the largest eigenvalue of its matrix

    def __add__(self, other: Clipped) -> Clipped:
        return Clipped(self.count + other.count, min(self.lowest, other.lowest))


def clip(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Clipped]:  # (..., D)
    """Eigenvalues, not below zero, and how many were; a warning where that is more than rounding in `dtype`."""
    found = values.detach()
    below = found < 0
    if not below.any():
        return values, Clipped()
    largest = found.abs().amax(-1, keepdim=True)
    clipped = Clipped(int(below.sum()), float((found / largest)[below].min()))
    if clipped.lowest < -_ROUNDED * torch.finfo(dtype).eps:
        warn(
            f"{clipped.count} eigenvalues of a curvature that can have no negative ones are below zero, the lowest "
            f"{clipped.lowest:.2g} of the largest: more than rounding in {dtype}. They are set to zero. A network in "
            "float64 shows whether something else is wrong: fit with model.double()."
        )
    return values.clamp(min=0), clipped


def spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:  # (..., D, D) -> (..., D), (..., D, D)
    """Eigenvalues and eigenvectors of symmetric matrices."""
    try:
        return torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError as error:
        raise NumericalError(
            f"no eigenvalues were found of a {matrix.shape[-1]} x {matrix.shape[-1]} matrix with entries up to "
            f"{float(matrix.abs().max()):.3g}. Scale the inputs of the network to about 1."
        ) from error


def cholesky(matrix: Tensor) -> Tensor:  # (..., D, D) -> (..., D, D)
    """L with L L^T = matrix, of precisions relative to a prior: they are positive definite but for rounding."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed.any():
        raise NumericalError(
            "the posterior precision has lost the prior to rounding: what the data says is up to "
            f"{float(matrix.detach().abs().max()):.2g} times as much. Raise the prior precision, or sigma_noise."
        )
    return factor


def eigh(
    matrix: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Clipped]:  # (..., D, D) -> (..., D), (..., D, D), how many were below zero
    """Eigenvalues, not below zero, and eigenvectors of positive semi-definite matrices, in `dtype`.

    Up to 256 dimensions, and of sums in float64, the work is done in float64. A matrix whose rows sum to zero, as those
    of softmax do, has the constant vector taken out before, so that its zero eigenvalue is an exact one: rounding there
    would compete with the prior once it is multiplied by the other Kronecker factor.
    """
    d = matrix.shape[-1]
    work = matrix.double() if d <= _PRECISE or matrix.dtype == torch.float64 else matrix.to(dtype)
    if d > 1 and matrix.shape[:-2].numel() == 1 and _rows_sum_to_zero(matrix, dtype):
        values, vectors = _eigh_without_constant(work.reshape(d, d))
        values, vectors = values.reshape(matrix.shape[:-1]), vectors.reshape(matrix.shape)
    else:
        values, vectors = spectrum(work)
    values, clipped = clip(values, dtype)
    return values.to(dtype), vectors.to(dtype).contiguous(), clipped


def check_positive(eigenvalues: Tensor, rounded: bool = False) -> None:
    """Refuse a precision with eigenvalues that are not positive, as an exact Hessian away from an optimum has.

    `rounded`: its factorisation has failed already, so that the smallest is zero but for rounding if not below.
    """
    eigenvalues = eigenvalues.detach()
    if not eigenvalues.isfinite().all():
        raise NumericalError(
            f"the posterior precision is out of range in {eigenvalues.dtype}: what the data says is too much. "
            "Scale the inputs of the network to about 1, raise sigma_noise, or take model.double()."
        )
    if rounded or not (eigenvalues > 0).all():
        smallest, largest = float(eigenvalues.min()), float(eigenvalues.max())
        rounding = torch.finfo(eigenvalues.dtype).eps * eigenvalues.shape[-1] * largest
        needed = 1.001 * max(-smallest, 0.0) + rounding
        raise NumericalError(
            f"the posterior precision is not positive definite: its smallest eigenvalue is {smallest:.3g}, its largest "
            f"{largest:.3g}. Raise the prior precision by {needed:.4g} or more, train to an optimum, or take "
            "curvature='ggn'."
        )


def in_sums(matrix: Tensor) -> Tensor:
    """A contribution in the precision in which it is summed: float64, but for matrices whose eigh is not either."""
    return matrix.double() if matrix.dim() < 2 or matrix.shape[-1] <= _PRECISE else matrix


def _rows_sum_to_zero(matrix: Tensor, dtype: torch.dtype) -> bool:
    small = 200 * torch.finfo(dtype).eps * matrix.diagonal(dim1=-2, dim2=-1)
    return bool((matrix.sum(-1).abs() <= small).all())


def _eigh_without_constant(b: Tensor) -> tuple[Tensor, Tensor]:
    """In the basis of the Householder reflection I - c w w^T that takes the constant vector to a unit vector."""
    d = b.shape[0]
    w = b.new_full((d,), d**-0.5)
    w[0] += 1
    c = 2 / (w @ w)
    bw = b @ w
    u = c * bw - c**2 / 2 * (w @ bw) * w
    reflected = b.addr(w, u, alpha=-1).addr_(u, w, alpha=-1)
    values, inner = spectrum(reflected[1:, 1:])
    vectors = b.new_zeros(d, d)
    vectors[:, 0] = d**-0.5
    vectors[1:, 1:] = inner
    vectors[:, 1:].addr_(w, w[1:] @ inner, alpha=-float(c))
    return torch.cat([values[:1] * 0, values]), vectors


@dataclass(frozen=True)
class Rows:
    """A contribution rows^T rows to a sum, not multiplied out yet."""

    rows: Tensor  # (M, D)


class GramSum:
    """A running sum of `Rows`; few rows are collected in one buffer before the product."""

    def __init__(self, total: Tensor | None = None) -> None:
        self.total = total  # (D, D)
        self._buffer: Tensor | None = None
        self._filled = self._seen = 0

    def add(self, rows: Tensor) -> None:  # (M, D)
        """Count further rows; they are copied or multiplied now, since a loader may reuse its memory."""
        m, d = rows.shape
        if m >= _ENOUGH and (m >= 2 * d or self.total is not None or self._filled):
            self._empty()
            self._take(rows)
            return
        if self._buffer is None:
            self._buffer = rows.new_empty(max(m, min(_HELD // d, max(8 * d, 2 * _ENOUGH))), d)
        if self._filled + m > len(self._buffer):
            self._empty()
        if m > len(self._buffer):
            self._take(rows)
        else:
            self._buffer[self._filled : self._filled + m] = rows
            self._filled += m

    def add_gram(self, term: Tensor) -> None:  # (D, D)
        """Count a product that is there already."""
        self.total = in_sums(term).clone() if self.total is None else self.total.add_(term)

    def flush(self) -> Tensor:  # (D, D)
        """The sum of everything so far."""
        self._empty()
        assert self.total is not None
        return _mirror(self.total) if len(self.total) >= _MANY else self.total

    def _empty(self) -> None:
        if self._filled and self._buffer is not None:
            self._take(self._buffer[: self._filled])
            self._filled = 0

    def _take(self, rows: Tensor) -> None:
        m, d = rows.shape
        self._seen += m
        if d < _MANY or self._seen < 2 * d:  # few rows may be all there are: see `gram`
            self.add_gram(gram(rows))
        else:  # one triangle until the end
            total = rows.new_zeros(d, d) if self.total is None else self.total.to(rows.dtype)
            self.total = _add_half(total, rows)
