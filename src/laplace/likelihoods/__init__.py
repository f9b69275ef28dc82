"""Likelihoods p(y given f): one file each, looked up by name."""

from __future__ import annotations

from typing import Final

from laplace.checks import choice
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
        OptionError: the name is unknown.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    return LIKELIHOODS[choice(likelihood, LIKELIHOODS, "likelihood")]()


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
