"""A weight that is also used by hand is found wherever that is: in a later batch, for some inputs, in a prediction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oracle
from exact import assert_close, assert_predicts_exactly, close_in_blocks, labels
from laplace import Laplace
from laplace.backprop import network
from laplace.errors import FormChangedError, NumericalError
from networks import cut
from traps import Net, inputs, seeded

STRUCTURES = ["full", "diag", "kron"]
pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")


@pytest.fixture(params=[0, 2**18], ids=["apart", "joined"])
def joining(request, monkeypatch) -> None:
    """Small batches are run one by one, or together."""
    monkeypatch.setattr(network, "_NARROW", request.param)


def branches(self, x):
    """The weight of `a` is used once more where the batch has a large input."""
    h = torch.tanh(self.a(x))
    if bool((x[:, 0] > 2).any()):
        h = torch.where(x[:, :1] > 2, torch.tanh(F.linear(h, self.a.weight)), h)
    return self.head(h)


def masks(self, x):
    """The same, in a graph that does not depend on the inputs."""
    h = torch.tanh(self.a(x))
    h = torch.where(x[:, :1] > 2, torch.tanh(F.linear(h, self.a.weight)), h)
    return self.head(h)


def replaces(self, x):
    """By hand instead of by the layer, which is called for nothing."""
    h = torch.tanh(self.a(x))
    if bool((x[:, 0] > 2).any()):
        plain = torch.tanh(F.linear(x, self.a.weight, self.a.bias))
        h = torch.where(x[:, :1] > 2, torch.tanh(F.linear(x, self.a.weight)), plain)
    return self.head(h)


def casts(self, x):
    """Autocast keeps a weight in its other precision, for both uses."""
    with torch.autocast("cpu", torch.bfloat16):
        h = torch.tanh(self.a(x))
        if bool((x[:, 0] > 2).any()):
            h = torch.where(x[:, :1] > 2, torch.tanh(F.linear(h, self.a.weight)), h)
    return self.head(h.to(x.dtype))


def net(forward, **others: nn.Module) -> Net:
    return seeded(lambda: Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), head=nn.Linear(4, 2), **others)).eval()


def data(last: bool, n: int = 24) -> Tensor:
    """Half of the examples take the branch: the last ones, or the first."""
    x = inputs(n, 4)
    x[:, 0] = x[:, 0].clamp(max=1.5)
    rows = slice(n // 2, None) if last else slice(n // 2)
    x[rows, 0] = 3
    return x


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    names = [k for k, _ in model.named_parameters()]
    pairs = zip(x.split(1), y.split(1), strict=True)
    return sum(oracle.curvature_all(model, names, a, b, "regression")[1] for a, b in pairs)


@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
@pytest.mark.parametrize("forward", [branches, masks, replaces])
def test_a_use_by_hand_is_counted_wherever_it_comes(forward, last, joining):
    model, x, y = net(forward), data(last), labels("regression", 24, 2)
    expected = one_by_one(model, x, y)
    full = Laplace(model, "regression", "all", "full").fit(cut(x, y, 6))
    close_in_blocks(full.H, expected, full.posterior.fit.layout.sizes)
    diag = Laplace(model, "regression", "all", "diag").fit(cut(x, y, 6))
    assert_close(diag.H, expected.diagonal())
    assert_predicts_exactly(full, model, x)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_posterior_does_not_depend_on_where_the_use_by_hand_comes(structure):
    model, x, y = net(branches), data(last=True), labels("regression", 24, 2)
    one = Laplace(model, "regression", "all", structure).fit(cut(x, y, 6))
    other = Laplace(model, "regression", "all", structure).fit(cut(x.flip(0), y.flip(0), 6))
    assert_close(one.posterior_variance, other.posterior_variance)
    assert_close(one(x)[1], other(x)[1])


def test_other_layers_keep_their_rules():
    model, x, y = net(branches), data(last=True), labels("regression", 24, 2)
    la = Laplace(model, "regression", "all", "kron").fit(cut(x, y, 6))
    rules = {row.name: row.rule for row in la.coverage().rows}
    assert rules["head.weight"] == rules["a.bias"] == "linear"
    assert rules["a.weight"] == "generic, whole network"


def test_data_that_can_be_read_once_is_refused_where_what_was_counted_has_another_form():
    model, x, y = net(branches), data(last=True), labels("regression", 24, 2)
    with pytest.raises(FormChangedError, match=r"a\.weight"):
        Laplace(model, "regression", "all", "kron").fit(iter(cut(x, y, 6)))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_use_by_hand_may_show_in_a_prediction_alone(structure):
    model, x, y = net(branches), data(last=True), labels("regression", 24, 2)
    la = Laplace(model, "regression", "all", structure).fit(cut(x[:12], y[:12], 6))
    jac = oracle.jacobian_loop(model, list(la.posterior.fit.layout.names), x)
    covariance = torch.diag(la.posterior_variance) if structure == "diag" else la.posterior_covariance
    for part in (slice(None), slice(12, None), slice(0, 13)):
        assert_close(la(x[part])[1], jac[part] @ covariance @ jac[part].mT)


def test_autocast_hides_no_use():
    model, y = net(casts).float(), labels("regression", 24, 2).float()
    x = data(last=True).float()
    rules = []
    for order in (x, x.flip(0)):
        la = Laplace(model, "regression", "all", "diag").fit(cut(order, y, 6))
        rules.append({row.name: row.rule for row in la.coverage().rows})
    assert rules[0] == rules[1]
    assert rules[0]["a.weight"] == "generic, whole network"


class Row(nn.Module):
    """Returns its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, 4))

    def forward(self) -> Tensor:
        return self.row


