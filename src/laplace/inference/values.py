"""Hold the values of a Laplace approximation: sums over the data, the prior, the noise and the temperatures.

    prior_precision(la), set_prior_precision(la, 2.0)

`Laplace` holds a `Runner` and one `Values`. The functions here read and replace parts of it; `Laplace` binds them as
its properties. Setting a value never changes one that somebody else holds: the whole is replaced.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from laplace.checks import one_positive, positive, shown
from laplace.errors import NotFittedError, OptionError, UnsupportedError
from laplace.inference.rereading import Rereading
from laplace.inference.runner import Runner
from laplace.keywords import refuse_unknown_keywords
from laplace.linalg.autocast import plainly
from laplace.linalg.one_number import OneNumber
from laplace.network.loaders import training_data as loader_of
from laplace.posterior.posterior import Fit, Posterior
from laplace.posterior.task_prior import prior_of
from laplace.priors import Prior
from laplace.priors.gaussian import GaussianPrior, own


@dataclass(frozen=True)
class Entry:
    """Holds a posterior together with the values that it was made of."""

    made_of: tuple[Fit, Prior, Tensor, float]
    versions: tuple[int, ...]  # of tensors that a user may change in place
    posterior: Posterior


@dataclass
class Cache:
    """Keeps the last posterior. Threads may share it, so its entry is replaced as a whole."""

    entry: Entry | None = None


@dataclass(frozen=True)
class Values:
    """Holds everything about a Laplace approximation that is neither the network nor an option.

    Attributes:
        prior: the prior, with what earlier tasks left.
        sigma: the level of all outputs' noise, ().
        temperature: T of p(D given theta)^(1/T).
        softmax_temperature: T of p(y given f / T).
        fit: the sums over the data; None before `fit`.
        training_data: what `fit` was given; None if it cannot be read again.
        tuning_data: the labelled data by whose scores the values were last tuned or calibrated; None if there was none.
        cache: the last posterior of these values.
    """

    prior: Prior
    sigma: Tensor
    temperature: float
    softmax_temperature: float
    fit: Fit | None = None
    training_data: Iterable[Any] | None = None
    tuning_data: Iterable[Any] | None = None
    cache: Cache = field(default_factory=Cache, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        runner: Runner,
        prior: Prior,
        sigma_noise: Any,
        temperature: Any,
        softmax_temperature: Any,
        before: Values | None = None,
    ) -> Values:
        """Check the values that a user gave. The outputs' noise relative to each other goes to the likelihood.

        After a fit, when there were values `before`, that relation is fixed.
        """
        temperature = one_positive(temperature, "temperature")
        softmax_temperature = _checked_softmax_temperature(runner, softmax_temperature)
        prior.require_structure(runner.spec.structure.takes)
        fitted = before is not None and before.fit is not None
        return cls(prior, _level_of(runner, sigma_noise, fitted), temperature, softmax_temperature)

    def copied(self) -> Values:
        """Return the same values for another object, with a cache of its own and without references to data."""
        values = replace(self, training_data=None, tuning_data=None, cache=copy.copy(self.cache))
        if self.fit is None or self.fit.training is None:
            return values
        return replace(values, fit=replace(self.fit, training=None), cache=Cache())  # the cache leads to the data

    def to(self, device: torch.device) -> Values:
        """Return the same values on `device`."""
        fit = None if self.fit is None else self.fit.to(device)
        return replace(self, fit=fit, prior=self.prior.to(device), sigma=self.sigma.to(device))


class Holder(Protocol):
    """Holds a network with its options, and values that may be replaced. `Laplace` is one."""

    runner: Runner
    values: Values


# ---- the posterior --------------------------------------------------------------------------------------------------


def posterior(la: Holder) -> Posterior:
    """Return the Gaussian at the current hyperparameters, kept until one of them changes."""
    values = la.values
    if values.fit is None:
        raise NotFittedError("this posterior has seen no data. Call la.fit(train_loader) first.")
    made_of = (values.fit, values.prior, values.sigma, values.temperature)
    tensors = (*values.prior.tensors, values.sigma)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return Posterior(*made_of)  # its graph belongs to the caller
    versions, entry = tuple(t._version for t in tensors), values.cache.entry
    if entry is None or entry.versions != versions or not all(map(operator.is_, entry.made_of, made_of)):
        entry = values.cache.entry = Entry(made_of, versions, Posterior(*made_of).detached())
        _notice_clipped(la.runner, entry.posterior)
    return entry.posterior


def is_fitted(la: Holder) -> bool:
    """Return whether the posterior has seen data."""
    return la.values.fit is not None


def training_data(la: Holder) -> Iterable[Any] | None:
    """Return a reference to the data of `fit`, for tuning. It is not part of files, pickles and copies.

    None if it was an iterator, or was added to earlier data.
    """
    return la.values.training_data


def tuning_data(source: object) -> Iterable[Any] | None:
    """Return a reference to the data that was last tuned or calibrated on; None for other sources than a posterior."""
    return getattr(getattr(source, "values", None), "tuning_data", None)


@refuse_unknown_keywords
def attach_data(la: Holder, /, train_loader: Any, y: Any = None, *, batch_size: int | None = None) -> None:
    """Give hessian_structure='matrix_free' its training data again, after a file, a state, a pickle or a copy.

    Args:
        train_loader: what `fit` was given: the same examples, in batches that may be others.
        y: the labels, if `train_loader` is the inputs of all data.
        batch_size: of a dataset or of inputs and labels, examples in a batch.

    Raises:
        NotFittedError: there are no sums yet.
        UnsupportedError: the structure does not read its data again, or the network has changed since the fit.
        InputError: the loader can be read only once.
    """
    fit = posterior(la).fit
    if not fit.structure.rereads:
        raise UnsupportedError(
            f"hessian_structure={fit.structure.name!r} does not read its training data again: there is nothing to "
            "attach. la.predict and the evidence work without it."
        )
    loader, _ = loader_of(train_loader, True, y, batch_size, None)
    training = Rereading.of(la.runner, loader, fit)
    la.values = replace(la.values, fit=replace(fit, training=training), training_data=loader)


@refuse_unknown_keywords
@plainly
def log_marginal_likelihood(
    la: Holder, /, prior_precision: float | Tensor | None = None, sigma_noise: float | Tensor | None = None
) -> Tensor:
    """Return the log evidence, differentiable in both arguments; values that are given are kept, as if set.

    Args:
        prior_precision: one number, one per parameter tensor, or one per weight; the current one by default.
        sigma_noise: the noise of a regression; the current one by default.

    Returns:
        A scalar, float64. Larger is better.

    Raises:
        NotFittedError: `fit` was not called yet.
        OptionError: a value that is not positive, or of another length.
        NumericalError: a posterior precision that is not positive definite.
    """
    before = la.values, la.runner.spec
    try:
        if sigma_noise is not None:
            set_sigma_noise(la, sigma_noise)
        if prior_precision is not None:
            set_prior_precision(la, prior_precision)
        return posterior(la).log_evidence
    except BaseException:
        la.values, la.runner.spec = before
        raise


# ---- the prior ------------------------------------------------------------------------------------------------------


def prior(la: Holder) -> Prior:
    """Return the prior, including the curvature of earlier tasks. Setting it needs no refit."""
    return la.values.prior


def set_prior(la: Holder, value: Prior) -> None:
    """Replace the prior."""
    structure = la.runner.spec.structure
    new = prior_of(value, 1.0, 0.0, structure.described)
    new.require_structure(structure.takes)
    _replace_prior(la, new)


def prior_precision(la: Holder) -> Tensor:
    """Return a scalar, one value per parameter tensor, or one per weight. Setting it needs no refit.

    A scalar can be indexed as a vector of one number: `la.prior_precision[0]`. None if the prior is not a Gaussian of
    independent weights: see `prior`, `prior.hyperparameters` and `prior_precision_diag`.
    """
    found = la.values.prior
    return OneNumber.of(found.precision) if isinstance(found, GaussianPrior) else None  # type: ignore[return-value]


def set_prior_precision(la: Holder, value: float | Tensor) -> None:
    """Replace the prior's precision."""
    _replace_prior(la, _gaussian_prior(la).with_precision(value))


