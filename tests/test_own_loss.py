"""The likelihood is compared with the loss that a network returns for its labels, and a difference is explained."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laplace import Categorical, Laplace
from laplace.errors import LaplaceWarning

N, C = 12, 3
WEIGHTS = [1.0, 4.0, 0.5]
LOSSES = {
    "plain": lambda f, y: F.cross_entropy(f, y),
    "sum": lambda f, y: F.cross_entropy(f, y, reduction="sum"),
    "smoothing": lambda f, y: F.cross_entropy(f, y, label_smoothing=0.1),
    "weights": lambda f, y: F.cross_entropy(f, y, weight=torch.tensor(WEIGHTS)),
    "auxiliary": lambda f, y: F.cross_entropy(f, y) + 0.01 * f.square().sum(),
    "squares": lambda f, y: F.mse_loss(f, y),
    "absolute": lambda f, y: F.l1_loss(f, y),
    "labels": lambda f, y: F.binary_cross_entropy_with_logits(f, y),
    "one of two": lambda f, y: F.mse_loss(f.squeeze(), y.to(f)),
}
KINDS = {
    "classes": torch.arange(N) % C,
    "numbers": torch.randn(N, C, generator=torch.Generator().manual_seed(1)),
    "multi-hot": torch.eye(C)[torch.arange(N) % C] + torch.eye(C)[0] * (torch.arange(N) % C == 1).unsqueeze(1),
}


class Net(nn.Module):
    def __init__(self, loss: str) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(7, 4), nn.Linear(4, C), loss

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        f = self.head(self.embed(input_ids).mean(1))
        return SimpleNamespace(logits=f, loss=None if labels is None else LOSSES[self.loss](f, labels))


def fitted(loss: str, likelihood: Any, kind: str) -> None:
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(7, (N, 5)), "labels": KINDS[kind]}
    parts = [{key: value[i : i + 6] for key, value in batch.items()} for i in (0, 6)]
    Laplace(Net(loss), likelihood, hessian_structure="diag").fit(parts)


AGREE = [
    ("plain", "classification", "classes"),
    ("sum", "classification", "classes"),
    ("plain", "classification", "multi-hot"),
    ("smoothing", Categorical(label_smoothing=0.1), "classes"),
    ("weights", Categorical(class_weights=WEIGHTS), "classes"),
    ("plain", Categorical(class_weights=WEIGHTS), "classes"),  # chosen so
    ("squares", "regression", "numbers"),
    ("labels", "multilabel", "multi-hot"),
]
DIFFER = [
    ("smoothing", "classification", "classes", r"smooths labels: write likelihood=Categorical\(label_smoothing=0\.1\)"),
    ("weights", "classification", "classes", r"weighs classes: write likelihood=Categorical\(class_weights="),
    ("auxiliary", "classification", "classes", r"has further terms"),
    ("labels", "classification", "multi-hot", r"It is that of likelihood='multilabel'"),
    ("squares", "multilabel", "multi-hot", r"It is that of likelihood='regression'"),
    ("absolute", "regression", "numbers", r"further terms"),
]


@pytest.mark.parametrize(("loss", "likelihood", "kind"), AGREE)
def test_nothing_is_said_where_both_agree(loss, likelihood, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error", LaplaceWarning)
        fitted(loss, likelihood, kind)


@pytest.mark.parametrize(("loss", "likelihood", "kind", "says"), DIFFER)
def test_a_difference_is_said_with_its_reason(loss, likelihood, kind, says):
    with pytest.warns(LaplaceWarning, match=rf"own loss on 5 examples is [\d.]+, and that of .*{says}") as said:
        fitted(loss, likelihood, kind)
    assert len(said) == 1


def test_pairs_are_not_compared():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LaplaceWarning)
        Laplace(Net("weights"), "classification").fit([({"input_ids": torch.randint(7, (N, 5))}, KINDS["classes"])])
