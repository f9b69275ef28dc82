"""Score selective prediction: answer the examples that the model is sure of, and refer the others.

The coverage is the share of examples that are answered, the risk their mean loss. Examples are answered in the order of
their uncertainty, lowest first. Where uncertainties tie, every order is as good as another, and the risk is its mean
over them, so that nothing depends on the order of the examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.errors import InputError
from laplace.evaluation.arrays import Values, classified, real_of, scores_of, tensor_of


@dataclass(frozen=True)
class RiskCoverage:
    """Holds the risk among the k most certain of N examples, for every k. Made by `risk_coverage`.

    Attributes:
        coverage: k / N for k = 1..N, the share of examples answered, (N,).
        risk: Mean loss of the k most certain examples, (N,).
        threshold: Uncertainty of the k-th most certain example; answer what does not exceed it, (N,).
        best_risk: The risk if examples were ordered by their loss, the lowest that any order can have, (N,).
    """

    coverage: Tensor
    risk: Tensor
    threshold: Tensor
    best_risk: Tensor

    @property
    def aurc(self) -> float:
        """Return the area under the risk-coverage curve, mean_k risk[k] (Geifman and El-Yaniv, 2017)."""
        return self.risk.mean().item()

    @property
    def excess_aurc(self) -> float:
        """Return the area above that of the best order, mean_k (risk[k] - best_risk[k]) (Geifman et al., 2019)."""
        return (self.risk - self.best_risk).mean().item()

    def risk_at(self, coverage: float) -> float:
        """Return the risk when at least this share of the examples is answered.

        Args:
            coverage: A share above 0 and up to 1.

        Raises:
            InputError: the share is not in this range.
        """
        return self.risk[_answered(coverage, len(self.risk)) - 1].item()


def risk_coverage(
    loss: Values,  # (N,)
    uncertainty: Values,  # (N,)
) -> RiskCoverage:
    """Return the curve of mean loss against the share of examples answered, the most certain first.

        risk_coverage(prediction.label != y, prediction.epistemic).aurc

    Costs two sorts.

    Args:
        loss: Loss of each example, (N,): whether the label is wrong (True or False), a squared error, an NLL.
        uncertainty: Score of each example, (N,). Higher means less certain.

    Returns:
        A `RiskCoverage`.

    Raises:
        InputError: lengths differ, there is no example, or values are NaN.
    """
    losses, doubt = _lost(loss, uncertainty)
    order = doubt.argsort(stable=True)
    ranked = doubt[order]
    _, group, count = torch.unique_consecutive(ranked, return_inverse=True, return_counts=True)
    mean = torch.zeros(len(count), dtype=losses.dtype, device=losses.device).index_add_(0, group, losses[order]) / count
    answered = torch.arange(1, len(losses) + 1, dtype=losses.dtype, device=losses.device)
    return RiskCoverage(
        coverage=answered / len(losses),
        risk=mean[group].cumsum(0) / answered,
        threshold=ranked,
        best_risk=losses.sort().values.cumsum(0) / answered,
    )


def aurc(
    loss: Values,  # (N,)
    uncertainty: Values,  # (N,)
) -> float:
    """Return the area under the risk-coverage curve: the mean of the risk over all shares of examples answered.

    Args:
        loss: Loss of each example, (N,).
        uncertainty: Score of each example, (N,). Higher means less certain.

    Returns:
        A number in units of the loss; smaller is better. An uncertainty that knows nothing scores the mean loss.

    Raises:
        InputError: lengths differ, there is no example, or values are NaN.
    """
    return risk_coverage(loss, uncertainty).aurc


def excess_aurc(
    loss: Values,  # (N,)
    uncertainty: Values,  # (N,)
) -> float:
    """Return the area under the risk-coverage curve above that of the best order, which sorts examples by their loss.

    It takes out most of what the accuracy contributes, so that uncertainties of different models can be compared.

    Args:
        loss: Loss of each example, (N,).
        uncertainty: Score of each example, (N,). Higher means less certain.

    Returns:
        A number from 0 up in units of the loss; smaller is better, 0 is perfect.

    Raises:
        InputError: lengths differ, there is no example, or values are NaN.
    """
    return risk_coverage(loss, uncertainty).excess_aurc


def selective_accuracy(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
    coverage: float,
    uncertainty: Values | None = None,  # (N,)
) -> float:
    """Return the accuracy on the most certain share of the examples: 1 - risk at this coverage, with the 0-1 loss.

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).
        coverage: Share of examples to answer, above 0 and up to 1; rounded up to whole examples.
        uncertainty: Score of each example, (N,). Higher means less certain. One minus the top probability by default.

    Returns:
        A number between 0 and 1; larger is better.

    Raises:
        InputError: rows of `probs` are not probabilities, labels do not match, values are NaN, or the share is not
            above 0 and up to 1.
    """
    probs, y = classified(probs, y)
    top, label = probs.max(-1)
    return 1 - risk_coverage(label != y, 1 - top if uncertainty is None else uncertainty).risk_at(coverage)


def _lost(loss: Values, uncertainty: Values) -> tuple[Tensor, Tensor]:
    losses = scores_of(tensor_of(loss, "loss") * 1, "loss")  # booleans count as 0 and 1
    doubt = scores_of(uncertainty, "uncertainty")
    if len(losses) != len(doubt):
        raise InputError(
            f"loss has {len(losses)} examples, uncertainty {len(doubt)}; one of each per example is needed."
        )
    return real_of(losses, "loss"), doubt.to(losses.device)


def _answered(coverage: float, n: int) -> int:
    """Return how many examples a share of them is, rounded up."""
    share = real_of(coverage, "coverage")
    if share.dim() or not 0 < share.item() <= 1:
        raise InputError(f"coverage={coverage!r} must be one number above 0 and up to 1, as in 0.8.")
    return max(math.ceil(share.item() * n - 1e-9), 1)  # .8 * 10 may be rounded to above 8
