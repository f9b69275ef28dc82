"""Batches in a new order every time they are read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class Shuffled:
    """Batches in a new order every time; only the first `n` examples of it."""

    def __init__(self, data: tuple[Tensor, Tensor], n: int, seed: int, batch: int) -> None:
        self.data, self.n, self.batch, self.order = data, n, batch, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.data
        for index in torch.randperm(len(x), generator=self.order)[: self.n].split(self.batch):
            yield x[index], y[index]
