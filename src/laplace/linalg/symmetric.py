"""Products rows^T rows, and eigendecompositions of symmetric matrices, with care for rounding."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from laplace.errors import NumericalError, warn
from laplace.linalg.conditioning import least_in_float32, may_exceed

EIGH = 6.0  # cost of an eigendecomposition, in multiplications per D^3
SYMMETRIC = 0.6  # cost of `gram`, as a share of the full product
MANY = 512  # columns from which computing only half a product is worth several calls
_MORE = 2048  # columns from which narrower strips are as fast, and save memory
_ALIGNED = 16  # strips begin at multiples of it, because kernels work on whole registers
_LONG = 2**11  # rows from which half a product is worth it for few columns, too
NARROW = 64  # columns up to which products are in float64; for wider ones they would take up to a third of a fit
_COPIED = 2**18  # most numbers copied to float64 for that, where examples have many positions
PRECISE = 1024  # columns up to which sums and decompositions are in float64
_WIDE = 256  # columns from which decompositions in float32 are worth asking whether they suffice
_SEED = 0xE16
_APART = 1e-6  # relative gap of eigenvalues' roots from which eigenvectors are well determined
BLURRED = 1e-8  # rounding of a sum of float32 products, relative to its largest eigenvalue
TOLERATED = 0.05  # share of a variance that may be rounding without a warning
_ROUNDED = {torch.float64: 1e-11}  # relative to the largest eigenvalue: smaller negative ones are rounding


def gram(rows: Tensor) -> Tensor:  # (M, D) -> (D, D)
    """Return rows^T rows. Computes only the lower triangle, in strips, and mirrors it where that pays.

    The product is in float64 where there are few rows: they do not span all columns, and directions outside their span
    must be exactly zero, however small the prior. It is also in float64 where there are few columns.
    """
    return plain_gram(rows.double() if exact(*rows.shape) else rows)


def plain_gram(rows: Tensor) -> Tensor:  # (M, D) -> (D, D)
    """Return rows^T rows in the dtype of the rows."""
    m, d = rows.shape
    if d < MANY and (d < _ALIGNED or m < _LONG):
        return rows.T @ rows
    return mirror(add_half(rows.new_zeros(d, d), rows))


def exact(m: int, d: int, positions: int = 1) -> bool:
    """Return whether the product of m examples' rows with d columns each is taken in float64."""
    few = positions == 1 or m * positions * d <= _COPIED
    return m * positions < 2 * d or (d <= NARROW and few)


def precise_gram(rows: Tensor) -> Tensor:  # (M, D) -> (D, D)
    """Return rows^T rows in float64, so that directions outside the rows' span are zero for any prior and noise."""
    return plain_gram(rows.double())


def add_half(total: Tensor, rows: Tensor) -> Tensor:  # (D, D), (M, D)
    """Add rows^T rows to the lower triangle."""
    for a, b in strips(len(total)):
        total[a:b, :b].addmm_(rows[:, a:b].T, rows[:, :b])
    return total


def mirror(total: Tensor) -> Tensor:  # (D, D)
    """Copy the lower triangle to the upper one."""
    for a, b in strips(len(total)):
        total[:a, a:b] = total[a:b, :a].T
    return total


