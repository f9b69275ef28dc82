"""Draw a subset of the data uniformly without replacement, in one reading.

Every example gets a random number, which depends on its place in the data alone, and the examples with the smallest
numbers are kept. So the subset does not depend on batch sizes or processes, and the size of the data need not be known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.errors import InputError
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.sampling import Keyed, uniforms
from laplace.network.batch_merging import gathered
from laplace.network.batches import Batch
from laplace.network.inputs import Inputs
from laplace.structures.functional.points import Points

Vectors = Callable[[OutputCurvature, float], Tensor]


@dataclass(frozen=True)
class _Seen:
    """Holds the points kept from one batch."""

    keys: Tensor  # (m,), random; points with the smallest keys are kept
    numbers: Tensor  # (m,), places in the data
    inputs: Inputs
    curvature: OutputCurvature

    def only(self, index: Tensor) -> _Seen:
        inputs = self.inputs.at(index)
        return _Seen(
            self.keys[index], self.numbers[index], inputs, self.curvature.part(index.to(self.curvature.device))
        )


class Subset:
    """Holds the points that are kept so far."""

    def __init__(self, most: int, seed: int) -> None:
        self.most, self.seed = most, seed
        self.parts: list[_Seen] = []

    def see(self, inputs: Inputs, curvature: OutputCurvature, places: Tensor) -> None:
        """Draw from a batch of examples at these places in the data, (n,), with the curvature of their outputs."""
        n = len(places)
        if inputs.size != n or inputs.shared:
            raise InputError(
                f"hessian_structure='gp' keeps single points, and these inputs of {n} examples cannot be split into "
                "examples. Give inputs whose tensors all have the examples in their first dimension."
            )
        keys = uniforms(n, 1, 1, torch.empty(0), Keyed(self.seed, places)).flatten()
        new = _Seen(keys, places, inputs, curvature)
        self.parts = _smallest([*self.parts, new], self.most, new)

    def fewer(self, most: int) -> Subset:
        """Return the points that a subset of at most `most` points would have kept."""
        out = copy.copy(self)
        out.most, out.parts = most, _smallest(self.parts, most, None)
        return out

    def joined(self, kept: Sequence[Sequence[_Seen]]) -> Subset:
        """Return the subset of all data from those that several processes have kept, in the order of the data."""
        every = [part.only(torch.tensor([i])) for parts in kept for part in parts for i in range(len(part.keys))]
        every.sort(key=lambda point: float(point.keys))
        whole = Subset(self.most, self.seed)
        whole.parts = sorted(every[: self.most], key=lambda point: int(point.numbers))
        return whole

    def points(self, n_data: int, asked: int | None, vectors: Vectors) -> Points:
        """Return the points drawn from `n_data` examples, with the vectors to send back from their outputs."""
        kept = sum(len(part.keys) for part in self.parts)
        if asked is not None and asked > n_data:
            raise InputError(
                f"n_subset={asked} is more than the {n_data} examples. Give at most {n_data}, or leave it out."
            )
        batches = [
            Batch(i, part.inputs, vectors(part.curvature, n_data / kept).transpose(0, 1))
            for i, part in enumerate(self.parts)
        ]
        groups = gathered(batches, lambda: kept)
        joined = [group if isinstance(group, Batch) else group.joined() for group in groups]
        return Points(joined, torch.cat([part.numbers for part in self.parts]))


def _smallest(parts: list[_Seen], most: int, new: _Seen | None) -> list[_Seen]:
    """Return the points with the smallest keys. Those of `new` are copied: a loader may reuse its memory."""
    sizes = [len(part.keys) for part in parts]
    kept = torch.zeros(sum(sizes), dtype=torch.bool)
    kept[torch.cat([part.keys for part in parts]).topk(min(most, len(kept)), largest=False).indices] = True
    masks = zip(parts, kept.split(sizes), strict=True)
    return [
        part if part is not new and mask.all() else part.only(mask.nonzero().flatten())
        for part, mask in masks
        if mask.any()
    ]
