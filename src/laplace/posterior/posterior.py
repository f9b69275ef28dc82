"""Compute the posterior N(mean, (s H + D)^-1), a pure function of the fit, the prior, the noise and T.

log Z = (1/T) log p(data given mean) + log p(mean) + P/2 log 2 pi - 1/2 log det(s H + D)
      = (1/T) log p(data given mean) - 1/2 [ (mean - mu0)^T D (mean - mu0) + log det(s H + D) - log det D ]

The second line holds for a Gaussian prior. D = -d2 log p(mean) is the prior precision. For a Gaussian prior it is
diag(delta), plus the curvature of earlier tasks if there were any. For any other prior it is the curvature of -log p at
the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace.backprop.gradients import Engine, Forward
from laplace.distributed import Reduce
from laplace.errors import InputError, NumericalError, OptionError
from laplace.likelihoods.base import Likelihood
from laplace.linalg.autocast import plain
from laplace.linalg.symmetric import Clipped
from laplace.priors.base import Form, Prior
from laplace.structures import Curvature, Gaussian, Structure, Sums
from laplace.structures.dealing import dealt_out
from laplace.structures.owners import Owners
from laplace.structures.spread import SpreadCurvature
from laplace.weights.layout import Layout

if TYPE_CHECKING:
    from laplace.structures.functional.points import Points
    from laplace.structures.solves import TrainingData


@dataclass(frozen=True)
class Fit:
    """Holds the result of a fit: sums over the data at the weights `mean`."""

    structure: Structure
    likelihood: Likelihood
    kind: str  # the name of the curvature estimator
    layout: Layout
    mean: Tensor  # (P,)
    sums: Sums  # made by the structure
    data: Sums  # made by the likelihood
    n_data: int
    n_outputs: int
    linear: bool = True  # whether the outputs are linear in the uncertain weights, as in a last layer
    flat: bool = False  # whether the network returns one number per position, without a dimension for outputs
    points: Points | None = None  # training points, if predictions need them
    owners: Owners | None = None  # which rank has the sums of which tensor, if they are not all here
    training: TrainingData | None = None  # all training data, by reference, if the posterior reads it again
    empirical: bool = False  # whether the curvature is made of scores at the labels

    @property
    def scaling(self) -> str:
        """Return the curvature, 'ef' or 'ggn', that the noise scales as it scales this one."""
        return "ef" if self.empirical or self.kind == "ef" else "ggn"  # pickles of earlier versions know only the name

    @property
    def curvature(self) -> Curvature:
        """Return H, factorised at first use and kept."""
        return self._factorised

    @cached_property
    def _factorised(self) -> Curvature:
        return self._factorise()

    def _factorise(self) -> Curvature:
        with plain(), torch.no_grad():
            if self.owners is not None:
                return SpreadCurvature(self.structure, self.sums, self.layout, self.mean, self.owners)
            curvature = self.structure.curvature(self.sums, self.layout, self.mean.dtype)
        return self.structure.attach_data(curvature, self.training)

    def factorise_together(self, reduce: Reduce) -> None:
        """Factorise H now, with its eigendecompositions dealt out over the ranks: later, one rank may ask alone."""
        if reduce.size > 1 and self.owners is not None:
            reduce.agree(lambda: self.curvature.clipped)
        elif reduce.size > 1:
            self.__dict__["_factorised"] = dealt_out(self._factorise, reduce)

    def whole_sums(self, what: str, instead: str) -> Sums:
        """Return the sums of all tensors. Raise UnsupportedError if some are on other ranks."""
        if self.owners is not None:
            raise self.owners.refuse(what, instead)
        return self.sums

    def plus(self, other: Fit) -> Fit:
        """Return this fit with the sums of more data added."""
        if self.owners != other.owners:
            raise InputError(
                "the factors of one of these fits stay on their ranks (shard_factors=True), and those of the other do "
                "not, or on other ranks. Fit both alike."
            )
        sums, data = added(self.sums, other.sums), added(self.data, other.data)
        return replace(self, sums=sums, data=data, n_data=self.n_data + other.n_data)

    def to(self, device: torch.device | str) -> Fit:
        """Return a copy on `device`."""
        moved = {key: {k: v.to(device) for k, v in getattr(self, key).items()} for key in ("sums", "data")}
        points = None if self.points is None else self.points.to(device)
        return replace(self, mean=self.mean.to(device), points=points, **moved)

    def attach_points(self, forward: Forward, engine: Engine, limit: int) -> Forward:
        """Add the kept points, if there are any, to a run at new inputs."""
        return self.structure.attach_points(forward, self.points, engine, limit)


@dataclass(frozen=True)
class Posterior:
    """Holds the Gaussian and the terms of its evidence. All are differentiable in the prior's values and sigma.

    Attributes:
        fit: the result of the fit: mean, sums, sizes.
        prior: the prior over the weights.
        sigma: the standard deviation of the noise, ().
        temperature: T, which divides the log-likelihood.
    """

    fit: Fit
    prior: Prior
    sigma: Tensor
    temperature: float

    @cached_property
    def gaussian(self) -> Gaussian:
        """Return N(0, (s H + D)^-1)."""
        return self.scaled(self.scale)

    def scaled(self, scale: Tensor) -> Gaussian:
        """Return N(0, (s H + D)^-1) for another s."""
        with plain():
            curvature, scale = self.prior.joined(self.fit, scale)
            return curvature.gaussian(scale, self._prior_precision[0])

    @cached_property
    def _prior_precision(self) -> tuple[Sequence[Form], Clipped]:
        with plain():
            return self.prior.precision_at(self.fit.mean, self.fit.layout)

    @property
    def prior_clipped(self) -> Clipped:
        """Return how many eigenvalues of -d2 log p at the weights were negative and set to zero."""
        return self._prior_precision[1]

    @property
    def curvature(self) -> Curvature:
        """Return the factorised curvature behind `gaussian`. It does not depend on delta."""
        return self.prior.joined(self.fit, self.scale)[0]

    @property
    def scale(self) -> Tensor:
        """Return s = c(sigma) / T."""
        c = self.fit.likelihood.curvature_scale(self.fit.scaling, self.sigma)
        scale = c.to(self.fit.mean) / self.temperature
        if not (scale.isfinite() and scale >= torch.finfo(scale.dtype).tiny):
            raise OptionError(
                f"sigma_noise={float(self.sigma.detach()):.3g} and temperature={self.temperature:.3g} are out of range "
                f"in {scale.dtype}: the curvature is multiplied by {float(scale.detach()):.3g}. Take values nearer 1."
            )
        return scale

    @property
    def log_likelihood(self) -> Tensor:
        """Return (1/T) log p(data given mean), including the normaliser of the noise."""
        value = self.fit.likelihood.log_likelihood(self.fit.data, self.sigma.double()) / self.temperature
        return _finite(value, "log-likelihood", "sigma_noise, temperature and the outputs")

    @property
    def log_prior(self) -> Tensor:
        """Return log p(mean), normalised."""
        value = self.prior.log_density(self.fit.mean, self.fit.layout)
        return _finite(value, "log prior", "the hyperparameters of the prior and the weights")

    @property
    def scatter(self) -> Tensor:
        """Return (mean - mu0)^T D (mean - mu0)."""
        return _finite_scatter(self.prior.scatter(self.fit.mean, self.fit.layout))

    @property
    def log_det_prior_precision(self) -> Tensor:
        """Return log det D."""
        return self.prior.logdet(self.fit.layout, self.fit.mean)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Return log det(s H + D)."""
        return _finite(self.gaussian.logdet(), "log-determinant", "the prior precision and the inputs of the network")

    @property
    def log_det_ratio(self) -> Tensor:
        """Return log det(s H + D) - log det D."""
        return self.log_det_posterior_precision - self.log_det_prior_precision

    @property
    def log_evidence(self) -> Tensor:
        """Return log Z."""
        if not self.prior.quadratic:
            constant = 0.5 * self.fit.layout.n_params * math.log(2 * math.pi)
            return self.log_likelihood + self.log_prior + constant - 0.5 * self.log_det_posterior_precision
        return self.evidence_given(self.scatter, self.log_det_prior_precision)

    def evidence_given(self, scatter: Tensor, log_det_prior_precision: Tensor) -> Tensor:
        """Return log Z from the terms of a Gaussian prior, if they are known already."""
        ratio = self.log_det_posterior_precision - log_det_prior_precision
        return self.log_likelihood - 0.5 * (_finite_scatter(scatter) + ratio)

    def detached(self) -> Posterior:
        """Return the same posterior without autograd graphs."""
        return replace(self, prior=self.prior.detached(), sigma=self.sigma.detach())


def _finite_scatter(value: Tensor) -> Tensor:
    return _finite(value, "scatter", "prior_mean and the prior precision")


def _finite(value: Tensor, what: str, of: str) -> Tensor:
    """Return a term of the evidence. Raise NumericalError if it is NaN or infinite."""
    if not value.isfinite():
        raise NumericalError(
            f"the {what} of the evidence is {float(value.detach())}: {of} are too large or too small. Choose "
            "values nearer to 1."
        )
    return value


def added(left: Sums, right: Sums) -> Sums:
    """Return the sums of two sets of data together. Raise InputError if their shapes differ."""
    shapes = [{key: value.shape for key, value in sums.items()} for sums in (left, right)]
    differ = [key for key in {**left, **right} if shapes[0].get(key) != shapes[1].get(key)]
    if differ:
        names = ", ".join(sorted({key.rpartition("/")[0] or key for key in differ})[:3])
        raise InputError(
            f"the sums of {names} have different shapes: the two sets of data use these weights in different ways "
            "(with another number of rows?). Fit all data at once."
        )
    return {key: left[key] + right[key] for key in left}
