"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.swag import (
    fit_diagonal_swag_var,
)

__all__ = [
    "fit_diagonal_swag_var",
]
