"""Small batches are run together: a small network spends more time on being called than on computing.

The first batch is run alone; it shows how wide the network is. What a batch is, is said in `batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from laplace.batches import Batch


def gathered(batches: Iterable[Batch], room: Callable[[], int]) -> Iterator[list[Batch]]:
    """Neighbours that can be run as one, as many as have `room()` examples in all; results do not depend on it."""
    held: list[Batch] = []
    kind, n = None, 0
    for batch in batches:
        size, of = len(batch.y) if batch.y.dim() else 0, _kind(batch)
        if held and (of != kind or n + size > room()):
            yield held
            held, n = [], 0
        if of is None or 2 * size > room():  # no other will fit beside it
            yield [batch]
            continue
        held.append(Batch(batch.index, batch.inputs.map(torch.clone), batch.y.clone()))  # a loader may reuse its memory
        kind, n = of, n + size
    if held:
        yield held


def joined(batches: list[Batch]) -> Batch:
    """Several batches of one kind as one."""
    first = batches[0]
    others = zip(*(batch.inputs.tensors() for batch in batches), strict=True)
    inputs = first.inputs.with_tensors([torch.cat(tensors) for tensors in others])
    return Batch(first.index, inputs, torch.cat([batch.y for batch in batches]))


def _kind(batch: Batch) -> Any:
    """What batches must share to be joined; None for those that cannot be."""
    size = batch.inputs.size
    if size is None or batch.y.shape[:1] != (size,) or not _only_tensors(batch.inputs.x):
        return None
    tensors = [*batch.inputs.tensors(), batch.y]
    keys = tuple(batch.inputs.x) if isinstance(batch.inputs.x, Mapping) else None
    return keys, [(t.shape[1:], t.dtype, t.device) for t in tensors]


def _only_tensors(x: Any) -> bool:
    if isinstance(x, Mapping):
        x = x.values()
    elif not isinstance(x, (tuple, list)):
        return isinstance(x, Tensor)
    return all(_only_tensors(value) for value in x)
