"""Send vectors back for outputs at positions: answer questions about rows from whole examples.

A row is one position of one example. Vectors for all positions of an example go back together if they stand for one
draw. Those of an exact Lambda, which has no entries between positions, go back one position at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from laplace.backprop.covariances import Covariance, KroneckerCovariance
from laplace.backprop.uses import NetworkJacobian, Use
from laplace.linalg.output_curvature import OutputCurvature
from laplace.predictive.positions import Positions


class Vectors(Protocol):
    """Makes K vectors of output space for each example, with rows for all positions, on demand and in slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Tensor: ...  # (k, N * T, C)


@dataclass(frozen=True)
class Rows:
    """Says which rows of a batch count. S is the number of positions at which some example has a row that counts."""

    positions: Positions
    kept: Tensor | None = None  # (M,), indices into the N * T rows; None for all

    @cached_property
    def used(self) -> Tensor | None:  # (S,)
        """Return the positions with a row that counts, or None for all."""
        return None if self.kept is None else (self.kept % self.positions.count).unique()

    @property
    def count(self) -> int:
        """Return S."""
        return self.positions.count if self.used is None else len(self.used)

    @cached_property
    def _at(self) -> Tensor | None:  # (M,), indices into N * S
        if self.kept is None or self.used is None:
            return None
        t = self.positions.count
        return self.kept // t * self.count + torch.searchsorted(self.used, self.kept % t)

    def counts(self, given: Tensor | None) -> Tensor | None:  # (M,) -> (N, T)
        """Return how often each position of each example counts, or None if all count once."""
        if given is None and self.kept is None:
            return None
        if self.kept is not None:
            given = torch.ones(len(self.kept), device=self.kept.device) if given is None else given
            rows = given.new_zeros(self.positions.n * self.positions.count)
            given = rows.index_copy(0, self.kept, given)
        assert given is not None
        return given.unflatten(0, (self.positions.n, -1))

    def of(self, x: Tensor, lead: int = 0) -> Tensor:  # (..., N, S * C, ...) -> (..., M, C, ...)
        """Select the rows that count from values for all outputs of each example's used positions."""
        rows = x.unflatten(lead + 1, (self.count, -1)).flatten(lead, lead + 1)
        return rows if self._at is None else rows.index_select(lead, self._at)

    def by_position(self, rows: Tensor) -> Tensor:  # (M, C) -> (N, S, C)
        """Put rows to their examples and positions. Positions that do not count get zeros."""
        if self._at is not None:
            rows = rows.new_zeros(self.positions.n * self.count, rows.shape[1]).index_copy(0, self._at, rows)
        return rows.unflatten(0, (self.positions.n, self.count))

    def vectors(self, curvature: OutputCurvature) -> Vectors:
        """Return vectors whose outer products sum to a curvature of these rows."""
        root = curvature.root()
        if self.kept is not None:
            whole = root.new_zeros(len(root), self.positions.n * self.positions.count, root.shape[2])
            root = whole.index_copy(1, self.kept, root)
        return root if curvature.together or not self.positions.several else OneByOne(root, self)

    def units(self, outputs: Tensor | None, like: Tensor) -> Tensor:  # (S * C', N * T, C)
        """Return the unit vectors of the outputs at used positions, or only those of the asked outputs."""
        n, t, c = self.positions.n, self.positions.count, self.positions.c
        eye = torch.eye(c, dtype=like.dtype, device=like.device)
        eye = eye if outputs is None else eye[outputs]
        if not self.positions.several:
            return eye.unsqueeze(1).expand(-1, n, -1)
        used = torch.arange(t, device=like.device) if self.used is None else self.used
        here = torch.nn.functional.one_hot(used, t).to(eye)  # (S, T)
        each = torch.einsum("st,kc->sktc", here, eye).flatten(0, 1)
        return each.unsqueeze(1).expand(-1, n, -1, -1).flatten(1, 2)


