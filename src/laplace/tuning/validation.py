"""Score many posteriors on validation data: one run of the network on each batch is used for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from laplace.backprop.gradients import Forward
from laplace.budget import Budget
from laplace.distributed import Reduce, alone
from laplace.errors import InputError
from laplace.inference.linearised import sampled, through_link
from laplace.likelihoods import Targets
from laplace.linalg.contrasts import centred
from laplace.linalg.sampling import Draws
from laplace.posterior.posterior import Posterior
from laplace.predictive.outputs import OutputGaussian, OutputSamples
from laplace.predictive.queries import Contrasts, Variances, with_covariances
from laplace.priors.gaussian import GaussianPrior
from laplace.tuning.scores import How, Predicted, Tally

Labelled = Iterator[tuple[Forward, Targets]]


class Validation:
    """Scores posteriors that differ in prior, noise and temperature.

    The first call reads the data. Later calls read it again, unless the runs of the network are small enough to be
    kept, as the outputs and features of a last layer are.
    """

    def __init__(
        self,
        how: How,
        inside: Callable[[], Labelled],
        outside: Callable[[], Labelled] | None,
        budget: Budget,
        reduce: Reduce = alone,
        places: Tensor | None = None,  # (n,), of this process's examples in the data of all
    ) -> None:
        self.how, self.budget, self.reduce, self.places = how, budget, reduce, places
        one = reduce.size == 1  # of several processes, one may have nothing to read
        self.inside = Runs(inside, "validation", budget, one)
        self.outside = None if outside is None else Runs(outside, "out-of-distribution", budget, one)

    def scores(self, posteriors: Sequence[Posterior]) -> Tensor:  # (G,)
        """Return the score of each posterior, on the data of all processes. All use the same random numbers."""
        tallies = [Tally(self.how, posterior.fit.likelihood) for posterior in posteriors]
        reports = self.reduce.agree(lambda: [tally.report() for tally in self._tallied(posteriors, tallies)])
        if self.reduce.size > 1:
            tallies = [tally.take(column) for tally, *column in zip(tallies, *reports, strict=True)]
        return torch.tensor([tally.value() for tally in tallies], dtype=torch.float64)

    def _tallied(self, posteriors: Sequence[Posterior], tallies: list[Tally]) -> list[Tally]:
        """Add this process's data."""
        for forward, targets in self.inside:
            for tally, posterior, prediction in zip(
                tallies, posteriors, self.predictions(posteriors, forward), strict=True
            ):
                tally.add(prediction, targets, posterior.sigma)
        for forward, _ in self.outside or ():
            for tally, posterior, prediction in zip(
                tallies, posteriors, self.predictions(posteriors, forward), strict=True
            ):
                tally.add_outside(prediction, posterior.sigma)
        return tallies

    def predictions(self, posteriors: Sequence[Posterior], forward: Forward) -> Iterator[Predicted]:
        """Yield the predictive of one run under each posterior."""
        if self.how.pred_type == "nn":
            yield from (
                self._sampled(posterior, forward) for part in in_parts(posteriors, self.budget) for posterior in part
            )
            return
        how, link = self.how, self.how.approximation
        for outputs in self.gaussians(posteriors, forward):
            outputs, draws = outputs.scaled(1 / how.softmax_temperature), seeded(how.n_samples, forward.outputs)
            yield outputs, None if link is None else through_link(link, outputs, draws)[0]

    def gaussians(
        self, posteriors: Sequence[Posterior], forward: Forward, covariances: bool = False
    ) -> Iterator[OutputGaussian]:
        """Yield the Gaussian of the outputs of one run under each posterior, before the softmax temperature.

        It holds what the link needs: variances, products or covariances. With `covariances`, it always holds those.
        """
        likelihood, how, f = posteriors[0].fit.likelihood, self.how, forward.outputs
        need = Variances() if how.approximation is None else how.approximation.needs()
        differences = isinstance(need, Contrasts)
        joint = how.loss is None and likelihood.joint and f.shape[1] > 1
        joint = joint or covariances or with_covariances(need)
        jacobian = forward.jacobian(centred=differences)
        for part in in_parts(posteriors, self.budget):
            variances = part[0].curvature.sweep(jacobian, [p.gaussian for p in part])
            for posterior in part:
                if joint:
                    covariance = posterior.gaussian.covariance(jacobian)
                    outputs = OutputGaussian(f, covariance.diagonal(dim1=1, dim2=2), covariance)
                else:
                    times = None if differences else partial(posterior.gaussian.product, jacobian)
                    outputs = OutputGaussian(f, next(variances), times=times)
                yield replace(outputs, contrasts=replace(outputs, mean=centred(f))) if differences else outputs

    def _sampled(self, posterior: Posterior, forward: Forward) -> Predicted:
        draws = seeded(self.how.n_samples, forward.outputs)
        drawn = OutputSamples(sampled(posterior, lambda: [forward], draws, exact=True))
        samples = drawn.scaled(1 / self.how.softmax_temperature).samples
        p = posterior.fit.likelihood.inverse_link(samples).mean(0) if self.how.link else None
        return OutputSamples(samples), p


class Runs:
    """Runs the network on a loader. Keeps the runs after the first time if they are small, else runs again."""

    def __init__(self, make: Callable[[], Labelled], what: str, budget: Budget, needed: bool = True) -> None:
        self.make, self.what, self.budget, self.needed = make, what, budget, needed
        self.kept: list[tuple[Forward, Targets]] | None = None

    def __iter__(self) -> Labelled:
        if self.kept is not None:
            yield from self.kept
            return
        kept, held = [], 0
        for forward, targets in self.make():
            held += forward.held * forward.outputs.element_size()
            if held <= self.budget.chunk:
                forward = forward.copied()
                kept.append((forward, targets))
            else:
                kept.clear()
            yield forward, targets
        if not held and self.needed:
            raise InputError(f"the {self.what} loader gave no batch; give at least one.")
        self.kept = kept or None


def in_parts(posteriors: Sequence[Posterior], budget: Budget) -> Iterator[Sequence[Posterior]]:
    """Yield as many posteriors at a time as their Gaussians fit into memory."""
    priors = [posterior.prior for posterior in posteriors]
    scalar = all(isinstance(prior, GaussianPrior) and prior.precision.numel() == 1 for prior in priors)
    step = budget.count(2 * posteriors[0].fit.mean.nbytes) if scalar else 1  # other priors may need a matrix each
    for start in range(0, len(posteriors), step):
        part = posteriors[start : start + step]
        if len(part) < len(posteriors) or not scalar:
            part = [replace(posterior) for posterior in part]  # copies: Gaussians are not kept between batches
        yield part


def seeded(n_samples: int, like: Tensor) -> Draws:
    """Return draws that are the same for every posterior."""
    return Draws(n_samples, torch.Generator(like.device).manual_seed(0))
