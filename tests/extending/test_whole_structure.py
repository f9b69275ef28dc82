"""A structure of all weights together: the curvature as one number times the identity, tr(H) / P."""

from __future__ import annotations

import torch
from torch import nn

from laplace import Laplace
from laplace.structures import BlockCurvature, DiagBlock, Structure


class Isotropic(Structure):
    def sums(self, moments, layout):
        return {"trace": sum(of.squares().double().sum() for of in moments.parameters)}

    def curvature(self, sums, layout, dtype):
        mean = (sums["trace"] / layout.n_params).to(dtype)
        blocks = zip(layout.sizes, layout.shapes, strict=True)
        return BlockCurvature([DiagBlock(mean.expand(size), shape) for size, shape in blocks], layout, self.budget)

    def form(self, own, whole):
        return "one number"


def test_a_whole_structure_fits_predicts_prints_tunes_saves_and_loads(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.randn(20, 2).double()
    full = Laplace(model, "regression", "all", "full").fit([(x, y)])
    la = Laplace(model, "regression", "all", Isotropic()).fit([(x[:7], y[:7]), (x[7:], y[7:])])
    torch.testing.assert_close(la.H, full.H.diagonal().mean().expand(la.n_params))
    assert la.tune("prior_precision", "sigma_noise").converged
    assert (la + la).n_data == 40
    assert "Isotropic" in repr(la)
    assert "one number" in repr(la.coverage())
    la.save(tmp_path / "mine")
    loaded = Laplace.load(tmp_path / "mine", model, hessian_structure=Isotropic())
    assert torch.equal(loaded(x)[1], la(x)[1])
    assert torch.equal(loaded.H, la.H)
