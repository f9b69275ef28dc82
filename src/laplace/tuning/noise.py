"""Set the noise of a regression from the residuals of the training data, then the prior by the evidence at that noise.

The joint maximum of the evidence is no guide to the noise. The log-determinant of a block-diagonal posterior over all
weights is too large, and pushes the noise far above the residuals; the last layer alone leaves out what the body does
not know, and the noise is too small for new inputs. Instead, with residuals r of the network at its weights,

    all weights      sigma^2 = mean of r^2
    some of them     sigma^2 = mean of r^2 + mean over training inputs of S_all(x)

S_all is the variance of the outputs under a Kronecker posterior over all weights, from one more fit, with its own prior
by the evidence at the noise of the residuals: what the other weights do not know goes, on average, into the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from laplace.errors import LaplaceWarning
from laplace.inference.fit import fit
from laplace.inference.runner import Runner
from laplace.posterior.posterior import Posterior
from laplace.priors.gaussian import GaussianPrior
from laplace.structures import Kron
from laplace.tuning.guard import residual_variance
from laplace.tuning.problem import Problem
from laplace.tuning.result import Point, Tuned
from laplace.tuning.training_data import Sample
from laplace.weights import All
from laplace.weights.selection import trainable_of

_MOST: Final = 5_000  # examples of the further fit
_LOOKED_AT: Final = 500  # examples over which S_all is averaged


@dataclass(frozen=True)
class Held:
    """A posterior at another noise, with its network: what `Problem` takes."""

    posterior: Posterior
    runner: Runner
    training_data: Any = None
    softmax_temperature: float = 1.0


def by_residuals(problem: Problem, by_evidence: Callable[[Problem], Tuned]) -> Tuned:
    """Return noise and prior of a regression, as far as they are tuned."""
    la = problem.la
    posterior = la.posterior.detached()
    level, note = _noise(problem, posterior, by_evidence)
    held = replace(posterior, sigma=level.to(posterior.sigma))
    others = [kind for kind in problem.kinds if kind != "sigma_noise"]
    if others:
        tuned = by_evidence(Problem(Held(held, la.runner), others, problem.groups))
    else:
        best = Point.of(held, float(held.log_evidence))
        tuned = Tuned("evidence", best, (best,), 0, 1, converged=True)
    return replace(tuned, method="residuals and evidence", notes=(*tuned.notes, note))


def _noise(
    problem: Problem, posterior: Posterior, by_evidence: Callable[[Problem], Tuned]
) -> tuple[Tensor, str]:  # (), what was done
    """Return the level of the noise, and how it was found."""
    runner, loader = problem.la.runner, problem.training_data
    residual = residual_variance(posterior.fit).clamp(min=torch.finfo(torch.float64).tiny)
    said = f"the residuals of the training data have a standard deviation of {float(residual.sqrt()):.4g}"
    if posterior.fit.layout.n_params >= sum(p.numel() for _, p in trainable_of(runner.model)):
        return residual.sqrt(), f"{said}, which was taken as the noise; the prior is by the evidence at that noise."
    if loader is None:
        why = "there is no training data at hand (train_loader=)"
    else:
        try:
            sample = Sample(loader, _MOST, problem.scoring.seed)
            unknown = _unknown(runner, sample, posterior.fit.n_data, residual, by_evidence)
            return (residual + unknown).sqrt(), (
                f"{said}; what all weights do not know of the outputs, {float(unknown.sqrt()):.4g} on average, was "
                "added to the noise; the prior is by the evidence at that noise."
            )
        except Exception as error:  # a network whose other weights have no Kronecker form, a loader that fails
            why = str(error)
    problem.la.runner.warn_once(
        "noise of the other weights",
        f"{said}, which was taken as the noise. Weights besides the uncertain ones were fitted to the same data, and "
        f"what they do not know could not be added: {why}. Intervals will be too narrow: with validation data write "
        "la.calibrate(val_loader), or take subset_of_weights='all'.",
    )
    return residual.sqrt(), f"{said}, which was taken as the noise; too small for new inputs, since {why}."


def _unknown(
    runner: Runner, sample: Sample, n_data: int, residual: Tensor, by_evidence: Callable[[Problem], Tuned]
) -> Tensor:  # ()
    """Return the mean of S_all over training inputs, relative to the noise of each output where that differs.

    The sums of a sample stand for those of all `n_data` examples.
    """
    spec = replace(runner.spec, weights=All(), structure=Kron(), curvature=None)
    other = _Silent(runner.model, spec)
    prior = GaussianPrior.of(1.0)
    found = fit(other, sample.reading(), prior)
    if found.n_data < n_data:
        times = torch.tensor(n_data / found.n_data, dtype=torch.float64)
        data = {key: value * times.to(value) for key, value in found.data.items()}
        found = replace(found, sums=found.structure.scaled(found.sums, times), data=data, n_data=n_data)
    sigma = residual.sqrt().to(found.mean)
    posterior = Posterior(found, prior, sigma, 1.0)
    tuned = by_evidence(Problem(Held(posterior, other), ["prior_precision"], "scalar"))
    posterior = replace(posterior, prior=prior.with_precision(tuned.prior_precision))
    total, count = torch.zeros((), dtype=torch.float64, device=found.mean.device), 0.0
    for forward, targets in replace(sample, most=_LOOKED_AT).runs(other, posterior, "training"):
        variance = posterior.gaussian.variance(forward.jacobian())
        each = (variance * spec.likelihood.fisher(forward.outputs, targets.y).squares()).double().mean(1)
        total, count = total + targets.total(each), count + float(targets.total(torch.ones_like(each)))
    return total / count


class _Silent(Runner):
    """Runs a network without warnings: they would be about a posterior that the user did not ask for."""

    def warn_once(self, key: str, message: str, category: type[LaplaceWarning] = LaplaceWarning) -> None:
        return
