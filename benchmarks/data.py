"""Random data in ready batches, and the plain passes over it that everything else is measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batches = Sequence[tuple[Tensor, Tensor]]


def random_batches(shape: tuple[int, ...], classes: int, n: int, size: int) -> Batches:
    """Normal inputs of that shape with labels drawn at random."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, *shape, generator=generator)
    y = torch.randint(classes, (n,), generator=generator)
    return in_batches(x, y, size)


def in_batches(x: Tensor, y: Tensor, size: int) -> Batches:
    """Consecutive examples, `size` at a time."""
    return list(zip(x.split(size), y.split(size), strict=True))


def inputs_of(batches: Batches, n: int) -> Tensor:
    """The first `n` inputs."""
    return torch.cat([x for x, _ in batches])[:n]


@torch.no_grad()
def forward(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """A plain forward pass."""
    for x in inputs:
        model(x)


def epoch(model: nn.Module, batches: Batches) -> None:
    """Forward and backward passes of the mean cross-entropy, up to the gradients of all parameters."""
    parameters = list(model.parameters())
    for x, y in batches:
        torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
