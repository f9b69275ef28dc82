"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.backends import (
    AsdlEF,
    AsdlGGN,
    AsdlHessian,
    AsdlInterface,
)

__all__ = [
    "AsdlEF",
    "AsdlGGN",
    "AsdlHessian",
    "AsdlInterface",
]
