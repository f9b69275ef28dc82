"""Provide laplace-torch's function of SWAG variances."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from laplace.compat.masks import LargestVarianceSWAGSubnetMask

__all__ = ["fit_diagonal_swag_var"]


def fit_diagonal_swag_var(
    model: nn.Module,
    train_loader: Iterable[Any],
    criterion: nn.Module,
    n_snapshots_total: int = 40,
    snapshot_freq: int = 1,
    lr: float = 0.01,
    min_var: float = 1e-30,
) -> Tensor:  # (P,)
    """Return the variance of each weight over iterates of SGD with momentum 0.9; the network is not changed.

    Args:
        model: the trained network.
        train_loader: batches.
        criterion: nn.MSELoss() for regression, nn.CrossEntropyLoss() for classification.
        n_snapshots_total: number of iterates.
        snapshot_freq: epochs between two of them.
        lr: learning rate.
        min_var: the smallest variance.
    """
    likelihood = "regression" if isinstance(criterion, nn.MSELoss) else "classification"
    mask = LargestVarianceSWAGSubnetMask(model, 1, likelihood, n_snapshots_total, snapshot_freq, lr)
    return mask.scores(train_loader).clamp(min=min_var)
