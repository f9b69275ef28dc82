"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.backends import (
    CurvatureInterface,
    EFInterface,
    GGNInterface,
)

__all__ = [
    "CurvatureInterface",
    "EFInterface",
    "GGNInterface",
]
