"""A subnetwork of the weights that are furthest from zero."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laplace.weights.masks.base import ScoreMask
from laplace.weights.selection import trainable_of


class LargestMagnitudeSubnetMask(ScoreMask):
    """The weights of largest absolute value.

    Args:
        model: the trained network.
        n_params_subnet: how many weights are chosen.
    """

    def scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        return torch.cat([p.detach().abs().flatten() for _, p in trainable_of(self.model)])
