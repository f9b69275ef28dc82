"""Scores of classifiers: probabilities p[n, c], not logits, against integer labels y[n].

The order of the arguments is torchmetrics', prediction first. Every score is a Python number computed in float64.
Arguments may be tensors, numpy arrays or lists. A score costs one pass over its arguments.
"""

from __future__ import annotations

from torch import Tensor

from laplace.evaluation.arrays import Values, classified, probabilities


def accuracy(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
) -> float:
    """Return the share of examples whose most probable class is the true one: mean_n [argmax_c p[n, c] = y[n]].

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).

    Returns:
        A number between 0 and 1.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    probs, y = classified(probs, y)
    return (probs.argmax(-1) == y).double().mean().item()


def nll(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
) -> float:
    """Return the negative log-likelihood per example, in nats: -mean_n log p[n, y[n]].

    Infinite if a true class was given probability zero: the prediction ruled out what happened.

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).

    Returns:
        A number from 0 to infinity; smaller is better.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    probs, y = classified(probs, y)
    return -_of_true_class(probs, y).log().mean().item()


def brier(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
) -> float:
    """Return the Brier score: mean_n sum_c (p[n, c] - [c = y[n]])^2.

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).

    Returns:
        A number between 0 and 2; smaller is better.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    probs, y = classified(probs, y)
    return (probs.square().sum(-1) - 2 * _of_true_class(probs, y) + 1).mean().item()


def confidence(
    probs: Values,  # (N, C)
) -> float:
    """Return the mean probability of the most probable class: mean_n max_c p[n, c]. It needs no labels.

    Args:
        probs: Probabilities, (N, C).

    Returns:
        A number between 1/C and 1.

    Raises:
        InputError: `probs` does not have the shape (N, C), or its rows are not probabilities.
    """
    return probabilities(probs).amax(-1).mean().item()


def _of_true_class(probs: Tensor, y: Tensor) -> Tensor:
    return probs.gather(-1, y.unsqueeze(-1)).squeeze(-1)
