"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.classes import (
    BaseLaplace,
    DiagLaplace,
    FullLaplace,
    KronLaplace,
    LowRankLaplace,
    ParametricLaplace,
)
from laplace.compat.functional import ELLA, BaseFunctionalLaplace, FunctionalLaplace, VaLLA

__all__ = [
    "ELLA",
    "BaseFunctionalLaplace",
    "BaseLaplace",
    "DiagLaplace",
    "FullLaplace",
    "FunctionalLaplace",
    "KronLaplace",
    "LowRankLaplace",
    "ParametricLaplace",
    "VaLLA",
]
