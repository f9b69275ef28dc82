"""Small fitted posteriors with test data, one for each kind of label, for the tests of reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from laplace import Laplace

KINDS = {"classes": "classification", "labels": "multilabel", "regression": "regression", "counts": "poisson"}
LOSSES = {
    "classes": nn.functional.cross_entropy,
    "labels": nn.functional.binary_cross_entropy_with_logits,
    "regression": nn.functional.mse_loss,
    "counts": nn.functional.poisson_nll_loss,
}


@dataclass
class Given:
    """A posterior and the data of its report."""

    la: Laplace
    x: Tensor
    y: Tensor
    val: list[Any]
    train: list[Any]
    outside: Tensor
    further: dict[str, Any] = field(default_factory=dict)

    @property
    def test(self) -> list[Any]:
        """Ragged batches."""
        return list(zip(self.x.split(90), self.y.split(90), strict=True))


def labels_of(kind: str, x: Tensor) -> Tensor:
    if kind == "classes":
        return (x[:, :3] + 0.5 * torch.randn(len(x), 3)).argmax(-1)
    if kind == "labels":
        return (x[:, :3] + 0.5 * torch.randn(len(x), 3) > 0).float()
    if kind == "counts":
        return torch.poisson((0.6 * x[:, :1] + 1).exp())
    return x[:, :2].sin() + 0.3 * torch.randn(len(x), 2)


@cache
def given(kind: str) -> Given:
    torch.manual_seed(0)
    x = torch.randn(700, 4)
    y = labels_of(kind, x)
    outputs = y.shape[1] if y.dim() > 1 else 3
    model = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, outputs))
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        LOSSES[kind](model(x[:300]), y[:300]).backward()
        optimizer.step()
    train = [(x[:300], y[:300])]
    la = Laplace(model, KINDS[kind]).fit(train)
    la.tune()
    return Given(la, x[500:], y[500:], [(x[300:500], y[300:500])], train, 4 * torch.randn(120, 4))
