"""Scores of labels that are each 0 or 1: p[n, c] is the probability of a 1, and labels do not exclude each other.

For binary and multi-label models. The scores average over examples and labels, as scikit-learn's do over a flat vector.
"""

from __future__ import annotations

from torch import Tensor

from laplace.errors import InputError
from laplace.evaluation.arrays import Values, bins_of, real_of, same_shape, tensor_of
from laplace.evaluation.calibration import DEFAULT_BINS, columns_ece


def binary_accuracy(
    probs: Values,  # (N,) or (N, C)
    y: Values,  # like probs
) -> float:
    """Return the share of labels that are predicted right: mean [(p > 1/2) = y].

    Args:
        probs: Probabilities of a 1, (N,) or (N, C).
        y: Labels 0 or 1, of the same shape.

    Returns:
        A number between 0 and 1.

    Raises:
        InputError: values are not probabilities, labels are not 0 or 1, or the shapes differ.
    """
    probs, y = _labelled(probs, y)
    return ((probs > 0.5) == (y > 0)).double().mean().item()


def binary_nll(
    probs: Values,  # (N,) or (N, C)
    y: Values,  # like probs
) -> float:
    """Return the negative log-likelihood per label, in nats: -mean [y log p + (1 - y) log(1 - p)].

    Infinite if a label that came was given probability zero.

    Args:
        probs: Probabilities of a 1, (N,) or (N, C).
        y: Labels 0 or 1, of the same shape.

    Returns:
        A number from 0 to infinity; smaller is better.

    Raises:
        InputError: values are not probabilities, labels are not 0 or 1, or the shapes differ.
    """
    probs, y = _labelled(probs, y)
    return -(y * probs + (1 - y) * (1 - probs)).log().mean().item()


def binary_brier(
    probs: Values,  # (N,) or (N, C)
    y: Values,  # like probs
) -> float:
    """Return the Brier score per label: mean (p - y)^2. `brier` of the two classes 0 and 1 is twice as large.

    Args:
        probs: Probabilities of a 1, (N,) or (N, C).
        y: Labels 0 or 1, of the same shape.

    Returns:
        A number between 0 and 1; smaller is better.

    Raises:
        InputError: values are not probabilities, labels are not 0 or 1, or the shapes differ.
    """
    probs, y = _labelled(probs, y)
    return (probs - y).square().mean().item()


def binary_ece(
    probs: Values,  # (N,) or (N, C)
    y: Values,  # like probs
    n_bins: int = DEFAULT_BINS,
) -> float:
    """Return the expected calibration error of the probability of a 1, averaged over the labels.

    sum_b count[b] / N * abs(share of ones in the bin - mean p in the bin), over equal-width bins of p, for each label.

    Args:
        probs: Probabilities of a 1, (N,) or (N, C).
        y: Labels 0 or 1, of the same shape.
        n_bins: How many bins.

    Returns:
        A number between 0 and 1; smaller is better.

    Raises:
        InputError: values are not probabilities, labels are not 0 or 1, or the shapes differ.
    """
    n_bins = bins_of(n_bins)
    probs, y = _labelled(probs, y)
    return columns_ece(probs.reshape(len(probs), -1), y.reshape(len(y), -1), n_bins).mean().item()


def _labelled(probs: Values, y: Values) -> list[Tensor]:
    p, y = same_shape(probs=real_of(probs, "probs"), y=real_of(tensor_of(y, "y") * 1, "y"))  # booleans count as 0 and 1
    if not ((p >= 0) & (p <= 1)).all():
        raise InputError(
            f"probs must lie between 0 and 1, got {p.min().item():.3g}..{p.max().item():.3g}. For logits, write "
            "torch.sigmoid(logits)."
        )
    if not ((y == 0) | (y == 1)).all():
        raise InputError(f"labels must be 0 or 1, got {y.min().item():.3g}..{y.max().item():.3g}.")
    return [p, y]
