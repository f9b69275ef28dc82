"""Vectors are sent back without importing what takes longer than a fit, and give the numbers of autograd's own way."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from laplace.backprop import sending

PROGRAM = """
    import sys
    import torch
    from torch import nn
    from laplace import Laplace

    def absent(what):
        heavy = [name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules]
        assert not heavy, (what, heavy)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.conv = nn.Linear(6, 8), nn.LayerNorm(8), nn.Conv1d(1, 2, 3)
            self.head = nn.Linear(12, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.conv(self.norm(self.a(x)).unsqueeze(1)).flatten(1)))

    x, y = torch.randn(40, 6), torch.randint(3, (40,))
    loader = [(x[:20], y[:20]), (x[20:], y[20:])]
    mlp = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    absent("import")
    for model in (mlp, Net()):
        for structure in ("kron", "diag", "full", "ekfac", "lowrank"):
            la = Laplace(model, "classification", "all", structure).fit(loader)
            la(x)
            la(x, pred_type="nn")
            absent(structure)
        la.optimize_prior_precision()
        absent("tuning")
    Laplace(mlp, "classification", "all", "full", curvature="hessian").fit(loader)
    absent("hessian")
"""


def test_a_fit_of_layers_with_rules_of_their_own_imports_nothing_heavy():
    program = textwrap.dedent(PROGRAM)
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def lightly(monkeypatch) -> None:
    """As if nothing had imported it."""
    monkeypatch.setattr(sending, "_HEAVY", "no such module")


def graph(dtype=torch.float64) -> tuple[Tensor, list, Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    x = torch.randn(5, 3, dtype=dtype, requires_grad=True)
    h = layers[0](x)
    f = layers[2](torch.tanh(h))
    apart = torch.ones(2, dtype=dtype, requires_grad=True) * 2
    return f, [get_gradient_edge(t) for t in (h, f, apart)], x


def same(one, other) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batched", [False, True])
def test_both_ways_give_the_same_numbers(batched, dtype, lightly):
    f, edges, _ = graph(dtype)
    v = torch.randn(*((3,) if batched else ()), *f.shape).to(dtype)
    expected = torch.autograd.grad(f, edges, v, is_grads_batched=batched, retain_graph=True, allow_unused=True)
    for _ in range(2):  # the graph is kept
        assert same(sending.sent_back(f, edges, v, batched), expected)
    with torch.no_grad():
        assert same(sending.sent_back(f, edges, v, batched), expected)


@pytest.mark.parametrize("batched", [False, True])
def test_what_was_sent_back_can_be_differentiated(batched, lightly):
    f, edges, x = graph()
    v = torch.randn(*((3,) if batched else ()), *f.shape, dtype=f.dtype, requires_grad=True)
    expected = torch.autograd.grad(f, edges[:1], v, is_grads_batched=batched, create_graph=True)[0]
    found = sending.sent_back(f, edges[:1], v, batched, create_graph=True)[0]
    assert found is not None
    for one in (x, v):
        wanted = torch.autograd.grad(expected.sin().sum(), one, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), one, retain_graph=True), wanted)


def test_an_operation_that_cannot_be_batched_is_a_runtime_error(lightly):
    class ByNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return torch.from_numpy(2 * g.numpy())

    x = torch.randn(5, 2, requires_grad=True)
    f = ByNumpy.apply(x * 1)
    with pytest.raises(RuntimeError):
        sending.sent_back(f, [x], torch.randn(3, 5, 2), batched=True)
    assert sending.sent_back(f, [x], torch.ones(5, 2))[0] is not None
