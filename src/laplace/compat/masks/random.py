"""Select weights at random."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from laplace.checks import generator_or_none
from laplace.compat.masks.base import ScoreBasedSubnetMask
from laplace.weights.selection import trainable_of


class RandomSubnetMask(ScoreBasedSubnetMask):
    """Selects weights at random, each with the same probability.

    Args:
        model: The trained network.
        n_params_subnet: How many weights to select.
        generator: The random generator. torch's global one if left out.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int, generator: torch.Generator | None = None) -> None:
        super().__init__(model, n_params_subnet)
        self.generator = generator_or_none(generator)

    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        total = sum(p.numel() for _, p in trainable_of(self.model))
        device = None if self.generator is None else self.generator.device
        return torch.rand(total, generator=self.generator, dtype=torch.float64, device=device)
