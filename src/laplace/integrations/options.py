"""Refuse wrong options of `Laplace` before a training begins, and not after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from laplace.laplace import Laplace

_OF_NETWORK = ("subset_of_weights", "subnetwork_indices", "last_layer_name")  # which only the network can tell


def require_options(likelihood: Any, options: Mapping[str, Any]) -> None:
    """Refuse a likelihood or options that no network has, as `Laplace` does.

    Args:
        likelihood: as `Laplace` takes it.
        options: its further options, by name.
    """
    known = {name: value for name, value in options.items() if name not in _OF_NETWORK}
    Laplace(nn.Linear(1, 1), likelihood, **known)
