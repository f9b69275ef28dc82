"""Provide laplace-torch's function of SWAG variances."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import Tensor, nn

from laplace.likelihoods import likelihood_named
from laplace.network.inputs import Keys
from laplace.rivals.iterates import SGD, Moments, iterates

__all__ = ["fit_diagonal_swag_var"]


def fit_diagonal_swag_var(
    model: nn.Module,
    train_loader: Iterable[Any],
    criterion: nn.Module,
    n_snapshots_total: int = 40,
    snapshot_freq: int = 1,
    lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 3e-4,
    min_var: float = 1e-30,
) -> Tensor:  # (P,)
    """Return the variance of each weight over iterates of SGD with momentum; the network is not changed.

    Args:
        model: the trained network.
        train_loader: batches.
        criterion: nn.MSELoss() for regression, nn.CrossEntropyLoss() for classification.
        n_snapshots_total: number of iterates.
        snapshot_freq: epochs between two of them.
        lr: learning rate.
        momentum: how much of the last step is added to the next.
        weight_decay: what the weights are multiplied by in the gradient.
        min_var: the smallest variance.
    """
    likelihood = likelihood_named("regression" if isinstance(criterion, nn.MSELoss) else "classification")
    sgd, moments = SGD(lr, momentum, weight_decay), Moments()
    for vector in islice(iterates(model, likelihood, train_loader, Keys(), snapshot_freq, sgd), n_snapshots_total):
        moments.add(vector)
    return moments.variance.clamp(min=min_var)
