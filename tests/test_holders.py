"""Layers are found wherever a network keeps them, and a network that the replica cannot follow is refused untouched."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import ModelError
from laplace.network.replica import replicate
from networks import cut
from test_replica import State


class Layers(nn.Module):
    """Registers its layers; `reach` says how forward gets at the hidden ones, so that its gradients are known."""

    def __init__(self, hold) -> None:
        super().__init__()
        self.lin, self.norm, self.out = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.reach = hold(self)

    def forward(self, x: Tensor) -> Tensor:
        lin, norm = self.reach(self)
        return self.out(torch.tanh(norm(lin(x))))


class Helper:
    def __init__(self, lin: nn.Module, norm: nn.Module) -> None:
        self.lin, self.norm = lin, norm


class Slotted:
    __slots__ = ("__norm", "lin")

    def __init__(self, lin: nn.Module, norm: nn.Module) -> None:
        self.lin, self.__norm = lin, norm

    @property
    def norm(self) -> nn.Module:
        return self.__norm


class NeedsArguments:
    def __new__(cls, lin: nn.Module, norm: nn.Module) -> NeedsArguments:
        return super().__new__(cls)

    def __init__(self, lin: nn.Module, norm: nn.Module) -> None:
        self.lin, self.norm, self.own = lin, norm, self  # a circle


@dataclass(frozen=True)
class Frozen:
    lin: nn.Module
    norm: nn.Module


@dataclass
class Fields:
    both: list[nn.Module] = field(default_factory=list)


class Named(dict):
    pass


Pair = namedtuple("Pair", "lin norm")


def _attributes(made):
    """What keeps the layers in an object with attributes."""

    def hold(net):
        net.h = made(net.lin, net.norm)
        return lambda net: (net.h.lin, net.h.norm)

    return hold


def _indexed(made, *keys):
    """What keeps the layers in a container."""

    def hold(net):
        net.h = made(net.lin, net.norm)
        return lambda net: [net.h[key] for key in keys]

    return hold


def _popped(made):
    def hold(net):
        net.h = made([net.lin, net.norm])
        return lambda net: sorted(net.h, key=lambda m: type(m).__name__, reverse=True)

    return hold


def _default(net):
    def reach(own, layers=(net.lin, net.norm)):
        return layers

    return reach


def _keyword_default(net):
    kept = SimpleNamespace(both=[net.lin, net.norm])

    def reach(own, *, layers=kept):
        return layers.both

    return reach


def _closure(net):
    layers = [net.lin, {"norm": net.norm}]

    def inner():
        return (layers[0], layers[1]["norm"]) if reach else None  # two functions that hold each other

    def reach(own):
        return inner()

    return reach


def _weak(net):
    refs = weakref.ref(net.lin), weakref.ref(net.norm)
    return lambda own: [ref() for ref in refs]


def _proxy(net):
    net.h = {"lin": weakref.proxy(net.lin), "norm": weakref.proxy(net.norm)}
    return lambda net: (net.h["lin"], net.h["norm"])


def _weak_method(net):
    net.h = weakref.WeakMethod(net.lin.forward), weakref.WeakMethod(net.norm.forward)
    return lambda net: [method() for method in net.h]


def _weak_values(net):
    net.h = weakref.WeakValueDictionary({0: net.lin, 1: net.norm})
    return lambda net: (net.h[0], net.h[1])


def _partial(net):
    net.h = SimpleNamespace(lin=functools.partial(net.lin.forward), norm=functools.partial(lambda m, x: m(x), net.norm))
    return lambda net: (net.h.lin, net.h.norm)


def _only_weakly_held(net):
    net.owner = weakref.ref(KEPT.setdefault(id(net), Helper(net.lin, net.norm)))
    return lambda net: (net.owner().lin, net.owner().norm)


def _deep(net):
    net.h = SimpleNamespace(a=deque([defaultdict(list, {"k": [Frozen(Helper(net.lin, net.norm), net)]})]))
    return lambda net: vars(net.h.a[0]["k"][0].lin).values()


KEPT: dict[int, Helper] = {}
HOLDERS: dict[str, Any] = {
    "namespace": _attributes(lambda lin, norm: SimpleNamespace(lin=lin, norm=norm)),
    "helper": _attributes(Helper),
    "slots": _attributes(Slotted),
    "arguments": _attributes(NeedsArguments),
    "dataclass": _attributes(Frozen),
    "namedtuple": _attributes(Pair),
    "fields": lambda net: (setattr(net, "h", Fields([net.lin, net.norm])), lambda net: net.h.both)[1],
    "deque": _indexed(lambda *layers: deque(layers, maxlen=3), 0, 1),
    "defaultdict": _indexed(lambda lin, norm: defaultdict(list, lin=lin, norm=norm), "lin", "norm"),
    "ordered": _indexed(lambda lin, norm: OrderedDict(lin=lin, norm=norm), "lin", "norm"),
    "subclass": _indexed(lambda lin, norm: Named(lin=lin, norm=norm), "lin", "norm"),
    "user dict": _indexed(lambda lin, norm: UserDict(lin=lin, norm=norm), "lin", "norm"),
    "set": _popped(set),
    "frozenset": _popped(frozenset),
    "weak set": _popped(weakref.WeakSet),
    "default": _default,
    "keyword default": _keyword_default,
    "closure": _closure,
    "weakref": _weak,
    "proxy": _proxy,
    "weak method": _weak_method,
    "weak values": _weak_values,
    "partial": _partial,
    "weakly held": _only_weakly_held,
    "deep": _deep,
}


def made(hold) -> tuple[Layers, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Layers(hold).double()
    model(3 * torch.randn(40, 4).double() + 1)  # statistics
    return model, torch.randn(9, 4).double(), torch.randn(9, 2).double()


def ggn(model: Layers, names: list[str], x: Tensor) -> Tensor:
    """Sum of J^T J, row by row by autograd through the layers themselves."""
    named = dict(model.named_parameters())
    rows = []
    for f in model.out(torch.tanh(model.norm.eval()(model.lin(x)))).flatten():
        grads = torch.autograd.grad(f, [named[name] for name in names], retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in grads]))
    model.norm.train()
    jac = torch.stack(rows)
    return jac.T @ jac


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_layers_are_found_wherever_they_are_kept(holder, subset):
    model, x, y = made(HOLDERS[holder])
    before = State(model)
    assert model.training
    la = Laplace(model, "regression", subset, "full", prior_precision=0.5).fit(cut(x, y, 4))
    h = ggn(model, list(la.posterior.fit.layout.names), x)
    torch.testing.assert_close(la.posterior_precision, h + 0.5 * torch.eye(len(h)).double())
    la(x)
    la(x, pred_type="nn", n_samples=2)
    la.fit(cut(x, y, 4), override=False)
    before.assert_unchanged()


@pytest.mark.parametrize("holder", ["namespace", "deque", "closure", "proxy"])
def test_draws_of_the_network_move_layers_that_are_kept_elsewhere(holder):
    model, x, y = made(HOLDERS[holder])
    plain, _, _ = made(lambda net: lambda net: (net.lin, net.norm))
    draws = [
        Laplace(net, "regression", "all", "diag").fit([(x, y)]).functional_samples(
            x, "nn", 3, generator=torch.Generator().manual_seed(1)
        )
        for net in (model, plain)
    ]  # fmt: skip
    torch.testing.assert_close(*draws)
    assert draws[0].std(0).min() > 0


class Past(Layers):
    """Reaches its layers where no copy can."""

    shared: Any = None

    def __init__(self, way: str) -> None:
        super().__init__(lambda net: None)
        self.way = way
        Past.shared = self.lin, self.norm

    def forward(self, x: Tensor) -> Tensor:
        lin, norm = WAYS[self.way](self)
        return self.out(torch.tanh(norm(lin(x))))


class Closes:
    """An object that frees something when it goes."""

    def __init__(self, *layers: nn.Module) -> None:
        self.layers = layers

    def __del__(self) -> None:
        pass


WAYS: dict[str, Any] = {
    "class": lambda net: Past.shared,
    "norm alone": lambda net: (net.lin, Past.shared[1]),
    "destructor": lambda net: net.closes.layers,
}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("way", WAYS)
def test_layers_past_the_replica_are_refused_before_anything_is_written(way, subset, affine):
    torch.manual_seed(0)
    model = Past(way)
    model.norm = nn.BatchNorm1d(5, affine=affine)
    Past.shared = model.lin, model.norm
    model.closes = Closes(model.lin, model.norm)
    x, y = torch.randn(9, 4), torch.randn(9, 2)
    before = State(model)
    la = Laplace(model, "regression", subset, "diag")
    with pytest.raises(ModelError, match=r"'(lin|norm)\.\w+' past its own attributes"):
        la.fit(cut(x, y, 4))
    before.assert_unchanged()
    assert not la.is_fitted


def test_a_network_that_changes_after_fit_is_watched_again():
    model, x, y = made(lambda net: lambda net: (net.lin, net.norm))
    la = Laplace(model, "regression", "all", "diag").fit([(x, y)])
    Past.shared = model.lin, model.norm
    model.reach = lambda net: Past.shared
    before = State(model)
    with pytest.raises(ModelError, match="past its own attributes"):
        la.fit([(x, y)])
    before.assert_unchanged()


@pytest.mark.parametrize("holder", ["namespace", "default", "weakref"])
@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt("stop")], ids=["error", "interrupt"])
def test_a_network_with_a_holder_survives_an_exception(holder, error):
    model, x, y = made(HOLDERS[holder])
    before = State(model)
    fails = [False]

    def stop(module, args):
        if fails[0] and len(args[0]) == 3:
            raise error

    model.out.register_forward_pre_hook(stop)
    before = State(model)
    fails[0] = True
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ModelError, match="stop"):
        Laplace(model, "regression", "all", "diag").fit([(x[:6], y[:6]), (x[6:], y[6:])])
    before.assert_unchanged()


@pytest.mark.parametrize("holder", ["namespace", "closure", "weak values"])
def test_other_threads_may_run_a_network_with_a_holder_meanwhile(holder):
    model, x, y = made(HOLDERS[holder])
    model.eval()
    expected, wrong, stop = model(x).detach(), [], threading.Event()

    def loop():
        while not stop.is_set():
            try:
                if not torch.equal(model(x).detach(), expected):
                    wrong.append("other outputs")
            except Exception as error:
                wrong.append(repr(error))

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        for _ in range(5):
            la = Laplace(model, "regression", "all", "kron").fit(cut(x, y, 4))
            la(x)
    finally:
        stop.set()
        thread.join()
    assert not wrong


class Deliberate(nn.Module):
    """Keeps things that lead to no module, some of them large."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)
        self.words = {str(i): i for i in range(2000)}
        self.config = SimpleNamespace(width=4, names=["a", "b"])
        self.counts = Counter("aab")
        self.recent: deque[float] = deque(maxlen=4)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        self.recent.append(1.0)
        self.counts["a"] += 1
        return self.out(x)


