"""A likelihood of one's own from its log-density alone: exponential waiting times with rate exp(-f)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import CheckpointError
from laplace.likelihoods import ByAutograd


class Exponential(ByAutograd):
    def log_prob(self, f, y, sigma=1.0):
        return (-f - y * torch.exp(-f)).sum(-1)

    def inverse_link(self, f):
        return f.exp()


def test_a_likelihood_fits_predicts_prints_tunes_saves_and_loads(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x, y = torch.randn(40, 3).double(), torch.rand(40, 1).double()
    la = Laplace(model, Exponential(), "all", "full").fit([(x, y)])
    lam = (y * torch.exp(-model(x))).detach()  # -d2 log p / df2
    jac = torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(model(a), model.parameters())]) for a in x])
    torch.testing.assert_close(la.H, (jac * lam).T @ jac)
    f, s = model(x).detach(), la.functional_variance(jac.unsqueeze(1)).squeeze(2)
    torch.testing.assert_close(la(x, n_samples=20_000), (f + s / 2).exp(), rtol=0.2, atol=0)
    assert la.tune().converged
    assert la.tune(method="validation", val_loader=[(x, y)]).score < 1
    assert "Exponential" in repr(la)
    assert len(la.coverage()) == 4
    la.save(tmp_path / "mine")
    loaded = Laplace.load(tmp_path / "mine", model, likelihood=Exponential())
    assert torch.equal(loaded.log_marginal_likelihood(), la.log_marginal_likelihood())
    with pytest.raises(CheckpointError, match=r"your own likelihood, 'Exponential'.*likelihood="):
        Laplace.load(tmp_path / "mine", model)
