"""Set the noise of a regression between its residuals and the evidence's noise, then the prior by the evidence there.

The residuals' standard deviation s_res is too small a noise for new inputs: the network was fitted to these data. The
noise at the joint maximum of the evidence, s_ev, is too large if the weights are nonlinear, as the log-determinant of a
block-diagonal posterior over all weights is too large; and that of the last layer alone does not see that the body was
fitted, too. Halfway on a log scale, measured on nine UCI sets and several lengths of training (experiments/
noise_rules.py), 90 % intervals hold 90 %:

    all weights                    sigma = s_res^(3/4) s_ev^(1/4)
    some of them                   sigma = (s_res s_ev)^(1/2), with s_ev of all weights from a further fit of kron
    a last layer on a frozen body  sigma = s_ev, which is exact there
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from laplace.errors import LaplaceError, LaplaceWarning
from laplace.inference.fit import fit
from laplace.inference.runner import Runner
from laplace.posterior.posterior import Posterior
from laplace.priors.gaussian import GaussianPrior
from laplace.structures import Kron
from laplace.tuning.evidence import climb
from laplace.tuning.guard import residual_variance
from laplace.tuning.problem import Problem
from laplace.tuning.result import Point, Tuned
from laplace.tuning.space import Space
from laplace.tuning.training_data import Sample
from laplace.weights import All
from laplace.weights.selection import trainable_of

_MOST: Final = 1_000  # examples of the further fit
_STEPS: Final = 100  # of Newton's method, at most


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
    level, note = _noise(problem, posterior)
    held = replace(posterior, sigma=level.to(posterior.sigma))
    others = [kind for kind in problem.kinds if kind != "sigma_noise"]
    if others:
        tuned = by_evidence(Problem(Held(held, la.runner), others, problem.groups))
    else:
        best = Point.of(held, float(held.log_evidence))
        tuned = Tuned("evidence", best, (best,), 0, 1, converged=True)
    return replace(tuned, method="residuals and evidence", notes=(*tuned.notes, note))


def _noise(problem: Problem, posterior: Posterior) -> tuple[Tensor, str]:  # (), what was done
    """Return the level of the noise, and how it was found."""
    runner, loader = problem.la.runner, problem.training_data
    residual = residual_variance(posterior.fit).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    said = f"the residuals of the training data have a standard deviation of {float(residual):.4g}"
    if posterior.fit.layout.n_params >= sum(p.numel() for _, p in trainable_of(runner.model)):
        own = by_joint_evidence(posterior, residual)
        if posterior.fit.linear:
            return own, f"{said}; the noise is that of the largest evidence."
        noise = residual**0.75 * own**0.25
        return noise, f"{said}, and the evidence's noise is {float(own):.4g}; the noise is between, nearer the former."
    if loader is None:
        why = "there is no training data at hand (train_loader=)"
    else:
        try:
            sample = Sample(loader, _MOST, problem.scoring.seed)
            other = by_joint_evidence(_of_all_weights(runner, sample, posterior.fit.n_data, residual), residual)
            return (residual * other).sqrt(), (
                f"{said}, and the noise by the evidence of all weights is {float(other):.4g}; the noise is halfway "
                "between (geometric mean)."
            )
        except Exception as error:  # a network whose other weights have no Kronecker form, a loader that fails
            why = str(error)
    own = by_joint_evidence(posterior, residual)
    problem.la.runner.warn_once(
        "noise of the other weights",
        f"{said}. Weights besides the uncertain ones were fitted to the same data, and what they do not know could not "
        f"be counted: {why}. Intervals will be too narrow: with validation data write la.calibrate(val_loader), or "
        "take subset_of_weights='all'.",
    )
    return own, f"{said}; the noise is that of the largest evidence, too small for new inputs, since {why}."


def by_joint_evidence(posterior: Posterior, start: Tensor) -> Tensor:  # ()
    """Return the noise at the maximum of the evidence over noise and one prior precision, at least `start`."""
    prior = posterior.prior if isinstance(posterior.prior, GaussianPrior) else GaussianPrior.of(1.0)
    space = Space(replace(posterior, prior=prior, sigma=start.to(posterior.sigma)), "scalar", noise=True)
    try:
        found = climb(space, space.start(1.0), _STEPS, math.inf).sigma.double()
    except LaplaceError:
        return start
    return torch.maximum(found.to(start), start)


def _of_all_weights(runner: Runner, sample: Sample, n_data: int, sigma: Tensor) -> Posterior:
    """Return a Kronecker posterior over all weights. The sums of a sample stand for those of all `n_data` examples."""
    spec = replace(runner.spec, weights=All(), structure=Kron(), curvature=None)
    found = fit(_Silent(runner.model, spec), sample.reading(), prior := GaussianPrior.of(1.0))
    if found.n_data < n_data:
        times = torch.tensor(n_data / found.n_data, dtype=torch.float64)
        data = {key: value * times.to(value) for key, value in found.data.items()}
        found = replace(found, sums=found.structure.scaled(found.sums, times), data=data, n_data=n_data)
    return Posterior(found, prior, sigma.to(found.mean), 1.0)


class _Silent(Runner):
    """Runs a network without warnings: they would be about a posterior that the user did not ask for."""

    def warn_once(self, key: str, message: str, category: type[LaplaceWarning] = LaplaceWarning) -> None:
        return