def strips(d: int) -> list[tuple[int, int]]:
    """Return bounds of strips of neighbouring rows of a (D, D) matrix. Each is multiplied out up to the diagonal."""
    count = 3 if d < MANY else 8 if d < _MORE else 16
    ends = [k * d // count // _ALIGNED * _ALIGNED for k in range(count)]
    return list(zip(ends, [*ends[1:], d], strict=True))


def total(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of the terms. Only one term is held beside the sum at a time."""
    return functools.reduce(operator.add, terms)


@dataclass(frozen=True)
class Clipped:
    """Counts the eigenvalues of positive semi-definite matrices that were below zero and were set to zero."""

    count: int = 0
    lowest: float = 0.0  # the most negative one, relative to the largest eigenvalue of its matrix

    def __add__(self, other: Clipped) -> Clipped:
        return Clipped(self.count + other.count, min(self.lowest, other.lowest))


def clip(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Clipped]:  # (..., D)
    """Return eigenvalues clipped at zero, and how many were negative. Warns if that exceeds rounding in `dtype`."""
    found = values.detach()
    below = found < 0
    if not below.any():
        return values, Clipped()
    largest = found.abs().amax(-1, keepdim=True)
    clipped = Clipped(int(below.sum()), float((found / largest)[below].min()))
    if clipped.lowest < -_ROUNDED.get(dtype, 1e-4):
        remedy = (
            "Scale the inputs of the network to about 1; a prior precision below that may be lost."
            if dtype == torch.float64
            else "A network in float64 shows whether something else is wrong: fit with model.double()."
        )
        warn(
            f"{clipped.count} eigenvalues of a positive semi-definite curvature are below zero, the lowest "
            f"{clipped.lowest:.2g} of the largest: more than rounding in {dtype}. They are set to zero. {remedy}"
        )
    return values.clamp(min=0), clipped


def spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:  # (..., D, D) -> (..., D), (..., D, D)
    """Return eigenvalues and eigenvectors of symmetric matrices."""
    try:
        return torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError as error:
        raise NumericalError(
            f"the eigendecomposition of a {matrix.shape[-1]} x {matrix.shape[-1]} matrix failed; its entries are up to "
            f"{float(matrix.abs().max()):.3g}. Scale the inputs of the network to about 1."
        ) from error


def cholesky(matrix: Tensor) -> Tensor:  # (..., D, D) -> (..., D, D)
    """Return L with L L^T = matrix, for precisions relative to a prior: positive definite except for rounding."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed.any():
        _require_range(matrix)
        raise NumericalError(
            "the posterior precision has lost the prior to rounding: the curvature of the data is up to "
            f"{float(matrix.detach().abs().max()):.2g} times larger. Raise the prior precision, or sigma_noise."
        )
    return factor


def eigh(
    matrix: Tensor, dtype: torch.dtype, ties: bool = False, rounded: bool = False
) -> tuple[Tensor, Tensor, Clipped]:  # (..., D, D) -> (..., D), (..., D, D), how many were below zero
    """Return eigenvalues clipped at zero, and eigenvectors, of positive semi-definite matrices in `dtype`.

    With `ties`, the eigenvectors of equal eigenvalues do not depend on rounding: see `settled`. With `rounded`, what
    `may_be_rounded` is decomposed in float32: an error of 3e-6 of the largest eigenvalue is then taken.

    The work is in float64 up to 1,024 dimensions, and for sums in float64, except for wide matrices that are so well
    conditioned that float32 gives the same variances. If the rows of a matrix sum to zero, as those of softmax do, the
    constant vector is removed before, so that its zero eigenvalue is exact. Rounding there would compete with the prior
    once it is multiplied by the other Kronecker factor.
    """
    d, single = matrix.shape[-1], matrix.shape[:-2].numel() == 1
    constant = d > 1 and single and _rows_sum_to_zero(matrix, dtype)
    work = matrix.double() if d <= PRECISE or matrix.dtype == torch.float64 else matrix.to(dtype)
    decompose = _eigh_without_constant if constant else spectrum
    found = None
    if may_be_rounded(matrix, dtype) and not ties:
        short = work.float().reshape(d, d)
        least = least_in_float32(short)
        if rounded or may_exceed(short, least, constant):
            found = decompose(short)
            found = found if rounded or found[0][int(constant)] >= least else None
    if found is None:
        found = decompose(work.reshape(d, d) if single else work)
    values, vectors = found[0].reshape(matrix.shape[:-1]), found[1].reshape(matrix.shape)
    values, clipped = clip(values, dtype)
    if ties:
        ground = _APART**2 if work.dtype == torch.float64 else 1.0  # float32 sums have one rounding error for all
        vectors = settled(values, vectors, _APART, ground)
    return values.to(dtype), vectors.to(dtype).contiguous(), clipped


def may_be_rounded(matrix: Tensor, dtype: torch.dtype) -> bool:  # (..., D, D)
    """Return whether a matrix is wide enough for a decomposition in float32 to save much, in a posterior of `dtype`."""
    return matrix.shape[-1] > _WIDE and matrix.shape[:-2].numel() == 1 and dtype == torch.float32


def settled(
    values: Tensor,  # (..., D), ascending and not below zero
    vectors: Tensor,  # (..., D, D)
    apart: float,
    ground: float,
) -> Tensor:  # (..., D, D)
    """Return eigenvectors that are a well-conditioned function of their matrix, also where eigenvalues are equal.

    The eigenvectors of a multiple eigenvalue are chosen to diagonalise S, a fixed diagonal matrix of random numbers,
    which shares no symmetry with the data. To avoid jumps where eigenvalues are nearly equal, we diagonalise the
    entries S_ij between eigenvectors, times a weight that falls from 1 to 0 as their roots sqrt(l + ground) come to be
    `apart` (l relative to the largest). The weight is flat at 0: rounding enters by its square.

    Why roots: rows with a rounding e move an eigenvalue by only sqrt(l) e. Why `ground`: the rounding of the matrix
    itself is the same for all eigenvalues, and must not separate those that are zero.
    """
    d = values.shape[-1]
    generator = torch.Generator().manual_seed(_SEED)
    s = torch.rand(d, dtype=torch.float64, generator=generator).to(vectors)
    largest = values[..., -1:].clamp(min=torch.finfo(values.dtype).tiny)
    roots = (values / largest + ground).sqrt()
    alone = roots.diff(dim=-1) >= apart  # (..., D - 1)
    if alone.all():
        return vectors
    vectors = vectors.clone()
    groups = zip(roots.reshape(-1, d), vectors.reshape(-1, d, d), alone.reshape(-1, d - 1), strict=True)
    for root, basis, cuts in groups:
        bounds = [0, *(cuts.nonzero().flatten() + 1).tolist(), d]
        for start, stop in pairwise(bounds):
            if stop - start > 1:
                q, r = basis[:, start:stop], root[start:stop]
                weight = (1 - ((r.unsqueeze(1) - r) / apart).square()).clamp(min=0).square()
                basis[:, start:stop] = q @ spectrum(weight * (q.T @ (s.unsqueeze(1) * q)))[1]
    return vectors


def blurred(values: Tensor) -> float:  # (..., D), of a float32 network
    """Return the relative rounding of float32 sums, or zero where it changes no eigenvalue much.

    Relative to the largest eigenvalue. Narrow matrices are float64 products. In wide ones, eigenvalues that are neither
    far above the rounding nor zero (few rows, dead units) may be pure rounding.
    """
    if values.shape[-1] <= NARROW or values.dtype == torch.float64:
        return 0.0
    relative = values / values.amax(-1, keepdim=True)
    doubtful = (relative > 1e-13) & (relative < BLURRED / TOLERATED)
    return BLURRED if doubtful.any() else 0.0


def or_double(dtype: torch.dtype) -> str:
    """Return further advice to a network in less than float64; nothing to one that is in float64 already."""
    return "" if dtype == torch.float64 else ", or take model.double()"


def _require_range(precision: Tensor) -> None:
    if not precision.isfinite().all():
        raise NumericalError(
            f"the posterior precision is out of range in {precision.dtype}: the curvature of the data is too large. "
            f"Scale the inputs of the network to about 1, or raise sigma_noise{or_double(precision.dtype)}."
        )


def check_positive(eigenvalues: Tensor, rounded: bool = False) -> None:
    """Refuse a precision with non-positive eigenvalues, as an exact Hessian can have away from an optimum.

    `rounded`: its factorisation has already failed, so that the smallest eigenvalue is negative, or zero up to
    rounding.
    """
    eigenvalues = eigenvalues.detach()
    smallest, largest = (float(end) for end in eigenvalues.aminmax()) if eigenvalues.numel() else (1.0, 1.0)
    if not -math.inf < smallest <= largest < math.inf:  # NaN is neither
        _require_range(eigenvalues)
    if rounded or smallest <= 0:
        rounding = torch.finfo(eigenvalues.dtype).eps * eigenvalues.shape[-1] * largest
        needed = 1.001 * max(-smallest, 0.0) + rounding
        raise NumericalError(
            f"the posterior precision is not positive definite: its smallest eigenvalue is {smallest:.3g}, its largest "
            f"{largest:.3g}. Raise the prior precision by {needed:.4g} or more, train to an optimum, or take "
            "curvature='ggn'."
        )


def in_sums(matrix: Tensor, copy: bool = False) -> Tensor:
    """Return a contribution in the dtype it is summed in: float64, except where matrices are too wide for it."""
    precise = matrix.dim() < 2 or matrix.shape[-1] <= PRECISE
    return matrix.to(torch.float64 if precise else matrix.dtype, copy=copy)


def _rows_sum_to_zero(matrix: Tensor, dtype: torch.dtype) -> bool:
    small = 200 * torch.finfo(dtype).eps * matrix.diagonal(dim1=-2, dim2=-1)
    return bool((matrix.sum(-1).abs() <= small).all())


def _eigh_without_constant(b: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose b in a basis that contains the constant vector, whose eigenvalue is exactly zero.

    The basis is the Householder reflection I - c w w^T that maps the constant vector to a unit vector.
    """
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
