"""Select the weights that move most when training continues.

SWAG's diagonal (Maddox et al. 2019): the variance of the iterates of SGD with a constant learning rate, started at the
trained weights. SGD runs on a copy of the weights; the network itself is never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from laplace.checks import one_positive, whole_number
from laplace.compat.masks.base import ScoreMask
from laplace.errors import InputError, NumericalError, within
from laplace.likelihoods import Likelihood, likelihood_named
from laplace.network.batches import Keys, training_batches
from laplace.network.replica import replicate
from laplace.weights.selection import trainable_of

_MOMENTUM = 0.9


class LargestVarianceSWAGSubnetMask(ScoreMask):
    """Selects the weights with the largest variance over `swag_n_snapshots` iterates of SGD.

    The network runs in eval mode and draws no random numbers. The order of the data is the loader's.

    Args:
        model: The trained network.
        n_params_subnet: How many weights to select.
        likelihood: A likelihood object or name, as in `Laplace`.
        swag_n_snapshots: How many iterates the variance is taken over.
        swag_snapshot_freq: How many epochs lie between two iterates.
        swag_lr: The learning rate of SGD.
    """

    def __init__(
        self,
        model: nn.Module,
        n_params_subnet: int,
        likelihood: Likelihood | str = "classification",
        swag_n_snapshots: int = 40,
        swag_snapshot_freq: int = 1,
        swag_lr: float = 0.01,
    ) -> None:
        super().__init__(model, n_params_subnet)
        self.likelihood = likelihood_named(likelihood)
        self.n_snapshots = whole_number(swag_n_snapshots, "swag_n_snapshots", 2)
        self.epochs = whole_number(swag_snapshot_freq, "swag_snapshot_freq")
        self.lr = one_positive(swag_lr, "swag_lr")

    def scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        if train_loader is None or isinstance(train_loader, Iterator):
            raise InputError(
                "SWAG runs over the training data many times: write select(train_loader) with a DataLoader or a list "
                f"of batches; a {type(train_loader).__name__} came."
            )
        moving = {name: p.detach().clone().requires_grad_() for name, p in trainable_of(self.model)}
        speed = {name: torch.zeros_like(p) for name, p in moving.items()}
        start = _flat(moving)
        total, squares = torch.zeros_like(start), torch.zeros_like(start)
        for _ in range(self.n_snapshots):
            for _ in range(self.epochs):
                self._epoch(moving, speed, train_loader)
            moved = _flat(moving) - start  # small numbers, whose squares do not cancel
            total, squares = total + moved, squares + moved.square()
        variance = squares / self.n_snapshots - (total / self.n_snapshots).square()
        if not variance.isfinite().all():
            raise NumericalError(f"SGD diverged with swag_lr={self.lr:g}. Take a smaller one.")
        return variance

    def _epoch(self, moving: dict[str, Tensor], speed: dict[str, Tensor], loader: Iterable[Any]) -> None:
        """Run one epoch of SGD with momentum, in place."""
        network, seen = replicate(self.model), 0
        keys = Keys(further=self.likelihood.further, pairs=self.likelihood.pairs)
        for batch in training_batches(loader, self.model, keys, False, "swag"):
            with torch.enable_grad(), within(f"batch {batch.index}"):
                f = batch.inputs.normal_tensors().call_with(network, moving)
                targets = self.likelihood.targets(f, batch)
                loss = -targets.total(self.likelihood.log_prob(f, targets.y)) / len(f)
            slopes = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
            with torch.no_grad():
                for p, v, g in zip(moving.values(), speed.values(), slopes, strict=True):
                    p -= self.lr * v.mul_(_MOMENTUM).add_(0 if g is None else g)
            seen += len(f)
        if not seen:
            raise InputError("the training loader gave no example. It must yield batches (x, y), at least one.")


def _flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in weights.values()])
