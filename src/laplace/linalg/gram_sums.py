"""Running sums of rows^T rows over batches. Rows are collected, so that products are large, or are not taken at all."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.linalg.few_rows import FewRows
from laplace.linalg.symmetric import MANY, PRECISE, add_half, gram, in_sums, mirror

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
    harm: see `gram`.
    """

    def __init__(self, total: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        self.total = total  # (D, D)
        self.dtype = dtype
        self._buffer: Tensor | None = None
        self._filled = self._seen = 0
        self._closed: Tensor | None = None

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
        """Return how many rows are collected. Of a wide matrix, at first as many as a product in float32 needs.

        They take no more memory than a sum in float64, which their product would need before. Later only as many as a
        product at full speed needs: a network has a hundred wide matrices, and each has its own buffer.
        """
        if d < MANY:
            return min(_HELD // d, max(8 * d, 2 * _ENOUGH))
        return 2 * d if self.dtype is None and self._seen < 2 * d else _ENOUGH_WIDE

    def add_gram(self, term: Tensor) -> None:  # (D, D)
        """Add a finished product."""
        self.total = in_sums(term, copy=True) if self.total is None else self.total.add_(term)

    def copy(self) -> GramSum:
        """Return a sum of the same rows that can grow independently."""
        other = copy.copy(self)
        for name in ("total", "_buffer"):
            tensor = getattr(self, name)
            setattr(other, name, None if tensor is None else tensor.clone())
        return other

    def flush(self) -> Tensor:  # (D, D)
        """Return the sum of everything so far."""
        self._empty()
        assert self.total is not None
        return mirror(self.total) if len(self.total) >= MANY else self.total

    def close(self) -> Tensor:  # (1, D, D)
        """Return the sum of everything as the rows, if they are few, or as `flush` does. Nothing is added any more."""
        if self._closed is None:
            rows = self._few()
            self._closed = self.flush().unsqueeze(0) if rows is None else rows
            self._buffer = self.total = None
        return self._closed

    def _few(self) -> FewRows | None:
        """Return the rows if all are there, and take at most half of the memory of their product."""
        if self._buffer is None or self.total is not None or self._buffer.shape[1] < MANY:
            return None
        rows, d = self._buffer[: self._filled], self._buffer.shape[1]
        dtype = self.dtype or (torch.float64 if d <= PRECISE or len(rows) < 2 * d else rows.dtype)
        return FewRows(rows.clone(), dtype) if 2 * rows.nbytes <= d * d * dtype.itemsize else None

    def _empty(self) -> None:
        if self._filled and self._buffer is not None:
            self._take(self._buffer[: self._filled])
            self._filled = 0
            if len(self._buffer) > self._room(self._buffer.shape[1]):
                self._buffer = None  # fewer rows are collected from now on

    def _take(self, rows: Tensor) -> None:
        m, d = rows.shape
        self._seen += m
        if d < MANY:
            self.add_gram(gram(rows))
            return
        if self._seen < 2 * d and self.dtype is None:  # these rows may be all the data: see `gram`
            rows = rows.double()
        if self.total is None:
            precise = self.dtype is None and d <= PRECISE
            self.total = rows.new_zeros(d, d, dtype=torch.float64 if precise else rows.dtype)
        elif d > PRECISE:
            self.total = self.total.to(rows.dtype)
        if self.total.dtype == rows.dtype:
            add_half(self.total, rows)  # only one triangle is kept until `flush`
        else:
            self.total.add_(add_half(rows.new_zeros(d, d), rows))
