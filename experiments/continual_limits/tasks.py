"""Permuted MNIST: the same digits with their pixels in another order for every task."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from benchmarks.harm.data import Folder
from torch import Tensor, nn

BATCH = 256


class Batches:
    """Yields shuffled batches. Each task shuffles with a generator of its own, so that it does not depend on others."""

    def __init__(self, x: Tensor, y: Tensor, seed: int) -> None:
        self.x, self.y, self.generator = x, y, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.randperm(len(self.x), generator=self.generator).split(BATCH):
            yield self.x[index], self.y[index]

    def __len__(self) -> int:
        return math.ceil(len(self.x) / BATCH)


@dataclass(frozen=True)
class Tasks:
    """Training and test data of every task. The first has its pixels as they are.

    Attributes:
        x, y: training images, (N, 784), and labels, (N,).
        test_x, test_y: the same of the test set.
        orders: the order of the pixels in each task, (784,) each.
        seed: of the orders and the batches.
    """

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    orders: list[Tensor]
    seed: int

    def training(self, task: int) -> Batches:
        """Return the training data of a task."""
        return Batches(self.x[:, self.orders[task]], self.y, 1000 * self.seed + task)

    @torch.no_grad()
    def accuracies(self, model: nn.Module, seen: int) -> list[float]:
        """Return the test accuracy on each of the first `seen` tasks."""
        found = [model(self.test_x[:, order]).argmax(1) for order in self.orders[:seen]]
        return [float((labels == self.test_y).float().mean()) for labels in found]


def read(folder: Folder, tasks: int, examples: int, seed: int) -> Tasks:
    """Read mnist.npz; the first `examples` training images."""
    raw = folder.arrays("mnist")
    x, test_x = (torch.from_numpy(raw[key]).flatten(1).float() / 255 for key in ("x_train", "x_test"))
    y, test_y = (torch.from_numpy(raw[key]).long() for key in ("y_train", "y_test"))
    generator = torch.Generator().manual_seed(seed)
    others = [torch.randperm(784, generator=generator) for _ in range(tasks - 1)]
    return Tasks(x[:examples], y[:examples], test_x, test_y, [torch.arange(784), *others], seed)


def network(seed: int) -> nn.Sequential:
    """Return the untrained network of the paper."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
