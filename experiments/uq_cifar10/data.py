"""Which images are scored, and the sets as features of all networks side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from benchmarks.harm.data import Folder
from experiments.uq.cache import Cache
from experiments.uq.columns import Columns, side_by_side
from experiments.uq_cifar10.features import LAYERS, SEVERITIES, VALIDATION, labels, seen_by
from torch import Tensor

CORRUPTED = tuple(f"c{s}" for s in SEVERITIES)
SETS = ("test", *CORRUPTED, "svhn", "cifar100", "train")
UNKNOWN = ("svhn", "cifar100")
OUTSIDE = 3000  # unknown images of each kind, drawn with seed 42
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Chosen:
    """Which images of each file are scored, by their indices."""

    validation: Tensor
    test: Tensor
    corrupted: Tensor  # of each severity
    outside: dict[str, Tensor]

    def first(self, test: int, corrupted: int, outside: int) -> Chosen:
        """Return the first of them, for methods that are too slow for all."""
        some = {name: index[:outside] for name, index in self.outside.items()}
        return Chosen(self.validation, self.test[:test], self.corrupted[:corrupted], some)


@dataclass(frozen=True)
class Images:
    """Networks, and what they see of each set."""

    networks: list[Columns]
    train: Labelled
    validation: Labelled
    labelled: dict[str, Labelled]  # 'c0', the test images, to 'c5', the most corrupted ones
    outside: dict[str, Tensor]


def chosen(folder: Folder, sizes: dict[str, int], n: int | None) -> Chosen:
    """Choose validation and test images; of the first n images of each set, whose sizes are given."""
    order = torch.randperm(sizes["test"], generator=torch.Generator().manual_seed(42))
    first = min(VALIDATION, len(order) // 2)
    ids = torch.from_numpy(folder.beside("cifar10c_2k", "test_index")[:n]).long()
    kept = ~torch.isin(ids, order[:first])  # corrupted images that were not made from validation data
    outside = {name: _some(sizes[name]) for name in UNKNOWN}
    return Chosen(order[:first], order[first:], kept.nonzero().squeeze(1), outside)


def read(
    folder: Folder,
    cache: Cache,
    n: int | None,
    layers: tuple[int, ...] = LAYERS,
    part: tuple[int, int, int] | None = None,
) -> Images:
    """Run the networks, or read what they saw; the first n images of each set.

    Args:
        folder: Where the images and the networks are.
        cache: Where the features are kept.
        n: How many images of each set; None for all.
        layers: Which networks, by their numbers of layers.
        part: How many test images, corrupted images of each severity and unknown images are scored; None for all.
    """
    y = {name: values[:n] for name, values in labels(folder).items()}
    seen = [seen_by(folder, cache, count, SETS, n) for count in layers]
    networks = side_by_side([one.head for one in seen])
    x = {name: torch.cat([one.sets[name] for one in seen], 1) for name in SETS}
    index = chosen(folder, {name: len(values) for name, values in x.items()}, n)
    index = index.first(*part) if part else index
    labelled = {"c0": (x["test"][index.test], y["test"][index.test])}
    labelled |= {name: (x[name][index.corrupted], y["c"][index.corrupted]) for name in CORRUPTED}
    held_out = x["test"][index.validation], y["test"][index.validation]
    outside = {name: x[name][index.outside[name]] for name in UNKNOWN}
    return Images(networks, (x["train"], y["train"]), held_out, labelled, outside)


def _some(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(42))[:OUTSIDE]
