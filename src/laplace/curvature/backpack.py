"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.backends import (
    BackPackEF,
    BackPackGGN,
    BackPackInterface,
)

__all__ = [
    "BackPackEF",
    "BackPackGGN",
    "BackPackInterface",
]
