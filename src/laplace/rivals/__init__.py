"""Rivals of a Laplace approximation, which predict in the same way: ensembles, mixtures, MC dropout, SWAG."""

from laplace.rivals.base import Rescaled, Rival
from laplace.rivals.dropout import MCDropout
from laplace.rivals.ensemble import Ensemble
from laplace.rivals.mixture import Mixture
from laplace.rivals.swag import SWAG

__all__ = ["SWAG", "Ensemble", "MCDropout", "Mixture", "Rescaled", "Rival"]


def __dir__() -> list[str]:
    return __all__
