"""Iterates of SGD that starts at trained weights, on a copy of them, and their moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace.errors import InputError, NumericalError, within
from laplace.inference.targets import labelled_rows
from laplace.likelihoods import Likelihood
from laplace.network.batches import training_batches
from laplace.network.inputs import Keys
from laplace.network.replica import replicate
from laplace.predictive.positions import Positions
from laplace.weights.selection import trainable_of


@dataclass(frozen=True)
class SGD:
    """Says how weights are moved by stochastic gradients.

    Attributes:
        lr: the learning rate, which is constant.
        momentum: how much of the last step is added to the next.
        weight_decay: what the weights are multiplied by in the gradient.
    """

    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0


def flat(weights: Iterable[Tensor]) -> Tensor:  # (P,)
    """Return all weights as one vector, in float64."""
    return torch.cat([p.detach().double().flatten() for p in weights])


class Moments:
    """Computes mean, variance and last deviations of a sequence of vectors.

    Sums are those of differences from the first vector, which are small, so that their squares do not cancel.

    Args:
        rank: How many deviations from the running mean are kept, the last ones.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.count = rank, 0
        self._first: Tensor | None = None
        self._total = self._squares = torch.zeros(0)
        self._deviations: list[Tensor] = []

    def add(self, vector: Tensor) -> None:  # (P,)
        """Add one vector."""
        if self._first is None:
            self._first = vector.clone()
            self._total, self._squares = torch.zeros_like(vector), torch.zeros_like(vector)
        moved = vector - self._first
        self.count += 1
        self._total, self._squares = self._total + moved, self._squares + moved.square()
        if self.rank:
            self._deviations = [*self._deviations, moved - self._total / self.count][-self.rank :]

    @property
    def mean(self) -> Tensor:  # (P,)
        """Return the mean of the vectors."""
        assert self._first is not None
        return self._first + self._total / self.count

    @property
    def variance(self) -> Tensor:  # (P,)
        """Return their variance, E[x^2] - E[x]^2."""
        return (self._squares / self.count - (self._total / self.count).square()).clamp(min=0)

    @property
    def deviations(self) -> Tensor:  # (K, P)
        """Return the last deviations, each from the mean of the vectors up to it."""
        return torch.stack(self._deviations)


def iterates(
    model: nn.Module,
    likelihood: Likelihood,
    loader: Any,
    keys: Keys,
    epochs: int,
    sgd: SGD,
    class_dim: int | None = -1,
) -> Iterator[Tensor]:  # (P,)
    """Yield the weights after every `epochs` epochs of SGD with momentum and a constant learning rate, without end.

    It starts at the network's trainable weights, and runs on a copy of them: the network is not changed. It runs in
    eval mode: statistics of BatchNorm stay as they are, and nothing is dropped.
    """
    if loader is None or isinstance(loader, Iterator):
        raise InputError(
            "SGD runs over the training data many times, and needs a DataLoader or a list of batches; a "
            f"{type(loader).__name__} came."
        )
    moving = {name: p.detach().clone().requires_grad_() for name, p in trainable_of(model)}
    speed = {name: torch.zeros_like(p) for name, p in moving.items()}
    while True:
        for _ in range(epochs):
            _epoch(model, likelihood, moving, speed, loader, keys, sgd, class_dim)
        found = flat(moving.values())
        if not found.isfinite().all():
            raise NumericalError(f"SGD diverged with lr={sgd.lr:g}. Take a smaller one.")
        yield found


def _epoch(
    model: nn.Module,
    likelihood: Likelihood,
    moving: dict[str, Tensor],
    speed: dict[str, Tensor],
    loader: Iterable[Any],
    keys: Keys,
    sgd: SGD,
    class_dim: int | None,
) -> None:
    """Run one epoch of SGD with momentum, in place."""
    network, seen = replicate(model), 0
    for batch in training_batches(loader, model, keys, False, "sgd"):
        with torch.enable_grad(), within(f"batch {batch.index}"):
            f = batch.inputs.normal_tensors().call_with(network, moving)
            positions = Positions.of(f, class_dim)
            labels, kept = labelled_rows(positions, batch, likelihood, f.device)
            rows = positions.rows(f) if kept is None else positions.rows(f)[kept]
            targets = likelihood.targets(rows, labels)
            loss = -targets.total(likelihood.log_prob(rows, targets.y)) / max(1, len(rows))
        slopes = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
        with torch.no_grad():
            for p, v, g in zip(moving.values(), speed.values(), slopes, strict=True):
                p -= sgd.lr * v.mul_(sgd.momentum).add_(0 if g is None else g).add_(p, alpha=sgd.weight_decay)
        seen += len(f)
    if not seen:
        raise InputError("the training loader gave no example. It must yield batches (x, y), at least one.")