def test_what_leads_to_no_module_is_shared_and_containers_are_not_written_to():
    model = Deliberate()
    replica = replicate(model)
    assert replica.words is model.words
    assert replica.config is model.config
    assert replica.lock is model.lock
    replica(torch.randn(2, 4))
    assert not model.recent
    assert replica.recent.maxlen == 4
    assert type(replica.counts) is Counter
    assert model.counts == Counter("aab")


def test_parameters_that_are_kept_in_a_tuple_too_are_explained():
    class Tuple(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5))
            self.ws, self.out = (self.a, SimpleNamespace(b=self.b)), nn.Linear(5, 2)

        def forward(self, x):
            return self.out(torch.tanh(x @ self.ws[0] + self.ws[1].b))

    torch.manual_seed(0)
    model = Tuple().double()
    model.ws = (model.a, SimpleNamespace(b=model.b))
    x, y = torch.randn(7, 4).double(), torch.randn(7, 2).double()
    before = State(model)
    la = Laplace(model, "regression", "all", "full", prior_precision=0.5).fit(cut(x, y, 3))
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(f, list(model.parameters()), retain_graph=True)])
            for f in model(x).flatten()]  # fmt: skip
    jac = torch.stack(rows)
    torch.testing.assert_close(la.posterior_precision, jac.T @ jac + 0.5 * torch.eye(jac.shape[1]).double())
    generator = torch.Generator().manual_seed(0)
    draws = la.functional_samples(x, "nn", 3, generator=generator)
    weights = la.sample(3, generator=torch.Generator().manual_seed(0))
    for draw, w in zip(draws, weights, strict=True):
        a, b, c, d = w.split([20, 5, 10, 2])
        expected = torch.tanh(x @ a.view(4, 5) + b) @ c.view(2, 5).T + d
        torch.testing.assert_close(draw, expected)
    before.assert_unchanged()
