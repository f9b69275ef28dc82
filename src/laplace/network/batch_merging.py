"""Run small batches together: a small network spends more time on being called than on computing.

Large batches of a large network are cut, because all that a run keeps until its gradients are there takes memory.
The first batch runs alone, and shows how wide the network is. `batches` defines what a batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from laplace.budget import keep_freed_memory
from laplace.network.batches import Batch


class Group:
    """Collects neighbouring batches of one kind, in memory of their own, because a loader may reuse its memory."""

    def __init__(self, first: Batch, room: int) -> None:
        self._first = first
        self._tensors = [t.new_empty(room, *t.shape[1:]) for t in first.tensors()]
        self._ends = [0]
        self.indices: list[int] = []
        self.add(first)

    @property
    def size(self) -> int:
        """Return the number of examples."""
        return self._ends[-1]

    @property
    def where(self) -> str:
        """Return which batches these are, for errors."""
        return f"batches {self.indices[0]} to {self.indices[-1]}"

    def add(self, batch: Batch) -> None:
        """Copy a batch to the end of the group."""
        start, end = self.size, self.size + len(batch.y)
        for own, other in zip(self._tensors, batch.tensors(), strict=True):
            own[start:end] = other
        self._ends.append(end)
        self.indices.append(batch.index)

    def joined(self) -> Batch:
        """Return the whole group as one batch."""
        return self._part(0, self.size, self.indices[0])

    def batches(self) -> list[Batch]:
        """Return the batches of the group one by one."""
        ends = zip(self._ends, self._ends[1:], self.indices, strict=False)
        return [self._part(start, end, index) for start, end, index in ends]

    def _part(self, start: int, end: int, index: int) -> Batch:
        parts = [t[start:end] for t in self._tensors]
        count = len(parts) - 1 - len(self._first.given)
        given = dict(zip(self._first.given, parts[count + 1 :], strict=True))
        return Batch(index, self._first.inputs.with_tensors(parts[:count]), parts[count], given)


def gathered(batches: Iterable[Batch], room: Callable[[], int], most: int | None = None) -> Iterator[Batch | Group]:
    """Yield batches in order, small neighbours joined to groups of up to `room()` examples and `most` batches.

    Results do not depend on the grouping. The order must stay, because random draws follow it.
    """
    group, kind, joining = None, None, False
    for batch in batches:
        space, of = room(), _kind(batch)
        alone = of is None or 2 * len(batch.y) > space  # another batch of this size would not fit
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


def cut(batch: Batch, most: int) -> Iterator[Batch]:
    """Yield a batch in parts of at most `most` examples, of nearly equal size; whole if its tensors cannot be cut."""
    n = batch.inputs.size or 0
    if n <= most or _kind(batch) is None:
        yield batch
        return
    step = -(-n // -(-n // most))
    for start in range(0, n, step):
        labels = batch.labels(start, start + step)
        yield replace(labels, inputs=batch.inputs.part(start, start + step), start=start)


def _kind(batch: Batch) -> Any:
    """Return what batches must share to be joined, or None if this batch cannot be joined."""
    size = batch.inputs.size
    labels = [batch.y, *batch.given.values()]
    ragged = size is None or any(t.shape[:1] != (size,) for t in labels)
    if ragged or batch.inputs.shared or not _only_tensors(batch.inputs.x):
        return None
    keys = tuple(batch.inputs.x) if isinstance(batch.inputs.x, Mapping) else None
    return keys, tuple(batch.given), [(t.shape[1:], t.dtype, t.device) for t in batch.tensors()]


def _only_tensors(x: Any) -> bool:
    if isinstance(x, Mapping):
        x = x.values()
    elif not isinstance(x, (tuple, list)):
        return isinstance(x, Tensor)
    return all(_only_tensors(value) for value in x)
