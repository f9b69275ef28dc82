"""The tasks: real data, a trained network, and what its last layer sees; made once, kept as safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from . import networks
from .data import Folder
from .networks import Network
from .text import sentences

UCI = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
PARTS = ("train", "val", "test")
VALIDATION, OUTSIDE = 2000, 2000  # examples for validation where there are so many; of each set of unknown inputs
LARGEST = 10_000  # training examples of a UCI set


@dataclass(frozen=True)
class Splits:
    """Inputs and targets to train on, to validate and to test with, and inputs of other kinds."""

    train_x: Tensor
    train_y: Tensor
    val_x: Tensor
    val_y: Tensor
    test_x: Tensor
    test_y: Tensor
    outside: Mapping[str, Tensor] = field(default_factory=dict)

    def through(self, function: Callable[[Tensor], Tensor]) -> Splits:
        """Return the same with every input mapped."""
        parts = {f"{part}_x": function(getattr(self, f"{part}_x")) for part in PARTS}
        targets = {f"{part}_y": getattr(self, f"{part}_y") for part in PARTS}
        return Splits(**parts, **targets, outside={name: function(x) for name, x in self.outside.items()})


@dataclass(frozen=True)
class Prepared:
    """A trained network on its data: the features of its last layer, and all of it where all weights are wanted."""

    features: Splits
    head: nn.Linear
    whole: Callable[[], tuple[nn.Module, Splits]] | None  # the network and the inputs themselves, read when called


@dataclass(frozen=True)
class Task:
    """A data set with a network."""

    name: str
    seeds: int
    inputs: Callable[[Folder, Path, int], Splits]
    network: Callable[[Folder, Splits, int], nn.Module]  # trained
    empty: Callable[[Splits], Network] | None = None  # the architecture, where all weights are made uncertain, too
    regression: bool = False

    def prepare(self, folder: Folder, cache: Path, seed: int) -> Prepared:
        """Train, or read what was kept."""
        path = cache / f"{self.name}_{seed}.safetensors"
        if not path.exists():
            torch.manual_seed(seed)
            splits = self.inputs(folder, cache, seed)
            net = self.network(folder, splits, seed)
            seen = splits.through(partial(networks.features, net))
            save_file(_flat(seen, net), path)
        kept = load_file(path)
        head = nn.Linear(kept["weight"].shape[1], kept["weight"].shape[0])
        head.load_state_dict({"weight": kept["weight"], "bias": kept["bias"]})
        outside = {key[4:]: x for key, x in kept.items() if key.startswith("ood_")}
        targets = {f"{part}_{xy}": kept[f"{part}_{xy}"] for part in PARTS for xy in "xy"}

        def whole() -> tuple[nn.Module, Splits]:
            splits = self.inputs(folder, cache, seed)
            assert self.empty is not None
            net = self.empty(splits)
            net.load_state_dict({key[4:]: value for key, value in kept.items() if key.startswith("net.")})
            return net.eval(), splits

        return Prepared(Splits(**targets, outside=outside), head.eval(), whole if self.empty else None)


def _flat(seen: Splits, net: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a file: features and targets, the head, the state of the network."""
    flat = {f"{part}_{xy}": getattr(seen, f"{part}_{xy}") for part in PARTS for xy in "xy"}
    flat |= {f"ood_{name}": x for name, x in seen.outside.items()}
    flat |= {"weight": net.head.weight.detach().clone(), "bias": net.head.bias.detach().clone()}
    flat |= {f"net.{key}": value.clone() for key, value in net.state_dict().items()}
    return {key: value.contiguous() for key, value in flat.items()}


