"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.matrix import (
    Kron,
    KronDecomposed,
)

__all__ = [
    "Kron",
    "KronDecomposed",
]
