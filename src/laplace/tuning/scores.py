"""Score a posterior's predictions on validation data: the smaller, the better.

The score is the mean negative log-likelihood of the predictive, or the user's loss or metric. With inputs from outside
the distribution, `ood_weight` times the mean entropy of the predictive there is subtracted:

    -mean over data of log p(y given x)  -  lambda  mean over outside inputs of H[p(y given x)]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace.checks import shown
from laplace.errors import InputError, OptionError
from laplace.likelihoods import Likelihood, Targets
from laplace.predictive.links import Link
from laplace.predictive.response import Outputs

Report = tuple[tuple[float, float, float, float], list[tuple[tuple[Tensor, ...], Tensor]]]
Predicted = tuple[Outputs, Tensor | None]  # distribution of the outputs, and the mean through the link if there is one


@dataclass(frozen=True)
class How:
    """Says how a prediction is made and scored. A `loss` of None means the predictive negative log-likelihood.

    `approximation` is what `link` names; None where outputs stand for themselves. `softmax_temperature` divides the
    logits.
    """

    pred_type: str
    link: str
    n_samples: int
    loss: Any = None
    ood_weight: float = 0.5
    approximation: Link | None = None
    softmax_temperature: float = 1.0

    def __post_init__(self) -> None:
        weight = self.ood_weight
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= 1:
            raise OptionError(f"ood_weight={shown(weight)} must be a number in (0, 1], as in ood_weight=0.5.")


class Tally:
    """Adds up the score of one posterior, batch by batch."""

    def __init__(self, how: How, likelihood: Likelihood) -> None:
        self.likelihood, self.weight = likelihood, how.ood_weight
        self.inside = _Mean() if how.loss is None else _loss(how.loss, likelihood)
        self.outside = _Mean()

    def add(self, prediction: Predicted, targets: Targets, sigma: Tensor) -> None:
        """Add a batch of validation data. The log-likelihood is weighted; a loss only leaves out weights of 0."""
        outputs, p = prediction
        if isinstance(self.inside, _Mean):
            nll = -self.likelihood.log_predictive(outputs, p, targets.y, sigma)
            self.inside.add(float(targets.total(nll)), float(targets.total(torch.ones_like(nll))))
            return
        arguments = _arguments(self.likelihood, prediction, targets.y, sigma)
        y = self.likelihood.observed(targets.y)
        if targets.weights is not None:
            counts = targets.weights > 0
            arguments, y = tuple(a[counts] for a in arguments), y[counts]
        if len(y):
            self.inside.add(arguments, y)

    def add_outside(self, prediction: Predicted, sigma: Tensor) -> None:
        """Add a batch of inputs from outside the distribution."""
        values = self.likelihood.entropy(*prediction, sigma)
        self.outside.add(float(values.sum()), len(values))

    def report(self) -> Report:
        """Return everything that was added, for other processes."""
        inside = self.inside.mean if isinstance(self.inside, _Loss) else self.inside
        seen = inside.seen if isinstance(inside, _Metric) else []
        sums = (0.0, 0.0) if isinstance(inside, _Metric) else (inside.total, inside.n)
        return (*sums, self.outside.total, self.outside.n), seen

    def take(self, reports: Sequence[Report]) -> Tally:
        """Replace this process's sums by the sums over all processes."""
        total, n, outside, m = (sum(column) for column in zip(*(sums for sums, _ in reports), strict=True))
        if isinstance(self.inside, _Metric):
            self.inside = _Metric(self.inside.metric)
            for arguments, y in (part for _, seen in reports for part in seen):
                self.inside.add(arguments, y)
        else:
            mean = self.inside.mean if isinstance(self.inside, _Loss) else self.inside
            mean.total, mean.n = total, n
        self.outside.total, self.outside.n = outside, m
        return self

    def value(self) -> float:
        """Return the score of everything that was added."""
        return self.inside.value() - (self.weight * self.outside.value() if self.outside.n else 0.0)


class _Mean:
    """Keeps a running mean."""

    def __init__(self) -> None:
        self.total, self.n = 0.0, 0.0

    def add(self, total: float, n: float) -> None:
        self.total, self.n = self.total + total, self.n + n

    def value(self) -> float:
        if not self.n:
            raise InputError("no example of the validation data counts: all are ignored, or have weight 0.")
        return self.total / self.n


class _Loss:
    """Averages a loss over the examples; `loss(prediction..., y)` returns the mean over its batch."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.loss, self.mean = loss, _Mean()

    def add(self, arguments: tuple[Tensor, ...], y: Tensor) -> None:
        try:
            value = float(self.loss(*arguments, y))
        except (TypeError, ValueError, RuntimeError) as error:
            form = "(probabilities, y)" if len(arguments) == 1 else "(mean, variance, y)"
            raise OptionError(
                f"loss must be a function of {form} that returns one number; it failed: {error}"
            ) from error
        self.mean.add(value * len(y), len(y))

    def value(self) -> float:
        return self.mean.value()


class _Metric:
    """Wraps a metric object with reset, update and compute, copied for each posterior. Larger may be better."""

    def __init__(self, metric: Any) -> None:
        self.metric = copy.deepcopy(metric)
        self.metric.reset()
        self.seen: list[tuple[tuple[Tensor, ...], Tensor]] = []  # metrics do not add: other processes need the values

    def add(self, arguments: tuple[Tensor, ...], y: Tensor) -> None:
        self.seen.append((arguments, y))
        self.metric.update(arguments[0], y)

    def value(self) -> float:
        value = float(self.metric.compute())
        return -value if getattr(self.metric, "higher_is_better", False) else value


def _loss(loss: Any, likelihood: Likelihood) -> _Loss | _Metric:
    if all(hasattr(loss, name) for name in ("reset", "update", "compute")):
        if not likelihood.links:
            raise OptionError(
                "a metric object sees only the mean, which does not depend on the prior. For regression give loss= a "
                "function of (mean, variance, y), or leave loss= out."
            )
        return _Metric(loss)
    if not callable(loss):
        raise OptionError(f"loss={loss!r} is neither callable nor a metric with reset, update and compute.")
    return _Loss(loss)


def _arguments(likelihood: Likelihood, prediction: Predicted, y: Tensor, sigma: Tensor) -> tuple[Tensor, ...]:
    """Return the arguments of a loss before y: (probabilities,), or (mean, variance) with the noise included."""
    outputs, p = prediction
    if p is not None:
        return (p,)
    distribution = likelihood.distribution_at(outputs, p, y, sigma)
    return distribution.mean, distribution.variance
