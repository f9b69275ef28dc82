"""p(y given f): one file each, found by name."""

from __future__ import annotations

from typing import Final

from laplace.errors import choice
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.categorical import Categorical
from laplace.likelihoods.gaussian import Gaussian

LIKELIHOODS: Final[dict[str, type[Likelihood]]] = {"regression": Gaussian, "classification": Categorical}


def likelihood_named(likelihood: Likelihood | str) -> Likelihood:
    """The likelihood itself, or the one of that name."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    return LIKELIHOODS[choice(likelihood, LIKELIHOODS, "likelihood", to_come=("reward_modeling",))]()


__all__ = ["LIKELIHOODS", "Categorical", "Gaussian", "Likelihood", "likelihood_named"]
