"""Calibration of classifiers: whether examples predicted with probability p come true in a share p of cases.

Bins are closed above, (edges[b], edges[b + 1]], as in scikit-learn's `calibration_curve`. torchmetrics closes them
below and keeps a bin for probabilities of exactly 1, so that its figures differ where probabilities lie on an edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laplace.checks import flag
from laplace.evaluation.arrays import Values, bins_of, classified

DEFAULT_BINS = 15


def ece(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
    n_bins: int = DEFAULT_BINS,
) -> float:
    """Return the expected calibration error over equal-width bins of the top probability; see `Reliability.ece`.

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).
        n_bins: How many bins.

    Returns:
        A number between 0 and 1; smaller is better.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    return reliability(probs, y, n_bins).ece


def adaptive_ece(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
    n_bins: int = DEFAULT_BINS,
) -> float:
    """Return the expected calibration error over bins that hold equally many examples; see `Reliability.ece`.

    A good classifier is sure of most examples, and equal-width bins put nearly all of them into the last one.

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).
        n_bins: How many bins.

    Returns:
        A number between 0 and 1; smaller is better.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    return reliability(probs, y, n_bins, adaptive=True).ece


def classwise_ece(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
    n_bins: int = DEFAULT_BINS,
) -> float:
    """Return the expected calibration error of each class's probability, averaged over the classes.

    1/C sum_c sum_b count[b, c] / N * abs(share of class c in the bin - mean p[:, c] in the bin), over equal-width bins
    of p[:, c]. It sees all probabilities, not only the top ones. With many classes it is small, because most
    probabilities are close to zero and right.

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).
        n_bins: How many bins.

    Returns:
        A number between 0 and 1; smaller is better.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    n_bins = bins_of(n_bins)
    probs, y = classified(probs, y)
    is_class = torch.nn.functional.one_hot(y, probs.shape[1]).to(probs)
    return columns_ece(probs, is_class, n_bins).mean().item()


def mce(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
    n_bins: int = DEFAULT_BINS,
) -> float:
    """Return the maximum calibration error over equal-width bins of the top probability; see `Reliability.mce`.

    A bin of one example may decide it, so it is noisy where bins hold few.

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).
        n_bins: How many bins.

    Returns:
        A number between 0 and 1; smaller is better.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    return reliability(probs, y, n_bins).mce


@dataclass(frozen=True)
class Reliability:
    """Holds accuracy by confidence: how often the predicted class was right, in bins. Made by `reliability`.

    Bin b holds the examples whose top probability lies in (edges[b], edges[b + 1]]. An empty bin has `nan` as mean
    confidence and as accuracy, and does not count.

    Attributes:
        edges: Edges of the bins, (B + 1,).
        confidence: Mean top probability in each bin, (B,).
        accuracy: Share of correct predictions in each bin, (B,).
        count: Number of examples in each bin, (B,).
    """

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    @property
    def ece(self) -> float:
        """Return the expected calibration error: sum_b count[b] / N * abs(accuracy[b] - confidence[b])."""
        share = self.count.double() / self.count.sum()
        return (share * self._gap).sum().item()

    @property
    def mce(self) -> float:
        """Return the maximum calibration error: max_b abs(accuracy[b] - confidence[b])."""
        return self._gap.max().item()

    @property
    def _gap(self) -> Tensor:
        return (self.accuracy - self.confidence).abs().nan_to_num(0.0)


def reliability(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
    n_bins: int = DEFAULT_BINS,
    adaptive: bool = False,
) -> Reliability:
    """Sort the examples into `n_bins` bins of their top probability.

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).
        n_bins: How many bins.
        adaptive: Whether the bins hold equally many examples, with quantiles as edges, instead of being equally wide.
            Equal probabilities stay in one bin, so that some may be empty.

    Returns:
        A `Reliability` with mean confidence, accuracy and number of examples in each bin.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    n_bins, adaptive = bins_of(n_bins), flag(adaptive, "adaptive")
    probs, y = classified(probs, y)
    top, label = probs.max(-1)
    return binned(top, label == y, n_bins, adaptive)


def binned(
    confidence: Tensor,  # (N,)
    correct: Tensor,  # (N,)
    n_bins: int = DEFAULT_BINS,
    adaptive: bool = False,
) -> Reliability:
    """Sort predictions into bins of their confidence, given whether each was right."""
    top = confidence.double()
    edges = torch.linspace(0, 1, n_bins + 1, dtype=torch.float64, device=top.device)
    if adaptive:
        edges = torch.from_numpy(np.quantile(top.cpu().numpy(), edges.cpu().numpy())).to(top.device)
    # Only the inner edges: a top probability that rounding has moved above 1 still falls into the last bin.
    index = torch.bucketize(top, edges[1:-1])
    count = torch.bincount(index, minlength=n_bins)
    return Reliability(
        edges=edges,
        confidence=torch.bincount(index, top, minlength=n_bins) / count,
        accuracy=torch.bincount(index, correct.double(), minlength=n_bins) / count,
        count=count,
    )


def columns_ece(
    probs: Tensor,  # (N, C)
    happened: Tensor,  # (N, C) 0 or 1
    n_bins: int,
) -> Tensor:  # (C,)
    """Return the expected calibration error of each column, over equal-width bins of its probabilities."""
    n, c = probs.shape
    inner = torch.linspace(0, 1, n_bins + 1, dtype=probs.dtype, device=probs.device)[1:-1]
    index = torch.bucketize(probs.contiguous(), inner) + n_bins * torch.arange(c, device=probs.device)
    gap = torch.bincount(index.flatten(), (probs - happened).flatten(), minlength=n_bins * c)
    return gap.abs().reshape(c, n_bins).sum(1) / n
