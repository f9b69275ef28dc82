"""The user's network is never touched: with all weights uncertain, after exceptions, and while other threads run it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import InputError, ModelError
from laplace.network.replica import replicate
from networks import cut, make
from zoo import ZOO, build

STRUCTURES = ["full", "kron", "diag"]
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning"),
    pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


class State:
    """Everything of a network that a library could leave changed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = {k: (t, t.clone(), t._version) for k, t in model.state_dict(keep_vars=True).items()}
        self.flags = {k: (p.requires_grad, p.grad, None if p.grad is None else p.grad.clone())
                      for k, p in model.named_parameters()}  # fmt: skip
        self.modules = {k: self.of_module(m) for k, m in model.named_modules()}

    @staticmethod
    def of_module(module: nn.Module) -> tuple:
        hooks = [list(value) for key, value in sorted(module.__dict__.items()) if "hook" in key and value is not None
                 and hasattr(value, "__iter__")]  # fmt: skip
        return module, module.training, type(module), sorted(module.__dict__), hooks, module.__dict__.get("forward")

    def assert_unchanged(self) -> None:
        now = self.model.state_dict(keep_vars=True)
        assert list(now) == list(self.tensors)
        for key, (tensor, value, version) in self.tensors.items():
            assert now[key] is tensor
            assert torch.equal(tensor, value)
            assert tensor._version == version
        for key, p in self.model.named_parameters():
            required, grad, value = self.flags[key]
            assert p.requires_grad == required
            assert p.grad is grad
            assert grad is None or torch.equal(grad, value)
            assert p.is_leaf
        modules = dict(self.model.named_modules())
        assert list(modules) == list(self.modules)
        for key, module in modules.items():
            before = self.modules[key]
            assert module is before[0]
            assert self.of_module(module)[1:] == before[1:]


def prepared(network: str, task: str = "classification"):
    """A network with everything set that could be lost: modes, flags, gradients, hooks."""
    model, x, y, names = build(network, task)
    model.train()
    for i, module in enumerate(model.modules()):
        module.training = i % 3 != 1
    for i, (name, p) in enumerate(model.named_parameters()):
        p.requires_grad_(name in names and i != 1)
        if i % 2 == 0:
            p.grad = torch.full_like(p, 3.0)
    calls: list[str] = []
    first = next(m for m in model.modules() if not list(m.children()))
    first.register_forward_hook(lambda m, a, o: calls.append("forward"))
    first.register_forward_pre_hook(lambda m, a: calls.append("before"))
    model.register_full_backward_hook(lambda m, i, o: None)
    return model, x, y, calls


def use_everything(la: Laplace, x: Tensor, y: Tensor) -> None:
    la.fit(cut(x, y, 4))
    la.fit(cut(x, y, 4), override=False)
    la(x)
    la(x, pred_type="nn", n_samples=2)
    la.predict(x)
    la.functional_samples(x, n_samples=2)
    la.functional_samples(x, "nn", 2)
    la.sample(2)
    la.optimize_prior_precision()
    la.optimize_prior_precision(method="gridsearch", val_loader=cut(x, y, 4), grid_size=3)
    la.optimize_prior_precision("nn", "gridsearch", val_loader=cut(x, y, 4), grid_size=2, n_samples=2)
    repr(la)
    la.state_dict()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("network", ZOO)
def test_the_network_comes_back_as_it_was(network, structure):
    model, x, y, calls = prepared(network)
    before = State(model)
    use_everything(Laplace(model, "classification", "all", structure), x, y)
    before.assert_unchanged()
    if network != "functional":
        assert calls  # the user's own hooks run


@pytest.mark.parametrize("network", ["mlp", "residual"])
def test_the_network_comes_back_as_it_was_with_gradients_in_the_inputs(network):
    model, x, y, _ = prepared(network, "regression")
    before = State(model)
    la = Laplace(model, "regression", "all", "kron", enable_backprop=True).fit(cut(x, y, 4))
    new = x.clone().requires_grad_()
    la(new)[1].sum().backward()
    assert new.grad.abs().sum() > 0
    before.assert_unchanged()


class FailsBackwards(torch.autograd.Function):
    """The identity, whose backward pass fails when armed."""

    armed: BaseException | None = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if FailsBackwards.armed is not None:
            raise FailsBackwards.armed
        return g


class Fails(nn.Module):
    """Fails in its forward or backward pass when armed, on batches of three."""

    armed: BaseException | None = None

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "backward":
            return FailsBackwards.apply(x)
        if Fails.armed is not None and len(x) == 3:
            raise Fails.armed
        return x


@pytest.fixture
def disarm():
    yield
    Fails.armed = FailsBackwards.armed = None


