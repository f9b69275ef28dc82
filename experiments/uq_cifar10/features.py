"""What the last layer of each trained network sees. Each network runs once over each set of images."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from benchmarks.harm.data import Folder
from benchmarks.harm.networks import ResNet, features, trained_resnet
from experiments.uq.cache import Cache
from torch import Tensor, nn

LAYERS = (20, 32, 44, 56)
SEVERITIES = (1, 2, 3, 4, 5)
BATCH = 100  # small batches with the channels last: half the time of large ones with the channels first
VALIDATION = 2000  # images of the test set, drawn with seed 42
CENTRE, SCALE = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def pixels(x: np.ndarray) -> Tensor:  # (N, 32, 32, 3) -> (N, 3, 32, 32)
    """Return images as the networks were trained on them."""
    return ((torch.from_numpy(x).float() / 255 - CENTRE) / SCALE).permute(0, 3, 1, 2).contiguous()


def images(folder: Folder, name: str, n: int | None = None) -> Tensor:
    """Return the images of a set: 'train', 'test', 'svhn', 'cifar100' or 'c1' to 'c5', the corrupted ones."""
    sets = {"train": ("cifar10", "x_train"), "test": ("cifar10", "x_test")}
    sets |= {"svhn": ("svhn_test10k", "x_test"), "cifar100": ("cifar100_test", "x_test")}
    sets |= {f"c{s}": ("cifar10c_2k", f"x_sev{s}") for s in SEVERITIES}
    return pixels(folder.colour(*sets[name], n))


def labels(folder: Folder) -> dict[str, Tensor]:
    """Return the labels of the training set, the test set and the corrupted images, which have the same for all."""
    found = {part: folder.labels("cifar10", part) for part in ("train", "test")}
    return {key: torch.from_numpy(y).long() for key, y in (found | {"c": folder.labels("cifar10c_2k", "test")}).items()}


@dataclass(frozen=True)
class Seen:
    """A network and the features of its last layer in each set, (N, 64)."""

    network: ResNet
    sets: dict[str, Tensor]
    seconds: dict[str, float]  # of the network on each set

    @property
    def head(self) -> nn.Linear:
        """Return the last layer."""
        return self.network.head


def seen_by(folder: Folder, cache: Cache, layers: int, sets: tuple[str, ...], n: int | None = None) -> Seen:
    """Run one network over all sets, or read what it saw."""
    network = trained_resnet(layers, folder.model(f"cifar10_resnet{layers}")).to(memory_format=torch.channels_last)
    found, seconds = {}, {}
    for name in sets:
        kept = cache.get(f"resnet{layers}_{name}", _run(network, lambda name=name: images(folder, name, n)))
        found[name], seconds[name] = kept["features"], float(kept["seconds"])
        print(f"resnet{layers} {name}: {tuple(found[name].shape)}, {seconds[name]:.0f} CPU seconds", flush=True)
    return Seen(network, found, seconds)


def _run(network: ResNet, read: Callable[[], Tensor]) -> Callable[[], dict[str, Tensor]]:
    def make() -> dict[str, Tensor]:
        x, start = read().contiguous(memory_format=torch.channels_last), time.process_time()
        seen = features(network, x, BATCH)
        return {"features": seen, "seconds": torch.tensor(time.process_time() - start)}

    return make