def _halved(n: int, first: int) -> tuple[Tensor, Tensor]:
    """Return the indices of `first` of n examples, and of the others; always the same ones."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(42))
    return order[:first], order[first:]


def _some(x: Tensor, n: int = OUTSIDE) -> Tensor:
    return x[_halved(len(x), min(n, len(x)))[0]]


# Grey images


def _grey(
    name: str, centre: float, scale: float, outside: tuple[str, ...], folder: Folder, cache: Path, seed: int
) -> Splits:
    raw = folder.arrays(name)

    def pixels(x: np.ndarray) -> Tensor:
        return ((torch.from_numpy(x).float() / 255 - centre) / scale).unsqueeze(1)

    labels = {part: torch.from_numpy(raw[f"y_{part}"]).long() for part in ("train", "test")}
    val, test = _halved(len(labels["test"]), VALIDATION)
    x = pixels(raw["x_test"])
    others = {other: _some(pixels(folder.arrays(other)["x_test"])) for other in outside}
    return Splits(
        pixels(raw["x_train"]), labels["train"], x[val], labels["test"][val], x[test], labels["test"][test], others
    )


def _train_images(make: Callable[[], Network], epochs: int, folder: Folder, splits: Splits, seed: int) -> Network:
    net = make()
    networks.train(net, splits.train_x, splits.train_y, steps=epochs * len(splits.train_x) // 64, seed=seed)
    return net


# Colour images


def _colour(folder: Folder, cache: Path, seed: int) -> Splits:
    centre, scale = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

    def pixels(x: np.ndarray) -> Tensor:
        return ((torch.from_numpy(x).float() / 255 - centre) / scale).permute(0, 3, 1, 2).contiguous()

    n = 20_000
    val, test = _halved(10_000, VALIDATION)
    x, y = pixels(folder.colour("cifar10", "x_test")), torch.from_numpy(folder.labels("cifar10", "test")).long()
    others = {"svhn": "svhn_test10k", "cifar100": "cifar100_test"}
    outside = {name: pixels(_shuffled(folder.colour(file, "x_test"))) for name, file in others.items()}
    train_y = torch.from_numpy(folder.labels("cifar10", "train")[:n]).long()
    return Splits(pixels(folder.colour("cifar10", "x_train", n)), train_y, x[val], y[val], x[test], y[test], outside)


def _shuffled(x: np.ndarray) -> np.ndarray:
    return x[_halved(len(x), min(OUTSIDE, len(x)))[0].numpy()]


def _resnet(layers: int, folder: Folder, splits: Splits, seed: int) -> nn.Module:
    return networks.trained_resnet(layers, folder.model(f"cifar10_resnet{layers}"))


# Sentences: the encoder's features are the inputs, the head is the network


@dataclass(frozen=True)
class Sentences:
    """Which parts of a set of sentences are used, and which sentences are of another kind."""

    name: str
    validation: str | int  # a split, or how many of the training sentences
    outside: tuple[tuple[str, str], ...]  # (set, split)

    def __call__(self, folder: Folder, cache: Path, seed: int) -> Splits:
        found = sentences(folder, cache, self.name)
        x, y = found["train"], found["train_label"]
        if isinstance(self.validation, int):
            val, train = _halved(len(x), self.validation)
            val_x, val_y, x, y = x[val], y[val], x[train], y[train]
        else:
            val_x, val_y = found[self.validation], found[f"{self.validation}_label"]
            some = _halved(len(val_x), min(VALIDATION, len(val_x)))[0]
            val_x, val_y = val_x[some], val_y[some]
        outside = {f"{name}_{split}": _some(sentences(folder, cache, name)[split]) for name, split in self.outside}
        return Splits(x, y, val_x, val_y, found["test"], found["test_label"], outside)


def _train_head(epochs: int, lr: float, folder: Folder, splits: Splits, seed: int) -> Network:
    net = Network(nn.Identity(), nn.Linear(splits.train_x.shape[1], int(splits.train_y.max()) + 1))
    networks.train(net, splits.train_x, splits.train_y, steps=epochs * len(splits.train_x) // 64, seed=seed, lr=lr)
    return net


# Small images of scikit-learn, without 8 and 9


def _digits(folder: Folder, cache: Path, seed: int) -> Splits:
    from sklearn.datasets import load_digits

    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    x, y = (x.float() - 8) / 8, y.long()
    known = torch.where(y < 8)[0][torch.randperm(int((y < 8).sum()), generator=torch.Generator().manual_seed(seed))]
    train, val, test = known[:700], known[700:900], known[900:]
    return Splits(x[train], y[train], x[val], y[val], x[test], y[test], {"8_9": x[y >= 8]})


def _digits_network(splits: Splits) -> Network:
    return networks.perceptron(64, (64, 32), 8)


def _train_digits(folder: Folder, splits: Splits, seed: int) -> Network:
    net = _digits_network(splits)
    networks.train(net, splits.train_x, splits.train_y, steps=1000, seed=seed, lr=3e-3)
    return net


# Regression, in units of the training targets' standard deviation


def _uci(name: str, folder: Folder, cache: Path, split: int) -> Splits:
    raw = folder.arrays(f"uci/{name}")
    x, y = torch.from_numpy(raw["X"]), torch.from_numpy(raw["y"]).unsqueeze(1)
    known, test = (torch.from_numpy(raw[f"{part}_idx"][split]).long() for part in ("train", "test"))
    known = known[:LARGEST]
    val, train = (known[i] for i in _halved(len(known), len(known) // 10))
    x = (x - x[train].mean(0)) / x[train].std(0).clamp(min=1e-8)
    y = (y - y[train].mean()) / y[train].std()
    return Splits(*(part.float() for i in (train, val, test) for part in (x[i], y[i])))


def _uci_network(splits: Splits) -> Network:
    return networks.perceptron(splits.train_x.shape[1], (64, 64), 1)


def _train_uci(folder: Folder, splits: Splits, seed: int) -> Network:
    net = _uci_network(splits)
    networks.train(net, splits.train_x, splits.train_y, steps=1500, seed=seed, lr=3e-3, decay=1e-4)
    return net


_MNIST = partial(_grey, "mnist", 0.1307, 0.3081, ("fashion_mnist", "kmnist", "notmnist"))
_FASHION = partial(_grey, "fashion_mnist", 0.2860, 0.3530, ("mnist", "kmnist", "notmnist"))
_CLINC, _TREC = ("clinc150", "oos_test"), ("trec6", "test")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("digits", 3, _digits, _train_digits, _digits_network),
        Task("clinc150", 3, Sentences("clinc150", "val", (_CLINC, _TREC)), partial(_train_head, 60, 1e-2)),
        Task(
            "trec6",
            3,
            Sentences("trec6", 952, (("sst2", "test"), ("clinc150", "test"))),
            partial(_train_head, 100, 1e-2),
        ),
        Task("sst2", 3, Sentences("sst2", "dev", (_TREC, ("clinc150", "test"))), partial(_train_head, 15, 1e-2)),
        Task("banking77", 3, Sentences("banking77", VALIDATION, (_CLINC, _TREC)), partial(_train_head, 30, 1e-2)),
        *(Task(name, 5, partial(_uci, name), _train_uci, _uci_network, True) for name in UCI),
        Task("mnist", 3, _MNIST, partial(_train_images, networks.lenet, 5), lambda _: networks.lenet()),
        Task(
            "fashion_short", 3, _FASHION, partial(_train_images, networks.small_cnn, 3), lambda _: networks.small_cnn()
        ),
        Task(
            "fashion_long", 1, _FASHION, partial(_train_images, networks.small_cnn, 30), lambda _: networks.small_cnn()
        ),
        Task("cifar10_resnet20", 1, _colour, partial(_resnet, 20)),
        Task("cifar10_resnet32", 1, _colour, partial(_resnet, 32)),
    )
}
