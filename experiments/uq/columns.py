"""Networks on features of their own: each last layer reads its own columns of one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Columns(nn.Module):
    """The last layer of a network. It reads the features that its own network made of an image."""

    def __init__(self, linear: nn.Linear, start: int) -> None:
        super().__init__()
        self.linear, self.start = linear, start

    def forward(self, x: Tensor) -> Tensor:  # (N, all features) -> (N, C)
        return self.linear(x[:, self.start : self.start + self.linear.in_features])


def side_by_side(heads: Sequence[nn.Linear]) -> list[Columns]:
    """Return the heads as networks of all features, which are joined in the order of the heads."""
    starts = torch.tensor([0, *(head.in_features for head in heads)]).cumsum(0).tolist()
    return [Columns(head, start).eval() for head, start in zip(heads, starts[:-1], strict=True)]
