"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.classes import (
    ELLA,
    BaseFunctionalLaplace,
    BaseLaplace,
    DiagLaplace,
    FullLaplace,
    FunctionalLaplace,
    KronLaplace,
    LowRankLaplace,
    ParametricLaplace,
)

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
]
