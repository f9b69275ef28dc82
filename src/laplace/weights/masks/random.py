"""A subnetwork of weights drawn at random."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from laplace.checks import generator_or_none
from laplace.weights.masks.base import ScoreMask
from laplace.weights.selection import trainable_of


class RandomSubnetMask(ScoreMask):
    """Each weight as likely as any other.

    Args:
        model: the trained network.
        n_params_subnet: how many weights are chosen.
        generator: what is drawn from; torch's own if left out.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int, generator: torch.Generator | None = None) -> None:
        super().__init__(model, n_params_subnet)
        self.generator = generator_or_none(generator)

    def scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        total = sum(p.numel() for _, p in trainable_of(self.model))
        device = None if self.generator is None else self.generator.device
        return torch.rand(total, generator=self.generator, dtype=torch.float64, device=device)
