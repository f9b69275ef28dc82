"""A choice of weights of one's own: the smallest tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import CheckpointError
from laplace.weights import Choice, Layout, Selection


class Smallest(Choice):
    def __init__(self, count):
        self.count, self.label = count, f"smallest({count})"

    def select(self, model):
        named = list(model.named_parameters())
        chosen = {name for name, _ in sorted(named, key=lambda pair: pair[1].numel())[: self.count]}
        return Selection(Layout.of((name, p) for name, p in named if name in chosen))


def test_a_subset_fits_predicts_prints_saves_and_loads(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.randint(2, (20,))
    la = Laplace(model, "classification", Smallest(2), "full").fit([(x, y)])
    named = Laplace(model, "classification", ["0.bias", "2.bias"], "full").fit([(x, y)])
    torch.testing.assert_close(la(x), named(x))
    assert "smallest(2): 0.bias, 2.bias (7 weights)" in repr(la)
    assert len(la.coverage()) == 2
    la.save(tmp_path / "mine")
    assert torch.equal(Laplace.load(tmp_path / "mine", model, subset_of_weights=Smallest(2))(x), la(x))
    with pytest.raises(CheckpointError, match=r"your own subset of weights, 'smallest\(2\)'.*subset_of_weights="):
        Laplace.load(tmp_path / "mine", model)
