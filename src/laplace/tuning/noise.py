"""Set the noise of a regression between its residuals and the evidence's, then the prior by the evidence there.

The residuals of the training data, s_res, are too small for new data, because the network was fitted to them. The noise
at the joint maximum of the evidence, s_ev, is too large where the posterior is block-diagonal, and too small for a last
layer, whose body was fitted to the same data. Between the two, on the scale of logarithms:

    all weights      sigma = s_res^(3/4) s_ev^(1/4)
    some of them     sigma = s_res^(1/2) s_ev^(1/2), with s_ev that of a Kronecker posterior over all weights

The exponents are fitted to nine data sets, not derived. Weights with requires_grad=False count as fitted to other data:
where all others are uncertain, s_ev is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

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

_MOST: Final = 1_000  # examples that the posterior over all weights is fitted to


@dataclass(frozen=True)
class Held:
    """A posterior at another noise, with its network: what `Problem` takes."""

    posterior: Posterior
    runner: Runner
    training_data: Any = None


def by_residuals(problem: Problem, by_evidence: Callable[[Problem], Tuned]) -> Tuned:
    """Return noise and prior of a regression, as far as they are tuned."""
    la = problem.la
    posterior = la.posterior.detached()
    level, note = _noise(problem, posterior, by_evidence)
    held = replace(posterior, sigma=torch.as_tensor(level).to(posterior.sigma))
    others = [kind for kind in problem.kinds if kind != "sigma_noise"]
    if others:
        tuned = by_evidence(Problem(Held(held, la.runner), others, problem.groups))
    else:
        best = Point.of(held, float(held.log_evidence))
        tuned = Tuned("evidence", best, (best,), 0, 1, converged=True)
    return replace(tuned, method="residuals and evidence", notes=(*tuned.notes, note))


def _noise(
    problem: Problem, posterior: Posterior, by_evidence: Callable[[Problem], Tuned]
) -> tuple[float, str]:  # level, what was done
    """Return the level of the noise, and how it was found."""
    runner, loader, found = problem.la.runner, problem.training_data, posterior.fit
    residual = float(residual_variance(found).clamp(min=torch.finfo(torch.float64).tiny).sqrt())
    said = f"the noise of the training residuals is {residual:.4g}"
    if found.layout.n_params >= sum(p.numel() for _, p in trainable_of(runner.model)):
        own = _joint(Held(posterior, runner), problem.groups, by_evidence)
        if all(p.requires_grad for p in runner.model.parameters()):
            return (
                residual**0.75 * own**0.25,
                f"{said}, the evidence's {own:.4g}; a quarter of the way was taken.",
            )
        return own, f"{said}; that of the evidence, {own:.4g}, was taken: all other weights are frozen."
    if loader is None:
        why = "there is no training data at hand (train_loader=)"
    else:
        try:
            sample = Sample(loader, _MOST, problem.scoring.seed)
            whole = _joint(_all_weights(runner, sample, found.n_data), "scalar", by_evidence)
            return (residual * whole) ** 0.5, f"{said}, that of all weights' evidence {whole:.4g}; half way was taken."
        except Exception as error:  # a network whose other weights have no Kronecker form, a loader that fails
            why = str(error)
    own = _joint(Held(posterior, runner), problem.groups, by_evidence)
    runner.warn_once(
        "noise of the other weights",
        f"{said}; that of the evidence, {own:.4g}, was taken. Other weights were fitted to the same data, and what "
        f"they do not know could not be found: {why}. Intervals will be too narrow: with validation data write "
        "la.calibrate(val_loader), or take subset_of_weights='all'.",
    )
    return own, f"{said}; that of the evidence, {own:.4g}, was taken, and is too small for new inputs: {why}."


def _joint(la: Held, groups: str, by_evidence: Callable[[Problem], Tuned]) -> float:
    """Return the noise at the joint maximum of the evidence in prior and noise."""
    prior = la.posterior.prior
    own = ["prior_precision"] if isinstance(prior, GaussianPrior) else list(prior.tuned)
    return by_evidence(Problem(la, [*own, "sigma_noise"], groups)).sigma_noise


def _all_weights(runner: Runner, sample: Sample, n_data: int) -> Held:
    """Return a Kronecker posterior over all weights. The sums of a sample stand for those of all `n_data` examples."""
    other = _Silent(runner.model, replace(runner.spec, weights=All(), structure=Kron(), curvature=None))
    prior = GaussianPrior.of(1.0)
    found = fit(other, sample.reading(), prior)
    if found.n_data < n_data:
        times = torch.tensor(n_data / found.n_data, dtype=torch.float64)
        data = {key: value * times.to(value) for key, value in found.data.items()}
        found = replace(found, sums=found.structure.scaled(found.sums, times), data=data, n_data=n_data)
    return Held(Posterior(found, prior, torch.ones_like(found.mean[0]), 1.0), other)


class _Silent(Runner):
    """Runs a network without warnings: they would be about a posterior that the user did not ask for."""

    def warn_once(self, key: str, message: str, category: type[LaplaceWarning] = LaplaceWarning) -> None:
        return
