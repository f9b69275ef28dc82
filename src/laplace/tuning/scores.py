"""What a posterior's predictions on validation data are worth: the smaller, the better.

The score is the mean negative log-likelihood of the predictive, or a loss or metric of one's own; with inputs from
outside the distribution, minus `ood_weight` times the mean entropy of the predictive there:

    -mean over data of log p(y given x)  -  lambda  mean over outside inputs of H[p(y given x)]
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from laplace.errors import OptionError, shown
from laplace.likelihoods import Likelihood
from laplace.predictive.entropy import entropy

Predicted = tuple[Tensor, Tensor | None]  # probabilities, or mean and (co)variance of f


@dataclass(frozen=True)
class How:
    """How a prediction is made and scored: `loss` is None for the predictive negative log-likelihood."""

    pred_type: str
    link: str
    n_samples: int
    loss: Any = None
    ood_weight: float = 0.5

    def __post_init__(self) -> None:
        weight = self.ood_weight
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= 1:
            raise OptionError(f"ood_weight={shown(weight)} must be a number in (0, 1], as in ood_weight=0.5.")


class Tally:
    """The score of one posterior, added up batch by batch."""

    def __init__(self, how: How, likelihood: Likelihood) -> None:
        self.inside, self.weight = _loss(how.loss, likelihood), how.ood_weight
        self.outside = _Mean(_mean_entropy)

    def add(self, prediction: Predicted, y: Tensor, sigma: Tensor) -> None:
        """A batch of the validation data."""
        self.inside.add(_arguments(prediction, sigma), y)

    def add_outside(self, prediction: Predicted, sigma: Tensor) -> None:
        """A batch of inputs from outside the distribution."""
        self.outside.add(_arguments(prediction, sigma))

    def value(self) -> float:
        """The score of all that was added."""
        return self.inside.value() - (self.weight * self.outside.value() if self.outside.n else 0.0)


class _Mean:
    """A loss averaged over the examples; `loss(prediction..., y)` is the mean over its batch."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.loss, self.total, self.n = loss, 0.0, 0

    def add(self, arguments: tuple[Tensor, ...], *y: Tensor) -> None:
        try:
            value = float(self.loss(*arguments, *y))
        except (TypeError, ValueError, RuntimeError) as error:
            form = "(probabilities, y)" if len(arguments) == 1 else "(mean, variance, y)"
            raise OptionError(
                f"loss must be a function of {form} that returns one number; it failed: {error}"
            ) from error
        self.total += value * len(arguments[0])
        self.n += len(arguments[0])

    def value(self) -> float:
        return self.total / self.n


class _Metric:
    """A metric object with reset, update and compute: an own copy for each posterior."""

    def __init__(self, metric: Any) -> None:
        self.metric = copy.deepcopy(metric)
        self.metric.reset()

    def add(self, arguments: tuple[Tensor, ...], y: Tensor) -> None:
        self.metric.update(arguments[0], y)

    def value(self) -> float:
        return float(self.metric.compute())


def _loss(loss: Any, likelihood: Likelihood) -> _Mean | _Metric:
    if loss is None:
        return _Mean(_gaussian_nll if likelihood.has_noise else _categorical_nll)
    if all(hasattr(loss, name) for name in ("reset", "update", "compute")):
        if likelihood.has_noise:
            raise OptionError(
                "a metric object sees the mean alone, which does not depend on the prior. For regression give loss= a "
                "function of (mean, variance, y), or leave it out."
            )
        return _Metric(loss)
    if not callable(loss):
        raise OptionError(f"loss={loss!r} is neither callable nor a metric with reset, update and compute.")
    return _Mean(loss)


def _arguments(prediction: Predicted, sigma: Tensor) -> tuple[Tensor, ...]:
    """What a loss gets before y: (probabilities,), or (mean, variance) with the noise included."""
    mean, spread = prediction
    if spread is None:
        return (mean,)
    noise = sigma.to(mean).square()
    if spread.dim() == 3:
        noise = noise * torch.eye(mean.shape[1], dtype=mean.dtype, device=mean.device)
    return mean, spread + noise


def _categorical_nll(p: Tensor, y: Tensor) -> Tensor:
    return -p.clamp(min=torch.finfo(p.dtype).tiny).log().gather(1, y.unsqueeze(1)).mean()


def _gaussian_nll(mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    """Of independent normals for variances (N, C), of a multivariate normal for covariances (N, C, C)."""
    if spread.dim() == 3:
        return -MultivariateNormal(mean, (spread + spread.mT) / 2).log_prob(y).mean()  # float32 leaves it skewed
    return -Normal(mean, spread.sqrt()).log_prob(y).sum(-1).mean()


def _mean_entropy(mean: Tensor, spread: Tensor | None = None) -> Tensor:
    """Of class probabilities, or of normals with these (co)variances."""
    if spread is None:
        return entropy(mean).mean()
    logdet = torch.logdet(spread) if spread.dim() == 3 else spread.log().sum(-1)
    return 0.5 * (logdet + mean.shape[1] * math.log(2 * math.pi * math.e)).mean()
