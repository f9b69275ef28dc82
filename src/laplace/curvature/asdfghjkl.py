"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.backends import (
    AsdfghjklEF,
    AsdfghjklGGN,
    AsdfghjklHessian,
    AsdfghjklInterface,
)

__all__ = [
    "AsdfghjklEF",
    "AsdfghjklGGN",
    "AsdfghjklHessian",
    "AsdfghjklInterface",
]
