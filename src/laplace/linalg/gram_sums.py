"""Running sums of rows^T rows over batches. Rows are collected, so that products are large, or are not taken at all."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.linalg.few_rows import FewRows
from laplace.linalg.folded import Folded
from laplace.linalg.symmetric import MANY, PRECISE, gram, in_sums
from laplace.linalg.triangle import Triangle

_HELD = 2**22  # most numbers collected before a product
_ENOUGH = 512  # rows from which a product reaches full speed
_ENOUGH_WIDE = 256  # the same for a wide matrix
_SHARE = 64  # a buffer is made for so many batches at once


@dataclass(frozen=True)
class GramRows:
    """Holds a contribution rows^T rows to a sum, not multiplied out yet."""

    rows: Tensor  # (M, D)
    dtype: torch.dtype | None = None  # of the products and of the sum; None leaves it to `GramSum`


class GramSum:
    """Sums `GramRows`. Small blocks of rows are collected in a buffer before the product.

    With a `dtype`, all products and sums of wide matrices are in it. Without, they are in float64 where float32 may
    harm: see `gram`. For wide matrices the number of all rows decides that, those still to come included. If `expected`
    tells it, nothing has to wait for it, and `mistaken` says in the end whether it was wrong.

    Args:
        total: the sum so far, (D, D).
        dtype: the dtype of products and sums of wide matrices, or None.
        seen: the number of rows in the sum so far.
        expected: about how many rows there will be in all; 0 if nobody knows.
    """

    def __init__(
        self, total: Tensor | None = None, dtype: torch.dtype | None = None, seen: int = 0, expected: float = 0.0
    ) -> None:
        self.dtype, self.seen, self.expected = dtype, seen, expected
        self._narrow: Tensor | None = None  # the sum of a matrix with few columns, (D, D)
        self._wide: Triangle | None = None  # the sum of one with many
        self._buffer: Tensor | None = None
        self._filled = 0
        self._closed: Tensor | None = None
        if total is not None:
            self.add_gram(total)

    def add(self, rows: Tensor) -> None:  # (M, D)
        """Add rows. They are copied or multiplied at once, because a loader may reuse its memory."""
        m, d = rows.shape
        rows = rows if self.dtype is None else rows.to(self.dtype)
        room = self._room(d)
        if m >= room or (d < MANY and m >= max(2 * d, _ENOUGH)):
            self._take(rows)
            return
        buffer = self._grown(rows, room)
        fitting = min(m, len(buffer) - self._filled)  # full before it is emptied: rows enough for float32
        buffer[self._filled : self._filled + fitting] = rows[:fitting]
        self._filled += fitting
        if self._filled >= room:
            self._empty()
        if fitting < m:
            self.add(rows[fitting:])

    def _grown(self, rows: Tensor, room: int) -> Tensor:  # (M, D) -> (R, D)
        """Return the buffer with a place for these rows, or as many of them as there is room for.

        Where few rows come at a time it grows with them: those of biases would stay nearly empty, and are many.
        """
        m, d = rows.shape
        old = self._buffer
        if old is None or (len(old) < self._filled + m and len(old) < room):
            held = 0 if old is None else len(old)
            size = room if d < MANY or _SHARE * m >= room else min(room, max(2 * held, self._filled + m))
            self._buffer = rows.new_empty(size, d)
            if old is not None:
                self._buffer[: self._filled] = old[: self._filled]
        assert self._buffer is not None
        return self._buffer

    def _room(self, d: int) -> int:
        """Return how many rows are collected.

        Of a wide matrix they are as many as a product at full speed needs: a network has a hundred wide matrices, each
        with its own buffer. Only as long as nobody knows which dtype the product must have, they are as many as decide
        that. So it is, too, where so few are expected that the rows take less memory than their product.
        """
        if d < MANY:
            return min(_HELD // d, max(8 * d, 2 * _ENOUGH))
        waiting = self.dtype is None and self.seen < 2 * d and self.expected <= d
        return 2 * d if waiting else _ENOUGH_WIDE

    def add_gram(self, term: Tensor) -> None:  # (D, D)
        """Add a finished product."""
        if len(term) < MANY:
            self._narrow = in_sums(term, copy=True) if self._narrow is None else self._narrow.add_(term)
            return
        if self._wide is None:
            dtype = torch.float64 if len(term) <= PRECISE else term.dtype
            self._wide = Triangle.zeros(len(term), term.new_empty(0, dtype=dtype))
        self._wide.add_matrix(term)

    def copy(self) -> GramSum:
        """Return a sum of the same rows that can grow independently."""
        other = copy.copy(self)
        other._narrow, other._buffer = (None if t is None else t.clone() for t in (self._narrow, self._buffer))
        other._wide = copy.deepcopy(self._wide)
        return other

    def flush(self) -> Tensor:  # (D, D)
        """Return the sum of everything so far."""
        self._empty()
        if self._wide is not None:
            return self._wide.written_out()[0]
        assert self._narrow is not None
        return self._narrow

    def close(self) -> Tensor:  # (1, D, D)
        """Return the sum of everything, a wide one as its rows or as a triangle. Nothing is added any more."""
        if self._closed is None:
            self._closed = self._few()
        if self._closed is None:
            self._empty()
            self._closed = self.flush().unsqueeze(0) if self._wide is None else self._wide
        self._buffer = self._narrow = self._wide = None
        return self._closed

    @property
    def mistaken(self) -> bool:
        """Return whether more rows were expected than have come, so that products are in float32 and must not be."""
        parts = (self._wide, self._buffer)
        d = max((t.shape[-1] for t in parts if t is not None), default=0)
        return d >= MANY and self.dtype is None and self.seen + self._filled < 2 * d <= self.expected

    def _few(self) -> Folded | None:
        """Return the rows if all are there, and take at most half of the memory of their product."""
        if self._buffer is None or self._wide is not None or self._buffer.shape[1] < MANY:
            return None
        rows, d = self._buffer[: self._filled], self._buffer.shape[1]
        dtype = self.dtype or (torch.float64 if d <= PRECISE or len(rows) < 2 * d else rows.dtype)
        return FewRows.of(rows.clone(), dtype) if 2 * rows.nbytes <= d * d * dtype.itemsize else None

    def _empty(self) -> None:
        if self._filled and self._buffer is not None:
            self._take(self._buffer[: self._filled])
            self._filled = 0
            if len(self._buffer) > self._room(self._buffer.shape[1]):
                self._buffer = None  # fewer rows are collected from now on

    def _take(self, rows: Tensor) -> None:
        m, d = rows.shape
        self.seen += m
        if d < MANY:
            self.add_gram(gram(rows))
            return
        if max(self.seen, self.expected) < 2 * d and self.dtype is None:  # these may be all the rows: see `gram`
            rows = rows.double()
        if self._wide is None:
            precise = self.dtype is None and d <= PRECISE
            self._wide = Triangle.zeros(d, rows.new_empty(0, dtype=torch.float64 if precise else rows.dtype))
        elif d > PRECISE:
            self._wide = self._wide.converted(rows.dtype)
        self._wide.add_rows(rows)