def prior_mean(la: Holder) -> Tensor:
    """Return the prior's mean, a scalar or one value per weight, or None if it has none. Setting it needs no refit."""
    return getattr(la.values.prior, "mean", None)  # type: ignore[return-value]


def set_prior_mean(la: Holder, value: float | Tensor) -> None:
    """Replace the prior's mean."""
    _replace_prior(la, la.values.prior.with_mean(value))


def _replace_prior(la: Holder, new: Prior) -> None:
    if la.values.fit is not None:
        new.check(la.values.fit.layout, la.runner.spec.structure.takes)
    la.values = replace(la.values, prior=new)


def _gaussian_prior(la: Holder) -> GaussianPrior:
    found = la.values.prior
    if isinstance(found, GaussianPrior):
        return found
    raise UnsupportedError(
        f"the prior is {found}, which has no prior_precision. There is: la.prior.hyperparameters, "
        "la.prior_precision_diag (of -d2 log p at the weights), and la.prior = ... to set another."
    )


def _notice_clipped(runner: Runner, made: Posterior) -> None:
    """Warn once where the curvature of the prior was not positive."""
    if made.prior.quadratic or not made.prior_clipped.count:
        return
    clipped, prior = made.prior_clipped, made.prior
    named = ", ".join(prior.hyperparameters) or "its constants"
    remedy = "a larger scale has fewer" if "scale" in prior.hyperparameters else f"other values of {named} may help"
    runner.warn_once(
        "prior_clipped",
        f"-d2 log p of {prior} has {clipped.count} negative eigenvalues at the weights, the lowest "
        f"{clipped.lowest:.2g} of the largest; they are set to zero, so that only the data limits these weights. "
        f"See la.prior_clipped; {remedy}.",
    )