@pytest.mark.usefixtures("disarm")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt("stop")], ids=["error", "interrupt"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_network_and_posterior_survive_an_exception(structure, error, where):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), Fails(where), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3)).double()
    model(torch.randn(9, 4, dtype=torch.float64))
    model[2].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    x, y = torch.randn(11, 4, dtype=torch.float64), torch.arange(11) % 3
    la = Laplace(model, "classification", "all", structure).fit(cut(x, y, 4))
    evidence, expected, before = float(la.log_marginal_likelihood()), la(x), State(model)
    Fails.armed = FailsBackwards.armed = error
    raised = ModelError if where == "forward" and isinstance(error, ValueError) else type(error)
    for override in (True, False):
        with pytest.raises(raised, match="stop"):
            la.fit(cut(x, y, 4), override=override)  # the last batch has three examples
        before.assert_unchanged()
    with pytest.raises(raised, match="stop"):
        la(x[:3])
    with pytest.raises(raised, match="stop"):
        Laplace(model, "classification", "all", structure).fit([(x[:3], y[:3])])
    before.assert_unchanged()
    Fails.armed = FailsBackwards.armed = None
    assert float(la.log_marginal_likelihood()) == evidence
    assert la.n_data == 11
    torch.testing.assert_close(la(x), expected)
    la.fit(cut(x, y, 4), override=False)
    assert la.n_data == 22


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_refused_batch_changes_nothing(structure):
    model, x, y, _ = prepared("residual")
    la = Laplace(model, "classification", "all", structure).fit(cut(x, y, 4))
    evidence, before = float(la.log_marginal_likelihood()), State(model)
    bad = [*cut(x[:8], y[:8], 4), (x[8:], y[8:] + 7)]
    for override in (True, False):
        with pytest.raises(InputError, match="batch 2"):
            la.fit(bad, override=override)
    assert float(la.log_marginal_likelihood()) == evidence
    before.assert_unchanged()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_other_threads_may_run_and_train_on_the_network_meanwhile(structure):
    model, x, y, _ = build("residual", "classification")
    expected = model(x).detach()
    loss = nn.functional.cross_entropy(model(x), y)
    gradient = torch.autograd.grad(loss, model.conv.weight)[0]
    la = Laplace(model, "classification", "all", structure).fit(cut(x, y, 4))
    predicted = la(x)
    wrong, stop = [], threading.Event()

    def run(name, call, want):
        def loop():
            while not stop.is_set():
                try:
                    if not torch.allclose(call(), want, rtol=1e-9, atol=1e-12):
                        wrong.append(name)
                except Exception as error:
                    wrong.append(f"{name}: {error}")

        return threading.Thread(target=loop)

    threads = [
        run("forward", lambda: model(x).detach(), expected),
        run("gradient", lambda: torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model.conv.weight)[0],
            gradient),
        run("predict", lambda: la(x), predicted),
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            again = Laplace(model, "classification", "all", structure).fit(cut(x, y, 4))
            torch.testing.assert_close(again(x), predicted)
            la(x, pred_type="nn", n_samples=2)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("network", ZOO)
def test_a_replica_has_the_same_outputs_on_the_same_memory(network):
    model, x, _, names = build(network, "regression")
    expected = model(x)
    for replica in (replicate(model), replicate(model, set(names))):
        assert replica is not model
        torch.testing.assert_close(replica(x), expected)
        theirs, ours = dict(model.named_parameters()), dict(replica.named_parameters())
        assert list(theirs) == list(ours)
        assert all(theirs[k].data_ptr() == ours[k].data_ptr() for k in theirs)
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(model.buffers(), replica.buffers(), strict=True))
        assert not {id(m) for m in model.modules()} & {id(m) for m in replica.modules()}
        assert not any(m.training for m in replica.modules())


def test_a_replica_for_some_parameters_asks_gradients_of_these_alone():
    model, x, _, _ = build("tied", "regression")
    model.requires_grad_(False)
    replica = replicate(model, {"up.weight"})
    assert [k for k, p in replica.named_parameters() if p.requires_grad] == ["up.weight"]
    assert replica.down.weight is replica.up.weight
    replica(x).sum().backward()
    assert replica.up.weight.grad is not None
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def test_a_replica_follows_references_between_modules():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.table = {"list": [self.inner], "tuple": (self.inner, 1)}
            self.bound = self.inner.forward
            self.activation = torch.tanh

        def forward(self, x):
            return self.table["list"][0](x) + self.table["tuple"][0](x) + self.bound(x)

    model = Outer()
    replica = replicate(model)
    assert replica.table["list"][0] is replica.inner
    assert replica.table["tuple"][0] is replica.inner
    assert replica.bound.__self__ is replica.inner
    assert model.table["list"][0] is model.inner
    x = torch.randn(2, 3)
    torch.testing.assert_close(replica(x), model(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "compile_network", [torch.jit.trace, lambda model, x: torch.jit.script(model)], ids=["trace", "script"]
)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_scripted_networks_are_refused_in_our_words(subset, compile_network, training):
    model, x, y = make("mlp", "classification")
    scripted = compile_network(model, x[:2]).train(training)
    with pytest.raises(ModelError, match="eval" if training else None):
        Laplace(scripted, "classification", subset, "kron").fit(cut(x, y, 6))
