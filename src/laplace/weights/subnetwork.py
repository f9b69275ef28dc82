"""Choose single weights by their indices in the flat vector of all trainable parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from laplace.checks import shown
from laplace.errors import OptionError, warn
from laplace.weights.layout import Layout, require_real
from laplace.weights.selection import Choice, Selection, trainable_of

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Subnetwork(Choice):
    """Takes single weights. A tensor whose weights are all chosen is treated as a whole.

    Args:
        indices: positions in the flat vector of all trainable weights, as a vector or a list of whole numbers.

    Raises:
        OptionError: the values are not indices, or some occur twice.
    """

    label = "subnetwork"
    options = ("indices",)

    def __init__(self, indices: Tensor | Sequence[int]) -> None:
        self.indices = ascending(indices)

    def __repr__(self) -> str:
        """Return the call that makes this object. Of many indices, show the first and the last."""
        numbers = self.indices.tolist()
        if len(numbers) <= 8:
            return f"Subnetwork({numbers})"
        ends = [", ".join(map(str, some)) for some in (numbers[:3], numbers[-3:])]
        return f"<Subnetwork of {len(numbers):,} weights: {ends[0]}, ..., {ends[1]}>"

    def __eq__(self, other: object) -> bool:
        """Compare the indices."""
        return isinstance(other, Subnetwork) and torch.equal(self.indices, other.indices)

    __hash__ = Choice.__hash__

    def select(self, model: nn.Module) -> Selection:
        trainable = trainable_of(model)
        total = sum(p.numel() for _, p in trainable)
        if int(self.indices[-1]) >= total:
            raise OptionError(
                f"the indices of the subnetwork go up to {int(self.indices[-1]):,}; the network has {total:,} "
                f"trainable weights, numbered from 0 to {total - 1:,}."
            )
        names, shapes, parts, start = [], [], [], 0
        for name, p in trainable:
            low, high = torch.searchsorted(self.indices, torch.tensor([start, start + p.numel()])).tolist()
            if low < high:
                require_real([(name, p)])
                names.append(name)
                shapes.append(tuple(p.shape))
                index = (self.indices[low:high] - start).to(p.device)
                parts.append(None if len(index) == p.numel() else index)
            start += p.numel()
        return Selection(Layout.of_parts(names, shapes, parts))


def _checked(indices: object, what: str) -> Tensor:
    write = f"Write {what}=torch.tensor([0, 5, 7]), or take them from a selector of laplace.utils."
    if isinstance(indices, (list, tuple, range)) and all(type(index) is int for index in indices):
        indices = torch.tensor(indices, dtype=torch.long)
    if not isinstance(indices, Tensor):
        raise OptionError(
            f"{what}={shown(indices)} is a {type(indices).__name__}; a vector or a list of whole numbers "
            f"is needed. {write}"
        )
    if indices.dtype not in _WHOLE or indices.dim() != 1:
        mask = " For a mask write mask.flatten().nonzero().flatten()." if indices.dtype is torch.bool else ""
        raise OptionError(
            f"{what} has dtype {indices.dtype} and shape {tuple(indices.shape)}; a vector of whole numbers "
            f"is needed.{mask or ' ' + write}"
        )
    if not len(indices):
        raise OptionError(f"{what} is empty: no weight would be uncertain. {write}")
    if int(indices.min()) < 0:
        raise OptionError(f"{what} holds {int(indices.min())}; weights are numbered from 0.")
    repeated = len(indices) - len(indices.unique())
    if repeated:
        raise OptionError(
            f"{what} holds {repeated} of its {len(indices)} values more than once; each weight counts "
            "once: write indices.unique()."
        )
    return indices.detach().cpu().to(torch.long, copy=True)


def ascending(indices: object, what: str = "indices") -> Tensor:
    """Return indices in ascending order. Warns if they were not. `what` is their name in messages."""
    indices = _checked(indices, what)
    ordered = indices.sort().values
    if not torch.equal(ordered, indices):
        warn(
            f"{what} are not in ascending order, but the posterior's weights are. Write indices.sort().values, "
            "so that your own vectors (prior means, samples) have the same order."
        )
    return ordered