# ---- the noise ------------------------------------------------------------------------------------------------------


def sigma_noise(la: Holder) -> Tensor:
    """Return the standard deviation of the observation noise (regression). Setting it needs no refit.

    One number, or one per output. Of a vector, fit takes in the relation of the outputs' noise to each other; after
    that, one number sets the level of all (their geometric mean), and so does tuning.
    """
    return OneNumber.of(la.runner.spec.likelihood.noise_at(la.values.sigma))


def set_sigma_noise(la: Holder, value: float | Tensor) -> None:
    """Replace the noise."""
    la.values = replace(la.values, sigma=_level_of(la.runner, value, la.values.fit is not None))


def noise_level(la: Holder) -> Tensor:
    """Return the level of all outputs' noise, ()."""
    return la.values.sigma


def _level_of(runner: Runner, value: Any, fitted: bool) -> Tensor:  # ()
    """Return the level of the noise. The outputs' noise relative to each other is the likelihood's."""
    before = runner.spec.likelihood
    likelihood, level = before.with_noise(own(positive(value, "sigma_noise")))
    if likelihood is not before and fitted:
        raise OptionError(
            "the noise of the outputs relative to each other is part of the curvature; after fit, sigma_noise can "
            "be scaled as a whole: give one number. For another relation make a new Laplace(..., sigma_noise=...)."
        )
    if likelihood is not before:
        runner.spec = replace(runner.spec, likelihood=likelihood)
    return level


# ---- the temperatures -----------------------------------------------------------------------------------------------


def temperature(la: Holder) -> float:
    """Return T of p(D given theta)^(1/T), the likelihood's: it changes the posterior. Setting it needs no refit."""
    return la.values.temperature


def set_temperature(la: Holder, value: float) -> None:
    """Replace the likelihood's temperature."""
    la.values = replace(la.values, temperature=one_positive(value, "temperature"))


def softmax_temperature(la: Holder) -> float:
    """Return T of p(y given f / T), which divides the logits of predictions, N(f / T, S / T^2). Needs no refit."""
    return la.values.softmax_temperature


def set_softmax_temperature(la: Holder, value: float) -> None:
    """Replace the softmax temperature."""
    la.values = replace(la.values, softmax_temperature=_checked_softmax_temperature(la.runner, value))


def _checked_softmax_temperature(runner: Runner, value: Any) -> float:
    number = one_positive(value, "softmax_temperature")
    runner.spec.likelihood.check_softmax_temperature(number)
    return number


# ---- the device -----------------------------------------------------------------------------------------------------


def device_named(value: Any) -> torch.device:
    """Return a device of torch.

    Raises:
        OptionError: torch has no such device here.
    """
    try:
        return torch.device(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"device={shown(value)} is not a torch device here; write 'cpu' or 'cuda'. ({error})"
        ) from None
