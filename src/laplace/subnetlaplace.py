"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.classes import (
    DiagSubnetLaplace,
    FullSubnetLaplace,
    SubnetLaplace,
)

__all__ = [
    "DiagSubnetLaplace",
    "FullSubnetLaplace",
    "SubnetLaplace",
]
