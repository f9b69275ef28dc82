"""A rule for a layer of one's own: rows are scaled after a linear map."""

from __future__ import annotations

import torch
from torch import nn

import laplace
from laplace import Laplace
from laplace.layers import outer


class Scaled(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.ones(outputs))

    def forward(self, x):
        return x @ self.weight.T * self.scale


@laplace.register_rule(Scaled)
def scaled(layer, x, g):
    return {"weight": outer(x, g * layer.scale), "scale": g * (x @ layer.weight.T)}


def test_a_layer_rule_fits_predicts_prints_saves_and_loads(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.randn(20, 2).double()
    la = Laplace(model, "regression", "all", "full").fit([(x, y)])
    grads = [torch.autograd.grad(f, model.parameters(), retain_graph=True) for f in model(x).flatten()]
    jac = torch.stack([torch.cat([g.flatten() for g in each]) for each in grads])
    torch.testing.assert_close(la.H, jac.T @ jac)
    covariance = jac @ torch.linalg.inv(la.H + torch.eye(len(la.H)).double()) @ jac.T
    torch.testing.assert_close(la(x)[1].diagonal(dim1=1, dim2=2).flatten(), covariance.diagonal())
    assert "all: 0.weight, 0.scale, 2.weight, 2.bias (32 weights)" in repr(la)
    assert repr(la.coverage()).count("registered for Scaled") == 2
    la.save(tmp_path / "mine")
    assert torch.equal(Laplace.load(tmp_path / "mine", model)(x)[1], la(x)[1])
