"""Select the weights that are furthest from zero."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laplace.compat.masks.base import ScoreBasedSubnetMask
from laplace.weights.selection import trainable_of


class LargestMagnitudeSubnetMask(ScoreBasedSubnetMask):
    """Selects the weights with the largest absolute value.

    Args:
        model: The trained network.
        n_params_subnet: How many weights to select.
    """

    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        return torch.cat([p.detach().abs().flatten() for _, p in trainable_of(self.model)])
