"""p(y given f): one file each, found by name."""

from __future__ import annotations

from typing import Final

from laplace.checks import choice
from laplace.likelihoods.base import Likelihood, Targets
from laplace.likelihoods.bernoulli import Bernoulli, Multilabel
from laplace.likelihoods.categorical import Categorical
from laplace.likelihoods.custom import from_log_prob
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
    """The likelihood itself, or the one of that name.

    Args:
        likelihood: an object or a name.

    Raises:
        OptionError: a name that there is not.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    return LIKELIHOODS[choice(likelihood, LIKELIHOODS, "likelihood")]()


__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
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
