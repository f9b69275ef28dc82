"""The kept points of a posterior over functions, found again in the data by their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from laplace.batches import Batch, Inputs
from laplace.checkpoints.digests import Digest


def digest_of(parts: Iterable[Batch]) -> str:
    """The digest of all inputs."""
    digest = Digest()
    for part in parts:
        digest.add(*part.inputs.tensors())
    return digest.hex()


def inputs_at(batches: Iterable[Batch], parts: Sequence[Tensor]) -> list[Batch] | None:
    """The inputs of the examples with these numbers, ascending, for each part; None where some are not there."""
    found: list[list[Inputs]] = [[] for _ in parts]
    start = 0
    for batch in batches:
        stop = start + (batch.inputs.size or 0)
        for pieces, numbers in zip(found, parts, strict=True):
            here = numbers[(numbers >= start) & (numbers < stop)] - start
            if len(here):
                pieces.append(batch.inputs.map(lambda t, here=here: t[here.to(t.device)]))
        start = stop
    if any(sum(piece.size or 0 for piece in pieces) != len(part) for pieces, part in zip(found, parts, strict=True)):
        return None
    joined = [*map(_joined, found)]
    return [Batch(i, inputs, torch.empty(0)) for i, inputs in enumerate(joined) if inputs is not None]


def _joined(pieces: Sequence[Inputs]) -> Inputs | None:
    """None where their shapes differ: then they are not those that were kept together."""
    columns = [*zip(*(piece.tensors() for piece in pieces), strict=True)]
    if any(len({(t.shape[1:], t.dtype) for t in column}) > 1 for column in columns):
        return None
    return pieces[0].with_tensors(torch.cat(column) for column in columns)
