"""Prior precision by validation: the network runs once on each batch, and the whole grid is scored from that run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from laplace.backprop.gradients import Forward
from laplace.draws import Draws, normals
from laplace.errors import BoundaryWarning, InputError, NumericalError, OptionError, warn
from laplace.likelihoods import Likelihood
from laplace.posterior import Posterior
from laplace.predictive.predict import probabilities


@dataclass(frozen=True)
class How:
    """How a prediction is made and scored: `loss` is None for the predictive negative log-likelihood."""

    pred_type: str
    link: str
    n_samples: int
    loss: Any = None


def log_grid(low: float, high: float, size: int, base: float) -> Tensor:
    """`size` values from base^low to base^high, evenly spaced in the logarithm."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise OptionError(f"grid_size={size!r} must be a whole number of at least 1.")
    if not low < high or base <= 1:
        raise OptionError(
            f"the grid runs from {base}**{low} to {base}**{high}; needed: log_prior_prec_min < log_prior_prec_max and "
            "log_prior_prec_base > 1."
        )
    return torch.logspace(low, high, size, base=base, dtype=torch.float64)


def search_grid(
    posterior: Posterior, runs: Iterable[tuple[Forward, Tensor]], grid: Tensor, how: How
) -> tuple[float, Tensor]:
    """The value of the grid with the lowest score, and all scores; `runs` are runs of the network with their labels."""
    mean = posterior.fit.mean
    fixed = posterior.detached()
    posteriors = [replace(fixed, prior=fixed.prior.with_precision(d.to(mean))) for d in grid]
    scores = [_score(how, posterior.fit.likelihood) for _ in grid]
    seen = 0
    for forward, y in runs:
        for score, prediction in zip(scores, _predictions(posteriors, forward, how), strict=True):
            score.add(prediction, y, posterior.sigma)
        seen += 1
    if not seen:
        raise InputError("the validation loader gave no batch.")
    values = torch.tensor([score.value() for score in scores], dtype=torch.float64)
    if not values.isfinite().all():
        bad = grid[~values.isfinite()].tolist()
        raise NumericalError(
            f"the validation score is NaN or infinite at prior precision {bad[0]:g} ({len(bad)} values of the grid)."
        )
    best = int(values.argmin())
    if best in (0, len(grid) - 1) and len(grid) > 1:
        side, option = ("lower", "log_prior_prec_min") if best == 0 else ("upper", "log_prior_prec_max")
        warn(
            f"the best prior precision {float(grid[best]):g} is the {side} edge of the grid; widen it with {option}=.",
            BoundaryWarning,
        )
    return float(grid[best]), values


Predicted = tuple[Tensor, Tensor | None]  # probabilities, or mean and (co)variance of f


def _predictions(posteriors: Sequence[Posterior], forward: Forward, how: How) -> Iterable[Predicted]:
    """The predictive of one run under each posterior; random numbers are the same for all."""
    fit, f = posteriors[0].fit, forward.outputs
    posteriors = [replace(posterior) for posterior in posteriors]  # a hundred Gaussians are not kept between batches
    gaussians = [posterior.gaussian for posterior in posteriors]
    if how.pred_type == "nn":
        eps = normals(how.n_samples, fit.layout.n_params, f, _seeded(f))
        for gaussian in gaussians:
            samples = forward.perturbed(gaussian.color(eps))
            yield (samples.mean(0), samples.var(0)) if fit.likelihood.has_noise else (samples.softmax(-1).mean(0), None)
        return
    jacobian = forward.jacobian()
    if fit.likelihood.has_noise and how.loss is None and f.shape[1] > 1:
        yield from ((f, gaussian.covariance(jacobian)) for gaussian in gaussians)
        return
    for posterior, variance in zip(posteriors, posteriors[0].curvature.sweep(jacobian, gaussians), strict=True):
        if fit.likelihood.has_noise:
            yield f, variance
        else:
            p, _ = probabilities(posterior, how.link, f, jacobian, Draws(how.n_samples, _seeded(f)), variance=variance)
            yield p, None


def _seeded(like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(0)


class _Mean:
    """A loss averaged over the examples; `loss(prediction..., y)` is the mean over its batch."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.loss, self.total, self.n = loss, 0.0, 0

    def add(self, prediction: Predicted, y: Tensor, sigma: Tensor) -> None:
        arguments = _arguments(prediction, sigma)
        try:
            value = float(self.loss(*arguments, y))
        except (TypeError, ValueError, RuntimeError) as error:
            form = "(probabilities, y)" if len(arguments) == 1 else "(mean, variance, y)"
            raise OptionError(
                f"loss must be a function of {form} that returns one number; it failed: {error}"
            ) from error
        self.total += value * len(y)
        self.n += len(y)

    def value(self) -> float:
        return self.total / self.n


class _Metric:
    """A metric object with reset, update and compute: an own copy for each value of the grid."""

    def __init__(self, metric: Any) -> None:
        self.metric = copy.deepcopy(metric)
        self.metric.reset()

    def add(self, prediction: Predicted, y: Tensor, sigma: Tensor) -> None:
        self.metric.update(*_arguments(prediction, sigma)[:1], y)

    def value(self) -> float:
        return float(self.metric.compute())


def _score(how: How, likelihood: Likelihood) -> _Mean | _Metric:
    if how.loss is None:
        return _Mean(_gaussian_nll if likelihood.has_noise else _categorical_nll)
    if all(hasattr(how.loss, name) for name in ("reset", "update", "compute")):
        if likelihood.has_noise:
            raise OptionError(
                "a metric object sees the mean alone, which does not depend on the prior. For regression give loss= a "
                "function of (mean, variance, y), or leave it out."
            )
        return _Metric(how.loss)
    if not callable(how.loss):
        raise OptionError(f"loss={how.loss!r} is neither callable nor a metric with reset, update and compute.")
    return _Mean(how.loss)


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
        return -MultivariateNormal(mean, spread).log_prob(y).mean()
    return -Normal(mean, spread.sqrt()).log_prob(y).sum(-1).mean()
