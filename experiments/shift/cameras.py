"""Animals in front of camera traps: known cameras and cameras that training has not seen (a small part of iWildCam).

Twelve classes, images of 32 x 32. The split is not the official one of WILDS.
"""

from __future__ import annotations

import torch
from benchmarks.harm.data import Folder
from benchmarks.harm.networks import Network, features, train
from experiments.shift.sets import INSIDE, SHIFTED, Sizes, Task, held_out, kept, on_features
from experiments.uq.cache import Cache
from torch import Tensor, nn

NAME, VALIDATION, BATCH, DECAY = "iwildcam32", 1000, 64, 1e-4
SPLITS = {"train": "train", INSIDE: "id_test", SHIFTED: "ood_test"}


def read(folder: Folder, cache: Cache, sizes: Sizes, seed: int) -> Task:
    """Train small convolutional networks on the known cameras, or read them."""
    x, y = {}, {}
    for name, split in SPLITS.items():
        x[name] = _pixels(torch.from_numpy(folder.colour(NAME, f"x_{split}", sizes.examples)))
        y[name] = torch.from_numpy(folder.labels(NAME, split)[: sizes.examples]).long()
    val, rest = held_out(len(y["train"]), min(VALIDATION, len(y["train"]) // 4))
    for one in (x, y):
        one["validation"], one["train"] = one["train"][val], one["train"][rest]

    def trained(member: int) -> Network:
        def make() -> Network:
            torch.manual_seed(1000 * seed + member)
            return small_network()

        def run(network: nn.Module) -> None:
            steps = sizes.image_epochs * len(y["train"]) // BATCH
            data = x["train"], y["train"]
            train(network, *data, steps=steps, seed=1000 * seed + member, decay=DECAY, batch=BATCH, lr=2e-3)

        return kept(cache, f"cameras_{seed}_{member}", make, run)  # type: ignore[return-value]

    networks = [trained(member) for member in range(sizes.members)]

    def through(member: int, name: str) -> Tensor:
        made = cache.get(f"cameras_{seed}_{member}_{name}", lambda: {"features": features(networks[member], x[name])})
        return made["features"]

    return on_features([network.head for network in networks], through, y, ())


def small_network() -> Network:
    """Return four convolutions with BatchNorm and a hidden layer of 64 units, untrained."""
    layers, before = [], 3
    for after in (8, 16, 32, 64):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        before = after
    return Network(nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 64), nn.ReLU()), nn.Linear(64, 12))


def _pixels(x: Tensor) -> Tensor:  # (N, 32, 32, 3) -> (N, 3, 32, 32)
    return ((x.float() / 255 - 0.45) / 0.25).permute(0, 3, 1, 2).contiguous()
