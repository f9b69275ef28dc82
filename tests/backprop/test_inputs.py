"""What a batch may be, with all weights uncertain: several inputs, mappings, one example, lower precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, assert_exact, close_in_blocks, labels
from laplace import Laplace
from networks import cut
from traps import Net, inputs, seeded
from zoo import build

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")
TASKS = ["classification", "regression"]


class OfOneTensor(nn.Module):
    """The same parameters, by the same names, as a function of both inputs side by side."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        for name, child in net.named_children():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        return two_inputs(self, x[:, :3], x[:, 3:])


def two_inputs(self, left, right):
    return self.head(torch.tanh(self.a(left)) * torch.tanh(self.b(right)))


def two_layers():
    return {"a": nn.Linear(3, 4), "b": nn.Linear(2, 4), "head": nn.Linear(4, 3)}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("container", [tuple, list])
def test_networks_of_two_inputs(container, task):
    model = seeded(lambda: Net(two_inputs, **two_layers()))

    def pack(x):
        return container([x[:, :3], x[:, 3:]])

    x = inputs(9, 5)
    y = labels(task, 9, 3)
    reference = OfOneTensor(model)
    la = Laplace(model, task, "all", "full").fit([(pack(a), b) for a, b in cut(x, y, 4)])
    _, h = oracle.curvature_all(reference, [k for k, _ in reference.named_parameters()], x, y, task)
    close_in_blocks(la.H, h, la.posterior.fit.layout.sizes)
    jac = oracle.jacobian_loop(reference, list(la.posterior.fit.layout.names), x)
    outputs = la.predict(tuple(pack(x))).outputs
    assert_close(outputs.covariance, jac @ la.posterior_covariance @ jac.mT)
    draws = la.functional_samples(tuple(pack(x)), "nn", 2, generator=torch.Generator().manual_seed(0))
    assert draws.shape == (2, 9, 3)


class ByKeyword(OfOneTensor):
    def forward(self, left=None, right=None, labels=None):
        assert labels is None
        return type("Output", (), {"logits": two_inputs(self, left, right)})()


class ByMapping(OfOneTensor):
    def forward(self, batch):
        return {"logits": two_inputs(self, batch["left"], batch["right"])}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", [ByKeyword, ByMapping])
def test_networks_of_mappings(kind, task):
    layers = seeded(lambda: Net(two_inputs, **two_layers()))
    model, reference = kind(layers), OfOneTensor(layers)
    x, y = inputs(9, 5), labels(task, 9, 3)
    batches = [{"left": a[:, :3], "right": a[:, 3:], "labels": b} for a, b in cut(x, y, 4)]
    la = Laplace(model, task, "all", "full").fit(batches)
    _, h = oracle.curvature_all(reference, [k for k, _ in reference.named_parameters()], x, y, task)
    close_in_blocks(la.H, h, la.posterior.fit.layout.sizes)
    jac = oracle.jacobian_loop(reference, list(la.posterior.fit.layout.names), x)
    outputs = la.predict({"left": x[:, :3], "right": x[:, 3:]}).outputs
    assert_close(outputs.covariance, jac @ la.posterior_covariance @ jac.mT)


