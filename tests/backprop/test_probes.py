"""Trying a network out leaves no traces, takes little memory, and goes up where a module does not run alone."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, assert_exact, labels
from laplace import Laplace
from laplace.backprop import audit
from laplace.backprop.network import Network, NetworkForward
from traps import Net, inputs, seeded

# ---- inputs that are written to ------------------------------------------------------------------------------


def normalises(self, x):
    x.sub_(0.5).div_(2.0)
    return self.head(torch.tanh(self.a(x) * self.scale))


def normalised(self, x):
    return self.head(torch.tanh(self.a((x - 0.5) / 2.0) * self.scale))


def writing(forward) -> nn.Module:
    scale = nn.Parameter(torch.linspace(1, 2, 4))
    return seeded(lambda: Net(forward, scale=scale, a=nn.Linear(4, 4), head=nn.Linear(4, 2))).eval()


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_network_that_writes_to_its_input_sees_each_example_once(subset):
    x, y = inputs(11, 4), labels("regression", 11, 2)
    fits = [
        Laplace(writing(forward), "regression", subset, "full").fit([(x[:6].clone(), y[:6]), (x[6:].clone(), y[6:])])
        for forward in (normalises, normalised)
    ]
    torch.testing.assert_close(fits[0].loss, fits[1].loss)
    assert_close(fits[0].H, fits[1].H)
    means = [la(x.clone())[0] for la in fits]
    assert_close(*means)


def test_samples_of_a_network_that_writes_to_its_input():
    x, y = inputs(11, 4), labels("regression", 11, 2)
    samples = []
    for forward in (normalises, normalised):
        la = Laplace(writing(forward), "regression", "all", "diag").fit([(x.clone(), y)])
        generator = torch.Generator().manual_seed(0)
        samples.append(la.functional_samples(x.clone(), "nn", 3, generator=generator))
    assert_close(*samples)


# ---- modules that do not run on one example ------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    tensor: Tensor
    name: str = "box"


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Any, size: int | None = None) -> Any:
        if isinstance(x, Box):
            return Box(x.tensor * self.scale)
        if isinstance(x, UserDict):
            return UserDict(out=x["tensor"] * self.scale)
        if size is not None and len(x) != size:
            raise AssertionError("not the size that was said")
        return x * self.scale


def with_its_size(self, x):
    return self.head(torch.tanh(self.inner(x, len(x))))


def in_a_dataclass(self, x):
    return self.head(torch.tanh(self.inner(Box(x)).tensor))


def in_a_user_dict(self, x):
    return self.head(torch.tanh(self.inner(UserDict(tensor=x))["out"]))


@pytest.mark.parametrize(
    ("forward", "rule"),
    [
        (with_its_size, "generic, whole network"),
        (in_a_dataclass, "generic in 'inner'"),
        (in_a_user_dict, "generic in 'inner'"),
    ],
)
def test_modules_that_take_other_things_than_tensors(forward, rule):
    model = seeded(lambda: Net(forward, inner=Inner(), head=nn.Linear(4, 2)))
    assert_exact(model, inputs(11, 4), rules={"inner": rule, "head": "linear"})


# ---- memory --------------------------------------------------------------------------------------------------


def test_a_batch_that_cannot_be_cut_is_probed_with_few_vectors(monkeypatch):
    """A number among the inputs: which examples there are is not told by the sizes."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(4, 5), nn.Linear(5, 2)
            self.scale = nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            return self.head(torch.tanh(self.a(x)) * self.scale) * count

    sent, probes = audit._sent, []
    monkeypatch.setattr(audit, "_sent", lambda f, edges, v, made: probes.append(len(v)) or sent(f, edges, v, made))
    model = seeded(Counted).eval()
    x, y = inputs(40, 4), labels("regression", 40, 2)
    two = torch.tensor(2.0, dtype=torch.float64)
    la = Laplace(model, "regression", "all", "full", dict_key_x="x").fit([{"x": x, "count": two, "labels": y}])
    assert max(probes) == 5
    reference = seeded(lambda: Net(lambda self, x: self.inner(x, two), inner=model))
    names = [f"inner.{k}" for k, _ in model.named_parameters()]
    assert_close(la.H, oracle.curvature_all(reference, names, x, y, "regression")[1])
    assert {row.rule for row in la.coverage().rows} == {"linear", "generic, whole network"}


