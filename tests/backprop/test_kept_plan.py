"""A second fit takes over the plan of the first, as long as its rules explain the network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace.backprop.network as network
from laplace import Laplace

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
DATA = [(X, Y)]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture
def plans(monkeypatch) -> list[int]:
    made: list[int] = []
    original = network.make_plan
    monkeypatch.setattr(network, "make_plan", lambda *args: made.append(1) or original(*args))
    return made


def _trained(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))


def _hooked(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda module, args, output: 2 * output)


def _swapped(model: nn.Sequential) -> None:
    model[2] = nn.Sequential(nn.Linear(5, 5), nn.ReLU())


def _replaced(model: nn.Sequential) -> None:
    layer = model[3]
    layer.forward = lambda x: nn.functional.linear(x.sin(), layer.weight, layer.bias)


@pytest.mark.parametrize("change", [None, _trained, _hooked, _swapped, _replaced])
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_second_fit_is_that_of_a_new_object(change, structure, plans):
    model = _model()
    la = Laplace(model, "classification", "all", structure).fit(DATA)
    assert len(plans) == 1
    if change is not None:
        change(model)
    la.fit(DATA)
    assert (len(plans) == 1) is (change in (None, _trained))
    new = Laplace(model, "classification", "all", structure).fit(DATA).posterior.fit.sums
    assert la.posterior.fit.sums.keys() == new.keys()
    for key, value in la.posterior.fit.sums.items():
        torch.testing.assert_close(value, new[key])
