"""Keep one sum of rows^T rows for all names that sum the same rows, as layers that read one tensor do.

Queries, keys and values of attention are three layers with one input. Their sums of a a^T are equal, and so are the
eigendecompositions. Rows are the same if they are the same memory. Names share a sum only as long as they bring the
same rows in every batch; otherwise each gets its own copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from laplace.linalg.gram_sums import GramRows, GramSum


class Added:
    """Remembers which sums have got their rows of a batch."""

    def __init__(self) -> None:
        self._done: set[int] = set()

    def once(self, total: GramSum, value: GramRows) -> None:
        """Add rows to a sum, unless another name that shares the sum has done so."""
        if id(total) not in self._done:
            self._done.add(id(total))
            total.dtype = value.dtype
            total.add(value.rows)


def share_equal_rows(total: dict[str, Any], part: Mapping[str, Tensor | GramRows | float], times: float = 0.0) -> Added:
    """Give new names of equal rows one sum, and names whose rows differ from now on a sum of their own.

    A new sum expects `times` as many rows as these in all. With 0, nobody knows.
    """
    brought = {key: value for key, value in part.items() if isinstance(value, GramRows)}
    here = {key: _place(value.rows) for key, value in brought.items()}
    _separate(total, here, part)
    made: dict[tuple[object, ...], GramSum] = {}
    for key, value in brought.items():
        if key not in total:
            expected = times * len(value.rows) if value.dtype is None else 0.0
            total[key] = made.setdefault(here[key], GramSum(expected=expected))
    return Added()


def sums_from(grams: Mapping[str, Tensor], rows: Mapping[str, tuple[int, float]]) -> dict[str, GramSum]:
    """Return sums that go on from these. Names of the same memory share one.

    `rows` has the numbers of rows that each has seen, and expects in all.
    """
    made: dict[tuple[object, ...], GramSum] = {}
    sums = {}
    for key, total in grams.items():
        place = _place(total)
        if place not in made:
            seen, expected = rows[key]
            made[place] = GramSum(total, seen=int(seen), expected=float(expected))
        sums[key] = made[place]
    return sums


def _separate(total: dict[str, Any], here: Mapping[str, tuple[object, ...]], part: Mapping[str, Any]) -> None:
    """Copy a shared sum if not all its names bring the same rows."""
    names: dict[int, list[str]] = {}
    for key, value in total.items():
        if isinstance(value, GramSum):
            names.setdefault(id(value), []).append(key)
    for keys in names.values():
        places = {here.get(key, key) for key in keys}  # a name that brings no rows differs from all others
        if len(places) > 1 and not part.keys().isdisjoint(keys):
            for key in keys[1:]:
                total[key] = total[key].copy()


def _place(rows: Tensor) -> tuple[object, ...]:
    """Return what tells whether two tensors that are both alive are the same memory."""
    return rows.data_ptr(), rows.shape, rows.stride(), rows.dtype, rows.device
