"""Score how well examples from outside the training distribution are detected. **A higher score means outside.**

The score is an uncertainty: `prediction.epistemic`, `prediction.entropy`, or `1 - probs.amax(-1)`. The examples from
outside are the positive class everywhere, as for scikit-learn and torchmetrics with target 1 for them. To make those
from inside the positive class, swap and negate: `fpr95(-scores_out, -scores_in)`. Each score costs two sorts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace.errors import InputError
from laplace.evaluation.arrays import Values, scores_of, share_of


def auroc(
    scores_in: Values,  # (N,)
    scores_out: Values,  # (M,)
) -> float:
    """Return the area under the ROC curve of a score that separates outside from inside. Higher means outside.

    The area is the probability that a random example from outside scores higher than a random one from inside, with
    ties counting half: mean_{n,m} [out[m] > in[n]] + 1/2 [out[m] = in[n]]. If a score is high inside, such as the top
    probability, pass its negative.

    Args:
        scores_in: Uncertainties of examples from inside, (N,).
        scores_out: Uncertainties of examples from outside, (M,).

    Returns:
        A number between 0 and 1; 0.5 is guessing, 1 is perfect, below 0.5 the score is the wrong way round.

    Raises:
        InputError: scores are empty, not a vector, or NaN.
    """
    inside, outside = _both(scores_in, scores_out)
    inside = inside.sort().values
    below = torch.searchsorted(inside, outside, side="left")
    not_above = torch.searchsorted(inside, outside, side="right")
    return ((below + not_above).double().mean() / (2 * len(inside))).item()


def aupr(
    scores_in: Values,  # (N,)
    scores_out: Values,  # (M,)
) -> float:
    """Return the area under the precision-recall curve; outside is the positive class. Higher means outside.

    It is scikit-learn's average precision: sum_k (recall[k] - recall[k - 1]) precision[k] over the thresholds, ties in
    one step. Guessing scores M / (N + M), so compare it only between sets of the same sizes.

    Args:
        scores_in: Uncertainties of examples from inside, (N,).
        scores_out: Uncertainties of examples from outside, (M,).

    Returns:
        A number between 0 and 1; larger is better.

    Raises:
        InputError: scores are empty, not a vector, or NaN.
    """
    flagged_in, flagged_out = _flagged(*_both(scores_in, scores_out))
    precision = flagged_out / (flagged_in + flagged_out)
    return (flagged_out.diff(prepend=flagged_out.new_zeros(1)) / flagged_out[-1] * precision).sum().item()


def fpr_at_tpr(
    scores_in: Values,  # (N,)
    scores_out: Values,  # (M,)
    tpr: float = 0.95,
) -> float:
    """Return the share of examples from inside that are flagged by the threshold that catches `tpr` of those outside.

    The threshold is the highest that catches at least `tpr` of the examples from outside: min {share of in >= t : share
    of out >= t is at least `tpr`}.

    Args:
        scores_in: Uncertainties of examples from inside, (N,).
        scores_out: Uncertainties of examples from outside, (M,).
        tpr: Share of the examples from outside to catch, between 0 and 1.

    Returns:
        A number between 0 and 1; smaller is better.

    Raises:
        InputError: scores are empty, not a vector, or NaN, or `tpr` is not between 0 and 1.
    """
    share = share_of(tpr, "tpr")
    if share.dim():
        raise InputError(f"tpr has shape {tuple(share.shape)}; one number between 0 and 1 is needed.")
    inside, outside = _both(scores_in, scores_out)
    caught = max(math.ceil(share.item() * len(outside) - 1e-9), 1)  # .95 * 20 is rounded, and may lie above 19
    threshold = outside.sort(descending=True).values[caught - 1]
    return (inside >= threshold).double().mean().item()


def fpr95(
    scores_in: Values,  # (N,)
    scores_out: Values,  # (M,)
) -> float:
    """Return the share of inside examples flagged when 95 % of outside ones are caught. Higher means outside.

    The same as `fpr_at_tpr` at 0.95. Some papers make inside the positive class, and count the examples from outside
    that pass when 95 % of those from inside do: `fpr95(-scores_out, -scores_in)`.

    Args:
        scores_in: Uncertainties of examples from inside, (N,).
        scores_out: Uncertainties of examples from outside, (M,).

    Returns:
        A number between 0 and 1; smaller is better.

    Raises:
        InputError: scores are empty, not a vector, or NaN.
    """
    return fpr_at_tpr(scores_in, scores_out)


def _both(scores_in: Values, scores_out: Values) -> tuple[Tensor, Tensor]:
    inside, outside = scores_of(scores_in, "scores_in"), scores_of(scores_out, "scores_out")
    return inside, outside.to(inside.device)


def _flagged(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:  # (T,), (T,)
    """Return how many of each are flagged by every threshold, from the highest score down."""
    thresholds = torch.cat([inside, outside]).unique().flip(0)
    return tuple(  # type: ignore[return-value]
        (len(kind) - torch.searchsorted(kind.sort().values, thresholds)).double() for kind in (inside, outside)
    )
