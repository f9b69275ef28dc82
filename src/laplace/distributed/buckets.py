"""Add tensors over the ranks of a group: one all-reduce for each bucket of 64 MB, each dtype by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, distributed

from laplace.errors import InputError

BUCKET = 2**26  # bytes
TO_ONE = 2**20  # bytes of a bucket that goes to one rank, which is short of memory: larger tensors are sent uncopied

Form = tuple[tuple[int, ...], torch.dtype]


def add_up(
    sums: Mapping[str, Tensor],
    forms: Mapping[str, Form],  # by key, in the order in which all ranks send
    device: torch.device,
    via: torch.device | None,
    group: distributed.ProcessGroup,
    to: int | None = None,
) -> dict[str, Tensor]:
    """Return the totals over all ranks, in the agreed dtypes, on `device`. The given tensors may be overwritten.

    Keys whose tensors are the same memory, as the input factors of queries, keys and values, are added up one by one,
    because another rank may have different tensors there. Their totals are the same memory again if they are equal.

    Args:
        sums: what this rank adds. Keys that it lacks count as zeros.
        forms: shape and dtype of every key.
        device: where this rank's tensors are.
        via: the device that the group sends from; None if any will do.
        group: the process group.
        to: the only rank that needs the totals; on the others, what is returned means nothing. None: all need them.
    """
    totals: dict[str, Tensor] = {}
    first: dict[tuple[object, ...], str] = {}  # which key has a memory
    same: dict[str, str] = {}
    for key, (shape, dtype) in forms.items():
        own = sums[key].to(dtype).contiguous() if key in sums else torch.zeros(shape, dtype=dtype, device=device)
        holder = first.setdefault((own.data_ptr(), own.shape, own.device), key)
        if holder != key:
            same[key] = holder
            own = own.clone()  # or it would be added up again
        totals[key] = own
    for parts in _buckets([t.view(-1) for t in totals.values()], BUCKET if to is None else TO_ONE):
        packed = parts[0] if len(parts) == 1 else torch.cat(parts)
        sent = packed if via is None else packed.to(via)
        if to is None:
            distributed.all_reduce(sent, group=group)
        else:
            distributed.reduce(sent, distributed.get_global_rank(group, to), group=group)
        if sent is not parts[0]:
            sizes = [len(part) for part in parts]
            for part, value in zip(parts, sent.to(packed.device).split(sizes), strict=True):
                part.copy_(value)
    for key, holder in same.items():
        if torch.equal(totals[key], totals[holder]):
            totals[key] = totals[holder]
    return totals


def agreed(forms: list[dict[str, Form]]) -> dict[str, Form]:
    """Return shape and dtype of every key, sorted. Ranks may differ in dtype: the wider one is taken."""
    found: dict[str, Form] = {}
    for rank, of_rank in enumerate(forms):
        for key, (shape, dtype) in of_rank.items():
            known, wide = found.get(key, (shape, dtype))
            if known != shape:
                raise InputError(
                    f"the sums {key!r} have shape {shape} on rank {rank} and {known} on a rank before it: the ranks "
                    "use these weights in different ways. Give every rank data of the same kind."
                )
            found[key] = shape, torch.promote_types(wide, dtype)
    return dict(sorted(found.items()))


def _buckets(flat: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Yield views of up to `size` bytes together, of one dtype. Larger tensors are cut, and sent without a copy."""
    for dtype in dict.fromkeys(t.dtype for t in flat):
        parts: list[Tensor] = []
        room = most = size // dtype.itemsize
        for t in flat:
            for part in t.split(most) if t.dtype == dtype else ():
                if len(part) > room and parts:
                    yield parts
                    parts, room = [], most
                parts.append(part)
                room -= len(part)
        if any(len(part) for part in parts):
            yield parts
