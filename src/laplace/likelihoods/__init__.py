"""Likelihoods p(y given f): one file each, looked up by name."""

from __future__ import annotations

from typing import Final

from laplace.checks import choice, options_of, shown
from laplace.errors import OptionError
from laplace.likelihoods.base import Likelihood, Targets
from laplace.likelihoods.bernoulli import Bernoulli, Multilabel
from laplace.likelihoods.categorical import Categorical
from laplace.likelihoods.custom import ByAutograd, from_log_prob
from laplace.likelihoods.gaussian import Gaussian, GivenNoise
from laplace.likelihoods.heteroscedastic import HeteroscedasticGaussian
from laplace.likelihoods.ordinal import Ordinal
from laplace.likelihoods.poisson import Poisson
from laplace.likelihoods.preference import Preference

LIKELIHOODS: Final[dict[str, type[Likelihood]]] = {
    made.name: made
    for made in (
        Gaussian,
        Categorical,
        Preference,
        Bernoulli,
        Multilabel,
        Poisson,
        HeteroscedasticGaussian,
        GivenNoise,
        Ordinal,
    )
}


def likelihood_named(likelihood: Likelihood | str) -> Likelihood:
    """Return the likelihood with this name; a likelihood object is returned unchanged.

    Args:
        likelihood: A likelihood object, or a name in `LIKELIHOODS`.

    Returns:
        A likelihood object.

    Raises:
        OptionError: the name is unknown, or the object's `options` are not its attributes.
    """
    if isinstance(likelihood, Likelihood):
        options_of(likelihood)
        return likelihood
    if isinstance(likelihood, type) and issubclass(likelihood, Likelihood):
        raise OptionError(f"likelihood={likelihood.__name__} is a class; give an object: {likelihood.__name__}().")
    if callable(likelihood):
        raise OptionError(
            f"likelihood={shown(likelihood)} is a function; write from_log_prob(fn) for log p(y given f)."
        )
    if str(likelihood) == Ordinal.name:
        return Ordinal()  # which says what it needs
    names = [name for name in LIKELIHOODS if name != Ordinal.name]
    return LIKELIHOODS[choice(likelihood, names, "likelihood", "Ordinal(K), from_log_prob(fn)")]()


__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "ByAutograd",
    "Categorical",
    "Gaussian",
    "GivenNoise",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Multilabel",
    "Ordinal",
    "Poisson",
    "Preference",
    "Targets",
    "from_log_prob",
    "likelihood_named",
]


def __dir__() -> list[str]:
    return __all__
