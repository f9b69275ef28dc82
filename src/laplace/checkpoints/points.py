"""Find the kept points of a posterior over functions again in the data, by their example numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from laplace.network.batches import Batch
from laplace.network.digests import Digest
from laplace.network.inputs import Inputs


def digest_of(parts: Iterable[Batch]) -> str:
    """Return the digest of all inputs."""
    digest = Digest()
    for part in parts:
        digest.add(*part.inputs.tensors())
    return digest.hex()


def inputs_at(batches: Iterable[Batch], parts: Sequence[Tensor]) -> list[Batch] | None:
    """Return the inputs of the examples with these ascending numbers, for each part. None if some are not there."""
    found: list[list[Inputs]] = [[] for _ in parts]
    start = 0
    for batch in batches:
        stop = start + (batch.inputs.size or 0)
        for pieces, numbers in zip(found, parts, strict=True):
            here = numbers[(numbers >= start) & (numbers < stop)] - start
            if len(here):
                pieces.append(batch.inputs.at(here))
        start = stop
    if any(sum(piece.size or 0 for piece in pieces) != len(part) for pieces, part in zip(found, parts, strict=True)):
        return None
    joined = [*map(_joined, found)]
    return [Batch(i, inputs, torch.empty(0)) for i, inputs in enumerate(joined) if inputs is not None]


def _joined(pieces: Sequence[Inputs]) -> Inputs | None:
    """Join inputs. None if their shapes differ: then these are not the inputs that were kept together."""
    columns = [*zip(*(piece.tensors() for piece in pieces), strict=True)]
    if any(len({(t.shape[1:], t.dtype) for t in column}) > 1 for column in columns):
        return None
    return pieces[0].with_tensors(torch.cat(column) for column in columns)
