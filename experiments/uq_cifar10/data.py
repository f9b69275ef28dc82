"""The sets as features of all networks side by side: each network reads its own columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from benchmarks.harm.data import Folder
from experiments.uq.cache import Cache
from experiments.uq.columns import Columns, side_by_side
from experiments.uq_cifar10.features import LAYERS, SEVERITIES, VALIDATION, labels, seen_by
from torch import Tensor

SETS = ("test", *(f"c{s}" for s in SEVERITIES), "svhn", "cifar100", "train")
OUTSIDE = 3000  # unknown images of each kind, drawn with seed 42
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Images:
    """Four networks, and what they see of each set."""

    networks: list[Columns]
    train: Labelled
    validation: Labelled
    labelled: dict[str, Labelled]  # 'c0', the test images, to 'c5', the most corrupted ones
    outside: dict[str, Tensor]


def read(folder: Folder, cache: Cache, n: int | None) -> Images:
    """Run the networks, or read what they saw; the first n images of each set."""
    y = {name: values[:n] for name, values in labels(folder).items()}
    seen = [seen_by(folder, cache, layers, SETS, n) for layers in LAYERS]
    networks = side_by_side([one.head for one in seen])
    x = {name: torch.cat([one.sets[name] for one in seen], 1) for name in SETS}
    order = torch.randperm(len(y["test"]), generator=torch.Generator().manual_seed(42))
    first = min(VALIDATION, len(order) // 2)
    validation, test = order[:first], order[first:]
    ids = torch.from_numpy(folder.beside("cifar10c_2k", "test_index")[:n]).long()
    kept = ~torch.isin(ids, validation)  # corrupted images that were not made from validation data
    labelled = {"c0": (x["test"][test], y["test"][test])}
    labelled |= {f"c{s}": (x[f"c{s}"][kept], y["c"][kept]) for s in SEVERITIES}
    held_out = x["test"][validation], y["test"][validation]
    outside = {name: _some(x[name], OUTSIDE) for name in ("svhn", "cifar100")}
    return Images(networks, (x["train"], y["train"]), held_out, labelled, outside)


def _some(x: Tensor, n: int) -> Tensor:
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(42))[:n]]