@dataclass(frozen=True)
class OneByOne:
    """Splits vectors of all positions, (K, N * T, C), by position: S * K vectors, each nonzero at one position only."""

    root: Tensor
    rows: Rows

    def __len__(self) -> int:
        return self.rows.count * len(self.root)

    def __getitem__(self, part: slice) -> Tensor:
        index = torch.arange(*part.indices(len(self)), device=self.root.device)
        position = index // len(self.root)
        position = position if self.rows.used is None else self.rows.used[position]
        apart = self.root[index % len(self.root)].unflatten(1, (-1, self.rows.positions.count))
        here = torch.arange(self.rows.positions.count, device=index.device) == position.unsqueeze(1)  # (k, T)
        return (apart * here[:, None, :, None]).flatten(1, 2)


class RowsJacobian:
    """Computes a Jacobian of rows from that of all outputs at each example's S used positions, K = S * C."""

    def __init__(self, whole: NetworkJacobian, rows: Rows, jacobian_of: Callable[[list[Use]], NetworkJacobian]) -> None:
        self.whole, self.rows, self._jacobian_of = whole, rows, jacobian_of

    @property
    def parameters(self) -> list[RowsJacobianOf]:
        return [RowsJacobianOf(use, self.rows) for use in self.whole.parameters]

    def variance(self, covariance: Covariance) -> Tensor:
        return self.rows.of(self.whole.variance(covariance))

    def covariance(self, covariance: Covariance) -> Tensor:
        uses = self.whole.parameters
        each = [self._jacobian_of([use.some(part) for use in uses]) for part in _slices(uses[0], self.rows)]
        return self.rows.of(torch.cat([one.covariance(covariance) for one in each], 1))

    def joint(self, covariance: Covariance) -> Tensor:
        return _joint(self.whole.joint(covariance), self.rows)

    def variance_in(self, basis: Tensor, variances: Tensor) -> Tensor:
        return self.rows.of(self.whole.variance_in(basis, variances), lead=1)

    def along(self, steps: Tensor) -> Tensor:
        return self.rows.of(self.whole.along(steps), lead=1)

    @property
    def examples(self) -> int:
        return self.rows.positions.n * self.rows.count if self.rows.kept is None else len(self.rows.kept)

    def written(self, part: slice) -> Tensor:  # (m, C, P)
        return self.rows.of(self.whole.written(slice(None)))[part]


@dataclass(frozen=True)
class RowsJacobianOf:
    """Computes one parameter's Jacobian of rows."""

    use: Use
    rows: Rows

    def variance(self, spread: KroneckerCovariance) -> Tensor:
        return self.rows.of(self.use.variance(spread))

    def covariance(self, spread: KroneckerCovariance) -> Tensor:
        each = [self.use.some(part).covariance(spread) for part in _slices(self.use, self.rows)]
        return self.rows.of(torch.cat(each, 1))

    def product(self, spread: KroneckerCovariance, v: Tensor) -> Tensor:
        own = self.rows.by_position(v).unbind(1)
        parts = zip(_slices(self.use, self.rows), own, strict=True)
        return self.rows.of(torch.cat([self.use.some(part).product(spread, one) for part, one in parts], 1))

    def joint(self, spread: KroneckerCovariance) -> Tensor:
        return _joint(self.use.joint(spread), self.rows)

    def along(self, steps: Tensor, part: slice = slice(None)) -> Tensor:
        return self.rows.of(self.use.along(steps), lead=1)[:, part]

    def alone(self) -> RowsJacobian:
        return RowsJacobian(self.use.alone(), self.rows, lambda uses: uses[0].alone())

    def double(self) -> RowsJacobianOf:
        return RowsJacobianOf(self.use.double(), self.rows)


def _slices(use: Use, rows: Rows) -> list[slice]:
    """Return the slice of vectors for each used position."""
    c = use.shape[0] // rows.count
    return [slice(s * c, (s + 1) * c) for s in range(rows.count)]


def _joint(whole: Tensor, rows: Rows) -> Tensor:  # (N, S * C, N, S * C) -> (M, C, M, C)
    return rows.of(rows.of(whole), lead=2)
