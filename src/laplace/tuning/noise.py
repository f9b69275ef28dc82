"""Set the noise and the width of the posterior of a regression, allowing for noise that training has absorbed.

Residuals of the training data are too small a noise for new inputs: the network was fitted to these data. A linear
model with gamma effective parameters, N examples and noise sigma says by how much,

    mean squared residual = sigma^2 (1 - gamma/N),    mean squared error on new data = sigma^2 (1 + gamma/N),

and gamma/N sigma^2 is the mean of the posterior variance S at the training inputs. So the noise sigma_0 at the largest
evidence of the linearised network, with all covariances of all weights, fixes both parts of the predictive variance,
with s_res^2 the mean squared residual:

    sigma^2 = sigma_0^2,    mean S = sigma_0^2 - s_res^2,    total = 2 sigma_0^2 - s_res^2.

sigma_0 comes from a Gaussian process on up to MOST_POINTS examples, never from the posterior that is tuned: the
log-determinant of a block-diagonal posterior counts more effective parameters than there are examples, which makes its
own noise up to twenty times too large, and a last layer does not see that the body was fitted, too. The prior is the
evidence's at sigma_0. If S is wider than the mean above, as with block-diagonal structures, the prior precision is
raised. If S is narrower, as with a last layer, the noise is raised so that the total is kept.

A last layer on a frozen body is a linear model: its own evidence is exact, and used directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from laplace.distributed import Reduce, alone
from laplace.errors import LaplaceError, LaplaceWarning, warn
from laplace.inference.fit import fit
from laplace.inference.runner import Runner
from laplace.posterior.posterior import Fit, Posterior
from laplace.priors.gaussian import GaussianPrior
from laplace.structures import GP
from laplace.tuning.evidence import climb
from laplace.tuning.guard import residual_variance
from laplace.tuning.problem import Problem
from laplace.tuning.result import Point, Tuned
from laplace.tuning.space import Space
from laplace.weights import All
from laplace.weights.selection import trainable_of

MOST_POINTS: Final = 1_000  # examples times outputs of the Gaussian process
FEWEST_POINTS: Final = 100
MOST_WORK: Final = 1e11  # points^2 x weights: inner products of gradients, where they are not made from factors
MOST_USED: Final = 0.96  # of gamma / N: above, the noise was up to four times too small (experiments/dense_or_kron.py)
_STEPS: Final = 100  # of Newton's method, at most
_POWERS: Final = tuple(k / 4 for k in range(25))  # of ten, by which the prior precision may be raised

MeanVariances = Callable[[Sequence[Posterior]], Sequence[float]]


@dataclass(frozen=True)
class Held:
    """Holds a posterior at another noise, with its network, as `Problem` takes it."""

    posterior: Posterior
    runner: Runner
    training_data: Any = None
    softmax_temperature: float = 1.0


def by_residuals(problem: Problem, by_evidence: Callable[[Problem], Tuned], mean_variances: MeanVariances) -> Tuned:
    """Return noise and prior of a regression, as far as they are tuned.

    Args:
        problem: what is tuned.
        by_evidence: tunes by the evidence.
        mean_variances: the mean of S, without the noise, of some posteriors at a sample of the training inputs.
    """
    posterior = problem.la.posterior.detached()
    residual = residual_variance(posterior.fit).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    said = f"the residuals of the training data have a standard deviation of {float(residual):.4g}"
    if _whole(problem) and posterior.fit.linear:
        own = by_joint_evidence(posterior, residual)
        return _noting(_held(problem, by_evidence, own), f"{said}; the noise is that of the largest evidence.")
    if problem.training_data is None:
        return _without(problem, by_evidence, residual, said, "no training data is available (train_loader=)")
    reduce = problem.scoring.reduce
    try:
        with reduce.attempt():
            noise = of_all_weights(problem.la.runner, problem.training_data, posterior.fit, residual, reduce)
            tuned, how = _shared(problem, _held(problem, by_evidence, noise), noise, residual, mean_variances)
    except Exception as error:  # a network without a kernel of the kind, a loader that fails, memory
        return _without(problem, by_evidence, residual, said, str(error))
    why = f"{said}, and the noise by the evidence of all weights is {float(noise):.4g}: {how}"
    return _noting(tuned, why + _interpolated(float(residual), float(noise)))


def _interpolated(residual: float, noise: float) -> str:
    """Warn if the network nearly interpolates its training data. Return the warning, for the notes."""
    used = 1 - (residual / noise) ** 2  # gamma / N of the linear model
    if used <= MOST_USED:
        return ""
    text = (
        f" The network has used {100 * used:.0f} % of the training data to fit itself, so what is left says little "
        "about the noise, and intervals may be far too narrow. Hold data out, and write la.calibrate(val_loader) or "
        "la.conformal(cal_loader)."
    )
    warn(text.strip())
    return text


def of_all_weights(
    runner: Runner, loader: Iterable[Any], own: Fit, residual: Tensor, reduce: Reduce = alone
) -> Tensor:  # ()
    """Return the noise with the largest evidence for the linearised network with all covariances of all weights."""
    outputs = own.n_outputs
    weights = sum(p.numel() for _, p in trainable_of(runner.model))
    points = min(MOST_POINTS // outputs, int(math.sqrt(MOST_WORK / weights)) // outputs)
    structure = GP(n_subset=min(own.n_data, max(FEWEST_POINTS // outputs, points, 1)))
    spec = replace(runner.spec, weights=All(), structure=structure, curvature=None)
    found = fit(_Silent(runner.model, spec), loader, prior := GaussianPrior.of(1.0), reduce=reduce)
    return by_joint_evidence(Posterior(found, prior, residual.to(found.mean), 1.0), residual)


def by_joint_evidence(posterior: Posterior, start: Tensor) -> Tensor:  # ()
    """Return the noise that maximises the evidence over noise and one prior precision; at least `start`."""
    prior = posterior.prior if isinstance(posterior.prior, GaussianPrior) else GaussianPrior.of(1.0)
    space = Space(replace(posterior, prior=prior, sigma=start.to(posterior.sigma)), "scalar", noise=True)
    try:
        found = climb(space, space.start(1.0), _STEPS, math.inf).sigma.double()
    except LaplaceError:
        return start
    return torch.maximum(found.to(start), start)


def _shared(
    problem: Problem, tuned: Tuned, noise: Tensor, residual: Tensor, mean_variances: MeanVariances
) -> tuple[Tuned, str]:
    """Return the point at which noise and mean of S add up to the total, and in words how it was reached."""
    level, total = float(noise) ** 2, 2 * float(noise) ** 2 - float(residual) ** 2
    posterior = tuned.best.applied(problem.la.posterior.detached())
    (spread,) = mean_variances([posterior])
    if "prior_precision" in problem.kinds and spread > total - level and isinstance(posterior.prior, GaussianPrior):
        factor = _factor(posterior, total - level, mean_variances)
        precision = factor * posterior.prior.precision
        raised = replace(posterior, prior=posterior.prior.with_precision(precision))
        best = Point.of(raised, float(raised.log_evidence))
        how = f"taken, with {factor:.3g} times the prior precision of the evidence"
    else:
        share = max(total / (1 + spread / level), float(residual) ** 2)  # S is in proportion to the noise
        moved = replace(posterior, sigma=posterior.sigma * math.sqrt(share / level))
        best, how = Point.of(moved, float(moved.log_evidence)), f"the noise is {math.sqrt(share):.4g}"
    how += f", so that 90 % intervals are about {3.29 * math.sqrt(total):.4g} wide at the training inputs."
    return replace(tuned, best=best, points=(*tuned.points, best)), how


def _factor(posterior: Posterior, wanted: float, mean_variances: MeanVariances) -> float:
    """Return the factor on the prior precision that gives a mean of S: logarithms are interpolated on a grid."""
    prior = posterior.prior
    assert isinstance(prior, GaussianPrior)
    raised = [replace(posterior, prior=prior.with_precision(10**power * prior.precision)) for power in _POWERS]
    found = [max(value, 1e-300) for value in mean_variances(raised)]  # falls with the precision
    after = next((i for i, value in enumerate(found) if value <= wanted), None)
    if after is None or wanted <= 0:
        return 10 ** _POWERS[-1]
    if after == 0:
        return 1.0
    low, high = math.log(found[after - 1]), math.log(found[after])
    way = (low - math.log(wanted)) / max(low - high, 1e-300)
    return 10 ** (_POWERS[after - 1] + way * (_POWERS[after] - _POWERS[after - 1]))


def _held(problem: Problem, by_evidence: Callable[[Problem], Tuned], noise: Tensor) -> Tuned:
    """Return the prior with the largest evidence at a given noise, if a prior is tuned."""
    la, posterior = problem.la, problem.la.posterior.detached()
    held = replace(posterior, sigma=noise.to(posterior.sigma))
    others = [kind for kind in problem.kinds if kind != "sigma_noise"]
    if others:
        tuned = by_evidence(Problem(Held(held, la.runner), others, problem.groups))
    else:
        best = Point.of(held, float(held.log_evidence))
        tuned = Tuned("evidence", best, (best,), 0, 1, converged=True)
    return replace(tuned, method="residuals and evidence")


def _without(problem: Problem, by_evidence: Callable[[Problem], Tuned], residual: Tensor, said: str, why: str) -> Tuned:
    """Return the noise by the posterior's own evidence, or one nearer to the residuals if it is too large; warn."""
    own = by_joint_evidence(problem.la.posterior.detached(), residual)
    if _whole(problem):  # nonlinear: see above. The exponents were fitted to nine UCI sets
        noise, off = residual**0.75 * own**0.25, "a guess between the two"
        said = f"{said}, and the noise of the largest evidence is {float(own):.4g}, which is too large"
    else:
        noise, off = (
            own,
            "that of the largest evidence; intervals will be too narrow, because other weights were trained, too",
        )
    why = why.rstrip(".")
    text = f"{said}. The uncertainty of all weights could not be taken into account: {why}. The noise is {off}."
    problem.la.runner.warn_once("noise of all weights", f"{text} With validation data write la.calibrate(val_loader).")
    return _noting(_held(problem, by_evidence, noise), text)


def _whole(problem: Problem) -> bool:
    """Return whether all weights that were trained are uncertain."""
    trained = sum(p.numel() for _, p in trainable_of(problem.la.runner.model))
    return problem.la.posterior.fit.layout.n_params >= trained


def _noting(tuned: Tuned, note: str) -> Tuned:
    return replace(tuned, notes=(*tuned.notes, note))


class _Silent(Runner):
    """Runs a network without warnings: they would be about a posterior that the user did not ask for."""

    def warn_once(self, key: str, message: str, category: type[LaplaceWarning] = LaplaceWarning) -> None:
        return
