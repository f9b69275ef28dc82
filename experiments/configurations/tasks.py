"""The components that are combined, and the two tasks that they are tried on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from benchmarks.harm.networks import small_cnn, train
from experiments.uq.cache import Cache
from experiments.uq.methods import BATCH
from experiments.uq.start import Study
from experiments.uq_cifar10.data import read
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

CURVATURES = ("ggn", "ef")
TUNINGS, LINKS = ("evidence", "auto", "calibrate"), ("probit", "one_vs_rest", "mc", "bridge")
PARTS = {
    "weights": ("last_layer", "subnetwork", "all"),
    "structure": ("kron", "full", "diag"),
    "curvature": CURVATURES,
    "tuning": TUNINGS,
    "link": LINKS,
}
TEST, OUTSIDE, VALIDATION = 1000, 400, 1000  # images; unknown ones of each kind
SUBNETWORK = 300  # weights, those furthest from 0
CENTRE, SCALE = 0.286, 0.353
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A trained network with its data, and the weights and structures that it is tried with."""

    name: str
    network: nn.Module
    train: Labelled
    validation: Labelled
    known: Labelled
    unknown: dict[str, Tensor]
    kinds: tuple[tuple[str, str], ...]

    @property
    def batches(self) -> list[Labelled]:
        """Return the training data in batches."""
        return list(zip(self.train[0].split(BATCH), self.train[1].split(BATCH), strict=True))

    @property
    def indices(self) -> Tensor:
        """Return the weights of the subnetwork."""
        return parameters_to_vector(self.network.parameters()).detach().abs().topk(SUBNETWORK).indices.sort().values


def cifar10(study: Study, seed: int) -> Task:
    """Return the last layer of a ResNet-20 on CIFAR-10; unknown are SVHN and CIFAR-100. Seeds have other images."""
    shared = Cache(study.cache.folder.parent / ("uq_cifar10-quick" if study.quick else "uq_cifar10"))
    images = read(study.folder, shared, 400 if study.quick else None, (20,))
    validation = _part(images.validation, VALIDATION, seed)
    kinds = tuple(("last_layer", structure) for structure in PARTS["structure"])
    known, network = _part(images.labelled["c0"], TEST, seed), images.networks[0]
    unknown = {name: _some(x, OUTSIDE, seed) for name, x in images.outside.items()}
    return Task("cifar10", network, images.train, validation, known, unknown, kinds)


def fmnist(study: Study, seed: int) -> Task:
    """Return a CNN of 105,866 weights on Fashion-MNIST; unknown are MNIST and Kuzushiji-MNIST.

    Seeds have other images, in training, too, and another start.
    """
    n, test, outside = (600, 60, 40) if study.quick else (20_000, TEST, OUTSIDE)
    half = min(VALIDATION, test)
    x, y = _part(_images(study, "fashion_mnist", "train"), n, seed)
    new_x, new_y = _part(_images(study, "fashion_mnist", "test"), half + test, seed)
    torch.manual_seed(seed)
    network = small_cnn()

    def run() -> dict[str, Tensor]:
        train(network, x, y, steps=study.epochs * len(x) // 128, seed=seed, batch=128)
        return dict(network.state_dict())

    network.load_state_dict(study.cache.get(f"fmnist_epochs_{study.epochs}_seed{seed}", run))
    kinds = (*(("last_layer", structure) for structure in PARTS["structure"]), ("subnetwork", "full"))
    kinds = (*kinds, ("all", "kron"), ("all", "diag"))  # the full structure of all weights would take 45 GB
    return Task(
        "fmnist",
        network.eval(),
        (x, y),
        (new_x[:half], new_y[:half]),
        (new_x[half:], new_y[half:]),
        {name: _some(_images(study, name, "test")[0], outside, seed) for name in ("mnist", "kmnist")},
        kinds,
    )


def _images(study: Study, name: str, part: str) -> Labelled:
    raw = study.folder.arrays(name)
    x = (torch.from_numpy(raw[f"x_{part}"]).float() / 255 - CENTRE) / SCALE
    return x.unsqueeze(1), torch.from_numpy(raw[f"y_{part}"]).long()


def _part(data: Labelled, n: int, seed: int) -> Labelled:
    return _some(data[0], n, seed), _some(data[1], n, seed)


def _some(values: Tensor, n: int, seed: int) -> Tensor:  # (N, ...) -> (n, ...)
    """Return n rows, or all if there are fewer: after those of the seeds before, from the start again at the end."""
    return values[(torch.arange(min(n, len(values))) + seed * n) % len(values)]
