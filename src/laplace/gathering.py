"""Small batches are run together: a small network spends more time on being called than on computing.

The first batch is run alone; it shows how wide the network is. What a batch is, is said in `batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from laplace.batches import Batch
from laplace.budget import keep_freed_memory


class Group:
    """Neighbouring batches of one kind in memory of their own, since a loader may reuse its memory."""

    def __init__(self, first: Batch, room: int) -> None:
        self._first = first
        self._tensors = [t.new_empty(room, *t.shape[1:]) for t in first.tensors()]
        self._ends = [0]
        self.indices: list[int] = []
        self.add(first)

    @property
    def size(self) -> int:
        """Number of examples."""
        return self._ends[-1]

    def add(self, batch: Batch) -> None:
        """Copy a batch in, behind those that are there."""
        start, end = self.size, self.size + len(batch.y)
        for own, other in zip(self._tensors, batch.tensors(), strict=True):
            own[start:end] = other
        self._ends.append(end)
        self.indices.append(batch.index)

    def joined(self) -> Batch:
        """All of them as one."""
        return self._part(0, self.size, self.indices[0])

    def batches(self) -> list[Batch]:
        """Each of them."""
        ends = zip(self._ends, self._ends[1:], self.indices, strict=False)
        return [self._part(start, end, index) for start, end, index in ends]

    def _part(self, start: int, end: int, index: int) -> Batch:
        parts = [t[start:end] for t in self._tensors]
        count = len(parts) - 1 - len(self._first.given)
        given = dict(zip(self._first.given, parts[count + 1 :], strict=True))
        return Batch(index, self._first.inputs.with_tensors(parts[:count]), parts[count], given)


def gathered(batches: Iterable[Batch], room: Callable[[], int], most: int | None = None) -> Iterator[Batch | Group]:
    """Batches in their order, and groups of neighbours that have `room()` examples in all; results do not depend on it.

    The order is that of the draws. A group has `most` batches at most.
    """
    group, kind, joining = None, None, False
    for batch in batches:
        space, of = room(), _kind(batch)
        alone = of is None or 2 * len(batch.y) > space  # no other will fit beside it
        full = group is not None and (group.size + len(batch.y) > space or len(group.indices) == most)
        if group is not None and (alone or of != kind or full):
            yield group
            group = None
        if alone:
            yield batch
        elif group is None:
            if not joining:
                keep_freed_memory()
            group, kind, joining = Group(batch, space), of, True
        else:
            group.add(batch)
    if group is not None:
        yield group


def _kind(batch: Batch) -> Any:
    """What batches must share to be joined; None for those that cannot be."""
    size = batch.inputs.size
    labels = [batch.y, *batch.given.values()]
    if size is None or any(t.shape[:1] != (size,) for t in labels) or not _only_tensors(batch.inputs.x):
        return None
    keys = tuple(batch.inputs.x) if isinstance(batch.inputs.x, Mapping) else None
    return keys, tuple(batch.given), [(t.shape[1:], t.dtype, t.device) for t in batch.tensors()]


def _only_tensors(x: Any) -> bool:
    if isinstance(x, Mapping):
        x = x.values()
    elif not isinstance(x, (tuple, list)):
        return isinstance(x, Tensor)
    return all(_only_tensors(value) for value in x)
