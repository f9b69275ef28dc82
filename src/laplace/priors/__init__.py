"""Define priors over the weights: `Laplace(model, ..., prior=StudentT(df=4, scale=0.1))`."""

from __future__ import annotations

from typing import Final

from laplace.priors.base import Prior
from laplace.priors.correlated import CorrelatedGaussian
from laplace.priors.custom import from_log_density
from laplace.priors.gaussian import GaussianPrior
from laplace.priors.independent import Independent, SmoothedLaplace, StudentT

PRIORS: Final[dict[str, type[Prior]]] = {
    prior.name: prior for prior in (GaussianPrior, StudentT, SmoothedLaplace, CorrelatedGaussian)
}
"""Priors by the names that saved files use."""

__all__ = [
    "PRIORS",
    "CorrelatedGaussian",
    "GaussianPrior",
    "Independent",
    "Prior",
    "SmoothedLaplace",
    "StudentT",
    "from_log_density",
]


def __dir__() -> list[str]:
    return __all__