@pytest.mark.parametrize(("dtype", "fit"), [(torch.float32, 30), (torch.float64, 15)], ids=str)
def test_as_many_vectors_go_back_at_once_as_fit(dtype, fit, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 40)).to(dtype)
    x, y = inputs(50, 4).to(dtype), torch.arange(50) % 40
    send, sent = NetworkForward._send, []
    monkeypatch.setattr(
        NetworkForward,
        "_send",
        lambda self, v, batched, *of: sent.append((len(v), batched)) or send(self, v, batched, *of),
    )
    monkeypatch.setattr(NetworkForward, "_batched", lambda self, k: k > 1)  # as if the clock had said so
    room = 30 * 3 * 4 * 50 * 140  # bytes of the gradients at both outputs, and their copies
    la = Laplace(model, "classification", "all", "diag", memory_budget=room).fit([(x, y)])
    assert sent[:3] == [(1, False), (1, False), (4, True)]  # tried
    assert max(sent) == (fit, True)
    assert [batched for k, batched in sent[1:]] == [k > 1 for k, _ in sent[1:]]
    whole = Laplace(model, "classification", "all", "diag").fit([(x, y)])
    torch.testing.assert_close(la.H, whole.H)


def test_outputs_that_do_not_fit_at_once_are_predicted_in_parts(monkeypatch):
    """The gradients of one example's outputs: as many at a time as fit."""
    model = nn.Sequential(nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 40)).double()
    x, y = inputs(6, 4), labels("regression", 6, 40)
    grad, sizes = torch.autograd.grad, []
    monkeypatch.setattr(
        torch.autograd, "grad", lambda f, edges, v, **kw: sizes.append(len(v)) or grad(f, edges, v, **kw)
    )
    predicted = []
    for room in (None, 33 * 3 * 8 * 140):
        la = Laplace(model, "regression", "all", "diag", memory_budget=room).fit([(x, y)])
        sizes.clear()
        predicted.append(la.predict(x).outputs.variance)
        assert room is None or max(sizes) <= 33
    assert_close(*predicted)


class Sides(nn.Module):
    """The first output depends on both layers, the second on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(4, 5)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.head(torch.tanh(self.a(x))), self.head(torch.tanh(self.b(x)))
        return torch.cat([left * right, right], 1)


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_vectors_give_the_same_together_and_one_by_one(together, monkeypatch):
    monkeypatch.setattr(NetworkForward, "_batched", lambda self, k: together and k > 1)
    model, x, y = seeded(Sides).double(), inputs(11, 4), labels("regression", 11, 2)
    la = Laplace(model, "regression", "all", "full").fit([(x[:6], y[:6]), (x[6:], y[6:])])
    names = [k for k, _ in model.named_parameters()]
    assert_close(la.H, oracle.curvature_all(model, names, x, y, "regression")[1])
    jacobian = oracle.jacobian(model, names, x[:3])
    assert_close(la(x[:3])[1], jacobian @ la.posterior_covariance @ jacobian.mT)


@pytest.mark.parametrize(
    ("seconds", "one_by_one"), [({}, False), ({True: 1.0}, False), ({False: 1.0, True: 2.0}, True)], ids=str
)
def test_more_examples_go_at_once_where_vectors_go_one_by_one(seconds, one_by_one, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 10))
    x, room = inputs(99, 4).float(), 2**18
    la = Laplace(model, "regression", "all", "diag", memory_budget=room).fit([(x[:8], torch.zeros(8, 10))])
    chunks, sizes = Network.chunks, []

    def seen(self, given, n_outputs):
        plan = self.planned(given)
        plan.seconds.clear()
        plan.seconds.update(seconds)
        parts = list(chunks(self, given, n_outputs))
        sizes.extend((part.size, plan.inner) for part in parts)
        return parts

    monkeypatch.setattr(Network, "chunks", seen)
    la(x)
    size, numbers = sizes[0]
    assert size == room // 2 // (4 * numbers * (16 if one_by_one else 24))
