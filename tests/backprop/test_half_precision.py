"""Networks in half precision, or cast to it by autocast: the audit still tells right rules from wrong ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oracle
from exact import labels
from laplace import Laplace
from laplace.errors import ModelError
from traps import Net, inputs, seeded
from zoo import build

HALF = [torch.bfloat16, torch.float16]


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_rule_that_misses_a_use_is_noticed(dtype):
    def forward(self, x):
        return self.head(torch.tanh(self.a(x) - 2 * F.linear(torch.tanh(x), self.a.weight)))

    model = seeded(lambda: Net(forward, a=nn.Linear(4, 5), head=nn.Linear(5, 2))).eval()
    x, y = inputs(12, 4), labels("regression", 12, 2)
    expected = oracle.curvature_all(model, [k for k, _ in model.named_parameters()], x, y, "regression")[1]
    la = Laplace(model.to(dtype), "regression", "all", "diag").fit([(x.to(dtype), y)])
    assert off(la.H, expected.diagonal()) < 0.01


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_examples_that_interact_are_refused(dtype):
    def forward(self, x):
        h = self.a(x)
        return self.head(torch.tanh(h - h.mean(0)))

    model = seeded(lambda: Net(forward, a=nn.Linear(4, 5), head=nn.Linear(5, 2))).to(dtype)
    with pytest.raises(ModelError, match="examples interact"):
        Laplace(model, "regression", "all", "diag").fit([(inputs(9, 4).to(dtype), labels("regression", 9, 2))])


@pytest.mark.parametrize("mode", ["bfloat16", "float16", "autocast"])
@pytest.mark.parametrize("network", ["mlp", "conv", "residual", "transformer", "recurrent"])
def test_half_precision_has_the_rules_and_nearly_the_numbers_of_single(network, mode):
    model, x, y, _ = build(network, "classification")
    model, x = model.float(), x.float()
    single = Laplace(model, "classification", "all", "diag").fit([(x, y)])
    if mode == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = Laplace(model, "classification", "all", "diag").fit([(x, y)])
            predicted = half(x)
    else:
        dtype = getattr(torch, mode)
        half = Laplace(copy.deepcopy(model).to(dtype), "classification", "all", "diag").fit([(x.to(dtype), y)])
        predicted = half(x.to(dtype))
    assert [row.rule for row in half.coverage().rows] == [row.rule for row in single.coverage().rows]
    assert off(half.H, single.H) < 0.02
    assert off(predicted, single(x)) < 0.05


@pytest.mark.parametrize("kind", ["sequence", "conv", "strided"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_second_moments_of_large_inputs_do_not_overflow(kind, dtype):
    def pooled(self, x):
        h = torch.tanh(self.a(x))
        return self.head(h.mean(1) if kind == "sequence" else h.flatten(2).mean(2))

    layers = {
        "sequence": lambda: nn.Linear(8, 5),
        "conv": lambda: nn.Conv2d(2, 5, 3, padding=1),
        "strided": lambda: nn.Conv2d(2, 5, 3, stride=2),
    }
    model = seeded(lambda: Net(pooled, a=layers[kind](), head=nn.Linear(5, 2))).to(dtype)
    x = (20 * inputs(*((64, 20, 8) if kind == "sequence" else (64, 2, 12, 12)))).to(dtype)
    y = labels("regression", 64, 2)
    factor = Laplace(model, "regression", "all", "kron").fit([(x, y)]).posterior.fit.sums["a.weight/A"]
    expected = Laplace(model.double(), "regression", "all", "kron").fit([(x.double(), y)])
    assert off(factor, expected.posterior.fit.sums["a.weight/A"]) < 1e-5
