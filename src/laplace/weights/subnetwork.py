"""A subnetwork: single weights, by their indices in the flat vector of all trainable parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laplace.checks import shown
from laplace.errors import OptionError, warn
from laplace.weights.layout import Layout
from laplace.weights.selection import Choice, Selection, trainable_of

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Subnetwork(Choice):
    """The weights at some indices; a tensor all of whose weights are among them is a whole one."""

    label = "subnetwork"

    def __init__(self, indices: object) -> None:
        self.indices = _ascending(_checked(indices))

    def select(self, model: nn.Module) -> Selection:
        trainable = trainable_of(model)
        total = sum(p.numel() for _, p in trainable)
        if int(self.indices[-1]) >= total:
            raise OptionError(
                f"subnetwork_indices go up to {int(self.indices[-1]):,}; the network has {total:,} trainable weights, "
                f"numbered from 0 to {total - 1:,}."
            )
        names, shapes, parts, start = [], [], [], 0
        for name, p in trainable:
            low, high = torch.searchsorted(self.indices, torch.tensor([start, start + p.numel()])).tolist()
            if low < high:
                names.append(name)
                shapes.append(tuple(p.shape))
                index = (self.indices[low:high] - start).to(p.device)
                parts.append(None if len(index) == p.numel() else index)
            start += p.numel()
        return Selection(Layout.of_parts(names, shapes, parts))


def _checked(indices: object) -> Tensor:
    write = "Write subnetwork_indices=torch.tensor([0, 5, 7]), or take them from a selector of laplace.utils."
    if isinstance(indices, (list, tuple, range)) and all(type(index) is int for index in indices):
        indices = torch.tensor(indices, dtype=torch.long)
    if not isinstance(indices, Tensor):
        raise OptionError(
            f"subnetwork_indices={shown(indices)} is a {type(indices).__name__}; a vector or a list of whole numbers "
            f"is needed. {write}"
        )
    if indices.dtype not in _WHOLE or indices.dim() != 1:
        mask = " Of a mask: mask.flatten().nonzero().flatten()." if indices.dtype is torch.bool else ""
        raise OptionError(
            f"subnetwork_indices has dtype {indices.dtype} and shape {tuple(indices.shape)}; a vector of whole numbers "
            f"is needed.{mask or ' ' + write}"
        )
    if not len(indices):
        raise OptionError(f"subnetwork_indices is empty: no weight would be uncertain. {write}")
    if int(indices.min()) < 0:
        raise OptionError(f"subnetwork_indices holds {int(indices.min())}; weights are numbered from 0.")
    repeated = len(indices) - len(indices.unique())
    if repeated:
        raise OptionError(
            f"subnetwork_indices holds {repeated} of its {len(indices)} values more than once; each weight counts "
            "once: write indices.unique()."
        )
    return indices.detach().cpu().to(torch.long, copy=True)


def _ascending(indices: Tensor) -> Tensor:
    ordered = indices.sort().values
    if not torch.equal(ordered, indices):
        warn(
            "subnetwork_indices are not in ascending order; the posterior's weights are. Write indices.sort().values, "
            "so that vectors of yours (prior means, samples) have the same order."
        )
    return ordered
