"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.metrics import (
    RunningNLLMetric,
)

__all__ = [
    "RunningNLLMetric",
]
