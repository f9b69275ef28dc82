"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.classes import (
    DiagLLLaplace,
    FullLLLaplace,
    KronLLLaplace,
    LLLaplace,
)
from laplace.compat.functional import FunctionalLLLaplace

__all__ = [
    "DiagLLLaplace",
    "FullLLLaplace",
    "FunctionalLLLaplace",
    "KronLLLaplace",
    "LLLaplace",
]
