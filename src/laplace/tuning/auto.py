"""Tune without validation data, and do no harm.

`method="auto"` maximises the evidence (in regression, with the noise set from the residuals: noise.py). Then it scores
a sample of the training data (guard.py). If the posterior predicts the sample worse than the network does, the prior
precision is raised until it does not: the result is the widest posterior that does no harm on the sample. If no prior
precision is enough, it warns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

from laplace.errors import warn
from laplace.posterior.posterior import Posterior
from laplace.priors.gaussian import GaussianPrior
from laplace.tuning.guard import LARGEST_RATIO, Finding, findings, mean_variances, size
from laplace.tuning.noise import by_residuals
from laplace.tuning.problem import Problem
from laplace.tuning.result import Point, Tuned
from laplace.tuning.training_data import Sample, of_all_ranks
from laplace.tuning.validation import Validation

_DECADES: Final = 6  # by which the prior precision is raised at most
_STEPS: Final = 8  # in the decade that is chosen
_LEARNT_BY_HEART: Final = 0.02  # nats of the network itself per training example, at most
_NO_DATA: Final = (
    "not checked: no training data is available (train_loader=). Check that the confidence is not far below the "
    "accuracy."
)


@dataclass
class Guard:
    """Scores posteriors on a sample of a problem's training data. The network runs once."""

    problem: Problem

    @cached_property
    def validation(self) -> Validation:
        """Return the object that scores posteriors on the sample."""
        problem = self.problem
        la, loader = problem.la, problem.training_data
        assert loader is not None
        most = size(la.posterior.fit.n_data)
        sample = Sample(of_all_ranks(loader, most, problem.scoring.reduce, la.runner), most)
        runs = partial(sample.runs, la.runner, la.posterior, "training")
        return Validation(problem.how, runs, None, la.runner.spec.budget)

    def look(self, posteriors: Sequence[Posterior]) -> list[Finding]:
        """Return how each posterior scores on the sample."""
        return findings(self.validation, posteriors)

    def mean_variances(self, posteriors: Sequence[Posterior]) -> list[float]:
        """Return the mean variance of the outputs on the sample, without the noise, under each posterior."""
        return mean_variances(self.validation, posteriors)

    def raised(self, posterior: Posterior) -> tuple[float, Posterior, Finding] | None:
        """Return the smallest factor on the prior precision with which the harm is allowed; None if there is none."""
        prior = posterior.prior
        if not isinstance(prior, GaussianPrior):
            return None
        decades = self._first([float(k) for k in range(_DECADES + 1)], posterior, prior)
        if decades is None or decades[0] == 0.0:
            return None if decades is None else (1.0, *decades[1:])
        steps = [decades[0] - 1 + k / _STEPS for k in range(1, _STEPS)]
        power, other, finding = self._first(steps, posterior, prior) or decades
        return 10**power, other, finding

    def _first(
        self, powers: Sequence[float], posterior: Posterior, prior: GaussianPrior
    ) -> tuple[float, Posterior, Finding] | None:
        """Return the first power of ten on the prior precision with which the posterior passes."""
        raised = [replace(posterior, prior=prior.with_precision(10**power * prior.precision)) for power in powers]
        for power, other, finding in zip(powers, raised, self.look(raised), strict=True):
            if finding.allowed:
                return power, other, finding
        return None


def looked_at(problem: Problem, tuned: Tuned) -> Tuned:
    """Return the tuning result, with a warning if it makes the network worse on a sample of the training data."""
    if problem.training_data is None:
        return tuned
    try:
        guard = Guard(problem)
        with problem.scoring.reduce.attempt():
            (found,) = guard.look([tuned.best.applied(problem.la.posterior.detached())])
    except Exception as error:  # whatever a loader may raise: the result is there
        return _noting(tuned, f"not checked: the training data could not be read: {error}")
    return _judged(guard, tuned, found, tuned.method == "evidence")


def auto(problem: Problem, by_evidence: Callable[[Problem], Tuned]) -> Tuned:
    """Return the result by evidence, or, if that does harm, the widest posterior that does none.

    Args:
        problem: what is tuned.
        by_evidence: tunes by the evidence.
    """
    _ = problem.space  # refuses what cannot be tuned
    noisy, guard = "sigma_noise" in problem.kinds, Guard(problem)
    tuned = by_residuals(problem, by_evidence, guard.mean_variances) if noisy else by_evidence(problem)
    if problem.training_data is None:
        return _noting(tuned, _NO_DATA)
    posterior = tuned.best.applied(problem.la.posterior.detached())
    try:
        with problem.scoring.reduce.attempt():
            (found,) = guard.look([posterior])
    except Exception as error:  # whatever a loader may raise: the evidence needs no data
        return _noting(tuned, f"not checked: the training data could not be read: {error}")
    if noisy:
        found = replace(found, ratio=None)  # what other weights do not know may be more than the residuals
    if found.allowed:
        limit = f" (more than {LARGEST_RATIO:g} would mean overconfident)" if noisy else ""
        said = f"{'checked' if noisy else 'taken as it is'}: {found}{limit}."
        return _learnt_by_heart(_noting(tuned, said), found)
    if found.rms is None and "prior_precision" in problem.kinds and (raised := guard.raised(posterior)) is not None:
        factor, narrower, after = raised
        best = Point.of(narrower, float(narrower.log_evidence))
        why = (
            f"the prior of largest evidence makes the network worse: {found}. Its precision was raised "
            f"{factor:.3g}-fold, just enough to bring the negative log-likelihood to {after.nll:.3f}"
        )
        why += "." if after.confidence is None else f" and the confidence to {after.confidence:.3f}."
        tuned = replace(tuned, method="guarded evidence", best=best, points=(*tuned.points, best))
        return _learnt_by_heart(_noting(tuned, why), found)
    return _judged(guard, tuned, found)


def _learnt_by_heart(tuned: Tuned, found: Finding) -> Tuned:
    """Return the result, with a note if a classifier fits the sample too well to learn from it how sure to be."""
    if found.own is None or found.confidence is None or found.own > _LEARNT_BY_HEART:
        return tuned
    return _noting(
        tuned,
        f"the network fits its training data almost perfectly (mean negative log-likelihood {found.own:.2g}), so that "
        "this data cannot say how sure to be about new data. With validation data write la.calibrate(val_loader).",
    )


def _judged(guard: Guard, tuned: Tuned, found: Finding, untried: bool = False) -> Tuned:
    """Return the result, with a warning if the posterior makes the network worse.

    `untried` says that 'auto', which may narrow the posterior, was not asked for.
    """
    if not found.tripped:
        return tuned
    text = f"after tuning by {tuned.method}, {found}."
    if found.own is None:
        (before,) = guard.look([guard.problem.la.posterior.detached()])
        if found.nll > before.nll:
            text += f" Their mean negative log-likelihood went from {before.nll:.3f} to {found.nll:.3f}."
    instead = " la.tune() (method='auto') finds a prior that does no harm." if untried else ""
    if not isinstance(prior := guard.problem.la.posterior.prior, GaussianPrior):  # which `auto` cannot narrow, either
        name = type(prior).__name__
        instead = f" With prior_precision= in place of {name}, la.tune() finds a prior that does no harm."
    text += (
        f" Predictions on new inputs will be worse, too.{instead} With validation data write la.calibrate(val_loader)."
    )
    warn(text)
    return _noting(tuned, text)


def _noting(tuned: Tuned, note: str) -> Tuned:
    return replace(tuned, notes=(*tuned.notes, note))