class ShiftedMapping(OfOneTensor):
    """A parameter that only the whole network explains."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.shift = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, batch):
        return two_inputs(self, batch["left"], batch["right"]) * self.shift


class ShiftedKeywords(ShiftedMapping):
    def forward(self, left=None, right=None, labels=None):
        return two_inputs(self, left, right) * self.shift


class ShiftedTensor(ShiftedMapping):
    def forward(self, x):
        return two_inputs(self, x[:, :3], x[:, 3:]) * self.shift


@pytest.mark.parametrize("kind", [ShiftedMapping, ShiftedKeywords])
def test_a_parameter_of_the_network_itself_with_mappings(kind):
    layers = seeded(lambda: Net(two_inputs, **two_layers()))
    model, reference = kind(layers), ShiftedTensor(layers)
    x, y = inputs(9, 5), labels("classification", 9, 3)
    batches = [{"left": a[:, :3], "right": a[:, 3:], "labels": b} for a, b in cut(x, y, 4)]
    la = Laplace(model, "classification", "all", "full").fit(batches)
    names = [k for k, _ in reference.named_parameters()]
    assert list(la.posterior.fit.layout.names) == names
    _, h = oracle.curvature_all(reference, names, x, y, "classification")
    close_in_blocks(la.H, h, la.posterior.fit.layout.sizes)


@pytest.mark.parametrize("network", ["mlp", "conv", "residual", "transformer", "tied", "recurrent", "functional"])
@pytest.mark.parametrize("sizes", [(1,), (1, 10), (10, 1), (2, 3, 6)], ids=str)
def test_batches_of_one_and_ragged_batches(network, sizes):
    model, x, _, _ = build(network, "regression")
    assert_exact(model, x, sizes=sizes, kinds=("ggn",))


def test_one_example_is_enough():
    model, x, _, _ = build("residual", "regression")
    la = assert_exact(model, x[:1], sizes=(1,))
    jac = oracle.jacobian_loop(model, list(la.posterior.fit.layout.names), x)
    assert_close(la(x)[1], jac @ la.posterior_covariance @ jac.mT)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("network", ["mlp", "conv", "residual", "transformer"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float16, 0.05), (torch.bfloat16, 0.3)], ids=str
)
def test_networks_in_lower_precision_run_and_come_close(network, task, structure, dtype, tolerance):
    model, x, y, _ = build(network, task)
    model, x = model.to(dtype), x.to(dtype)
    y = y if task == "classification" else y.to(dtype)
    la = Laplace(model, task, "all", structure).fit(cut(x, y, 4))
    assert la.mean.dtype == la.posterior_variance.dtype == torch.float32
    double = Laplace(copy.deepcopy(model).double(), task, "all", structure)
    double.fit(cut(x.double(), y if task == "classification" else y.double(), 4))
    one, other = la.predict(x).outputs, double.predict(x.double()).outputs
    assert one.mean.dtype == one.covariance.dtype == torch.float32
    assert_close(one.mean.double(), other.mean, tolerance)
    assert_close(one.covariance.double(), other.covariance, tolerance)
    assert float(la.log_marginal_likelihood()) == pytest.approx(float(double.log_marginal_likelihood()), rel=tolerance)
    draws = la.functional_samples(x, "nn", 2)
    assert draws.dtype == torch.float32
    assert draws.isfinite().all()


def test_half_precision_does_not_lose_the_curvature_of_confident_examples():
    """Probabilities of 1e-15 are sent back as they are: lifted out of the range that half precision rounds to zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3))
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([0.0, 36.0, -3.0]))
        model[0].weight *= 0.01
    x, y = torch.randn(7, 4).half(), torch.ones(7, dtype=torch.long)
    half = Laplace(model.half(), "classification", "all", "diag").fit([(x, y)])
    double = Laplace(copy.deepcopy(model).double(), "classification", "all", "diag").fit([(x.double(), y)])
    assert 0 < float(double.H.max()) < 1e-12
    assert_close(half.H.double(), double.H, 0.05)


class Whitening(nn.Module):
    """Centres its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(1.0)
        return self.head(self.body(x).tanh())


def test_a_network_may_write_to_its_inputs_in_a_last_layer_run():
    torch.manual_seed(0)
    model, x, y = Whitening(), torch.randn(9, 4), torch.arange(9) % 3
    before = x.clone()
    la = Laplace(model, "classification", "last_layer", "full").fit([(x, y)])
    assert torch.equal(x, before)
    first = la(x)
    assert torch.equal(x, before)
    assert torch.equal(la(x), first)
    assert_close(la.predict(x).outputs.mean, model(before.clone()))
