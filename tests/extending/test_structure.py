"""A structure of one's own: a variant of diag that keeps its sums under another key, with a floor under each value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import CheckpointError
from laplace.structures import BlockDiagonal, DiagBlock


class Floored(BlockDiagonal):
    options = ("floor",)

    def __init__(self, floor=0.0):
        self.floor = floor

    def block_sums(self, moments):
        return {"fisher": moments.squares()}

    def block(self, sums, shape, eigh):
        return DiagBlock(sums["fisher"].clamp(min=self.floor).to(eigh.dtype), shape)


def test_a_structure_fits_predicts_prints_tunes_saves_and_loads(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.randint(2, (20,))
    usual = Laplace(model, "classification", "all", "diag").fit([(x, y)])
    la = Laplace(model, "classification", "all", Floored(0.5)).fit([(x, y)])
    torch.testing.assert_close(la.H, usual.H.clamp(min=0.5))
    assert la.tune().converged
    assert "Floored, floor=0.5" in repr(la)
    assert "Floored" in repr(la.coverage())
    la.save(tmp_path / "mine")
    assert torch.equal(Laplace.load(tmp_path / "mine", model, hessian_structure=Floored(0.5))(x), la(x))
    with pytest.raises(CheckpointError, match=r"your own structure, 'Floored, floor=0.5'.*hessian_structure="):
        Laplace.load(tmp_path / "mine", model)
