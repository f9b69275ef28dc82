"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.backends import (
    CurvlinopsEF,
    CurvlinopsGGN,
    CurvlinopsHessian,
    CurvlinopsInterface,
)

__all__ = [
    "CurvlinopsEF",
    "CurvlinopsGGN",
    "CurvlinopsHessian",
    "CurvlinopsInterface",
]