@pytest.mark.parametrize("n", [1, 6])
def test_what_a_module_returns_may_be_read_outside_of_it(n):
    model = net(lambda self, x: self.head(torch.tanh(self.a(x) + self.row())), row=Row())
    x, y = inputs(12, 4), labels("regression", 12, 2)
    la = Laplace(model, "regression", "all", "full").fit(cut(x, y, n))
    close_in_blocks(la.H, one_by_one(model, x, y), la.posterior.fit.layout.sizes)
    assert {row.name: row.rule for row in la.coverage().rows}["row.row"].startswith("generic in 'row'")
    assert_predicts_exactly(la, model, x[:1])


def test_weights_that_are_made_on_the_way_into_a_layer_are_its_own():
    model = net(lambda self, x: self.head(torch.tanh(self.a(x))))
    model.a = nn.utils.parametrizations.weight_norm(model.a)
    la = Laplace(model, "regression", "all", "diag").fit(cut(inputs(12, 4), labels("regression", 12, 2), 6))
    assert all(row.rule != "generic, whole network" for row in la.coverage().rows if row.name.startswith("a."))


# ---- what no graph shows -------------------------------------------------------------------------------------


def hooked(model: Net) -> Net:
    """A user's hook that changes what `a` returns for some inputs; its graph is always the same."""
    model.a.register_forward_hook(lambda module, args, out: out * torch.where(args[0][:, :1] > 2, 2.0, 1.0))
    return model


def replaced(model: Net) -> Net:
    layer = model.a

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, layer.weight, layer.bias) * torch.where(x[:, :1] > 2, 2.0, 1.0)

    layer.forward = forward
    return model


@pytest.mark.parametrize("change", [hooked, replaced])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_a_layer_that_is_another_for_some_inputs_is_found_and_counted_anew(structure, change, joining):
    model = change(net(lambda self, x: self.head(torch.tanh(self.a(x)))))
    x, y = data(last=True), labels("regression", 24, 2)
    la = Laplace(model, "regression", "all", structure).fit(cut(x, y, 6))
    expected = one_by_one(model, x, y)
    assert_close(la.H, expected if structure == "full" else expected.diagonal())


@pytest.mark.parametrize("change", [hooked, replaced])
def test_such_a_layer_is_found_in_a_prediction(change):
    model = change(net(lambda self, x: self.head(torch.tanh(self.a(x)))))
    x, y = data(last=True), labels("regression", 24, 2)
    la = Laplace(model, "regression", "all", "full").fit(cut(x[:12], y[:12], 6))
    assert_predicts_exactly(la, model, x)


def test_such_a_layer_in_data_that_can_be_read_once_is_an_error_that_names_the_batch(gathering):
    model = hooked(net(lambda self, x: self.head(torch.tanh(self.a(x)))))
    with pytest.raises(FormChangedError, match=r"batch 1: .*can be read only once"):
        Laplace(model, "regression", "all", "full").fit(iter(cut(data(last=True), labels("regression", 24, 2), 6)))


def test_a_gradient_that_does_not_exist_is_no_fault_of_the_plan():
    model = net(lambda self, x: self.head(torch.sqrt(self.a(x).square().sum(1, keepdim=True)).expand(-1, 4)))
    with torch.no_grad():
        model.a.bias.zero_()
    x = data(last=True)
    x[-1] = 0
    with pytest.raises(NumericalError, match="no derivative"):
        Laplace(model, "regression", "all", "full").fit(cut(x, labels("regression", 24, 2), 6))
