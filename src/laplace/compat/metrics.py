"""Provide laplace-torch's running scores: `RunningNLLMetric`, `get_nll`, and `validate`, which applies one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laplace.errors import InputError
from laplace.laplace import Laplace

__all__ = ["RunningNLLMetric", "get_nll", "validate"]


class RunningNLLMetric(nn.Module):
    """Averages -log p(y) of classes over batches. Has the methods of a torchmetrics metric, and needs no torchmetrics.

    Args:
        ignore_index: the label of positions that do not count.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self.nll_sum, self.n_valid_labels = torch.zeros(()), torch.zeros(())

    def update(self, probs: Tensor, targets: Tensor) -> None:
        """Take in a batch.

        Args:
            probs: probabilities, (..., C).
            targets: classes, (...).
        """
        probs, targets = probs.detach().flatten(0, -2), targets.flatten()
        total = F.nll_loss(probs.log(), targets, ignore_index=self.ignore_index, reduction="sum")
        self.nll_sum = self.nll_sum.to(total) + total
        self.n_valid_labels = self.n_valid_labels.to(total) + (targets != self.ignore_index).sum()

    def compute(self) -> Tensor:
        """Return the average so far."""
        return self.nll_sum / self.n_valid_labels

    def forward(self, probs: Tensor, targets: Tensor) -> Tensor:
        """Take in a batch, and return its own average.

        Args:
            probs: probabilities, (..., C).
            targets: classes, (...).
        """
        self.update(probs, targets)
        return F.nll_loss(probs.flatten(0, -2).log(), targets.flatten(), ignore_index=self.ignore_index)


def get_nll(out_dist: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of -log p(y).

    Args:
        out_dist: probabilities, (N, C).
        targets: classes, (N,).
    """
    return F.nll_loss(out_dist.log(), targets)


@torch.no_grad()
def validate(
    laplace: Laplace,
    val_loader: Iterable[Any],
    loss: Callable[..., Any],
    pred_type: str = "glm",
    link_approx: str = "probit",
    n_samples: int = 100,
    dict_key_y: str = "labels",
) -> float:
    """Return a score of the predictions for some data.

    Args:
        laplace: a fitted posterior.
        val_loader: batches.
        loss: a metric with `update` and `compute`, which is reset first; or a function (prediction, labels), whose
            values are averaged over examples; of a regression with a variance, (mean, variance, labels).
        pred_type: 'glm' or 'nn'.
        link_approx: how probabilities are computed.
        n_samples: number of draws, where there are any.
        dict_key_y: of batches that are mappings, the key of the labels.

    Raises:
        InputError: there is no batch.
    """
    running = all(hasattr(loss, name) for name in ("update", "compute"))
    if running and hasattr(loss, "reset"):
        loss.reset()  # pyright: ignore[reportFunctionMemberAccess]
    total, count = 0.0, 0
    for batch in val_loader:
        x, y = (batch, batch[dict_key_y]) if not isinstance(batch, (tuple, list)) else batch
        out = laplace(x, pred_type=pred_type, link_approx=link_approx, n_samples=n_samples)
        y = y.to(out[0].device)
        if running:
            _update(loss, out, y)
        else:
            value = loss(*out, y) if isinstance(out, tuple) else loss(out, y)
            total, count = total + float(value) * len(y), count + len(y)
    if running:
        return float(loss.compute())  # pyright: ignore[reportFunctionMemberAccess]
    if not count:
        raise InputError("val_loader has no batch; give at least one.")
    return total / count


def _update(loss: Any, out: Any, y: Tensor) -> None:
    """Give a metric what it takes: (mean, variance, labels), or (prediction, labels)."""
    if not isinstance(out, tuple):
        loss.update(out, y)
        return
    try:
        loss.update(*out, y)
    except TypeError:
        loss.update(out[0], y)
