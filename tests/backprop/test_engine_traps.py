"""Networks that an engine for all weights can stumble over: each is exact, or refused with an error that says why."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import oracle
from exact import assert_close, assert_exact, labels
from laplace import Laplace
from laplace.errors import ModelError
from networks import cut
from traps import Net, inputs, seeded
from zoo import build

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")
TASKS = ["classification", "regression"]


# ---- in place ------------------------------------------------------------------------------------------------


def in_place_relu(self, x):
    return self.head(torch.relu_(self.b(nn.functional.relu(self.a(x), inplace=True))))


def in_place_sum(self, x):
    out = self.a(x)
    out += x
    h = torch.tanh(self.b(out))
    out2 = self.b(h)
    out2 += h
    out2 *= 0.5
    return self.head(out2)


def in_place_on_the_output(self, x):
    f = self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))
    f[:, 0] += 1.0
    f.mul_(2.0)
    return f


def in_place_on_a_view(self, x):
    h = self.a(x)
    h[:, :2].mul_(3.0)
    h.view(-1, 2, 2)[:, 0] += 0.3
    return self.head(torch.tanh(self.b(torch.sigmoid(h))))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("forward", [in_place_relu, in_place_sum, in_place_on_the_output, in_place_on_a_view])
def test_outputs_may_be_written_to_in_place(forward, task):
    model = seeded(lambda: Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), head=nn.Linear(4, 3)))
    assert_exact(model, inputs(9, 4), task, rules={"a": "linear", "b": "linear", "head": "linear"})


def overwritten(self, x):
    h = self.a(x)
    g = self.b(h)
    h.add_(1.0)  # after b has read it
    return self.head(torch.tanh(g + h))


def test_an_input_that_is_written_to_after_it_was_read_gives_right_numbers_or_an_error_that_names_the_layer():
    """Autograd does not notice where the layer's weight is frozen."""
    model = seeded(lambda: Net(overwritten, a=nn.Linear(4, 4), b=nn.Linear(4, 4), head=nn.Linear(4, 2)))
    model.b.weight.requires_grad_(False)
    x, y = inputs(9, 4), labels("regression", 9, 2)
    try:
        Laplace(model, "regression", "all", "full").fit([(x, y)])
    except ModelError as error:
        assert "'b' is written to in place" in str(error)  # noqa: PT017
    else:
        assert_exact(model, x)


def test_a_network_that_autograd_refuses_is_refused_in_our_words():
    model = seeded(lambda: Net(overwritten, a=nn.Linear(4, 4), b=nn.Linear(4, 4), head=nn.Linear(4, 2)))
    with pytest.raises(ModelError, match=r"in.?place"):
        Laplace(model, "regression", "all", "full").fit([(inputs(9, 4), labels("regression", 9, 2))])


# ---- which parameters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_frozen_first_layers(task):
    model, x, _, _ = build("mlp", task)
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    la = assert_exact(model, x, task)
    assert list(la.posterior.fit.layout.names) == ["2.bias", "4.weight", "4.bias"]


@pytest.mark.parametrize("network", ["mlp", "conv", "residual", "transformer", "recurrent"])
def test_only_biases_may_be_trainable(network):
    model, x, _, names = build(network, "regression")
    for name, p in model.named_parameters():
        p.requires_grad_(name in names and "bias" in name)
    assert_exact(model, x, kinds=("ggn",))


@pytest.mark.parametrize("network", ["mlp", "residual", "transformer"])
def test_only_the_first_layer_may_be_trainable(network):
    model, x, _, names = build(network, "regression")
    for name, p in model.named_parameters():
        p.requires_grad_(name == names[0])
    assert_exact(model, x, kinds=("ggn",))


def unused_by_the_output(self, x):
    self.b(x)
    return self.head(torch.tanh(self.a(x)))


def detached(self, x):
    return self.head(torch.tanh(self.a(x)) + self.b(x).detach())


def times_zero(self, x):
    return self.head(torch.tanh(self.a(x)) + 0.0 * self.b(x))


def never_called(self, x):
    return self.head(torch.tanh(self.a(x)))


def through_an_integer(self, x):
    return self.head(torch.tanh(self.a(x)) * self.b(x).argmax(1, keepdim=True))


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("forward", [unused_by_the_output, detached, times_zero, never_called, through_an_integer])
def test_a_layer_that_the_output_does_not_depend_on_has_no_curvature(forward, structure):
    model = seeded(lambda: Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), head=nn.Linear(4, 2)))
    x, y = inputs(9, 4), labels("regression", 9, 2)
    la = Laplace(model, "regression", "all", structure, prior_precision=3.0).fit(cut(x, y, 4))
    start = la.posterior.fit.layout.names.index("b.weight")
    sizes = la.posterior.fit.layout.sizes
    part = slice(sum(sizes[:start]), sum(sizes[: start + 2]))
    h = la.posterior.fit.curvature.matrix()
    assert not h[part].any()
    assert not h[:, part].any()
    torch.testing.assert_close(la.posterior_variance[part], torch.full((20,), 1 / 3).double())
    jac = oracle.jacobian_loop(model, list(la.posterior.fit.layout.names), x)
    assert_close(la(x)[1], jac @ la.posterior_covariance @ jac.mT)
    assert la.functional_samples(x, "nn", 2).isfinite().all()
    if structure == "full":
        assert_exact(model, x)


# ---- a gradient that is zero but for rounding -----------------------------------------------------------------


class Attention(nn.Module):
    """Softmax does not see a shift of its keys: the gradient of the keys' bias is rounding and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.query(x) @ self.key(x).mT / 2).softmax(-1)
        return self.head((weights @ self.value(x)).mean(1))


class BeforeNorm(nn.Module):
    """A normalisation takes away what the bias before it adds."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 2), norm, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x.unsqueeze(1)))).mean((2, 3)))


SHIFTED = {
    "key bias": (Attention, (12, 5, 4), "key.bias"),
    "bias before InstanceNorm": (lambda: BeforeNorm(nn.InstanceNorm2d(4)), (12, 5, 4), "conv.bias"),
    "bias before GroupNorm": (lambda: BeforeNorm(nn.GroupNorm(4, 4)), (12, 5, 4), "conv.bias"),
}


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("make", "shape", "name"), SHIFTED.values(), ids=SHIFTED)
def test_a_parameter_whose_gradient_is_rounding_is_not_taken_for_interacting_examples(
    make, shape, name, dtype, structure
):
    model = seeded(make).to(dtype)
    x, y = inputs(*shape).to(dtype), labels("classification", 12, 3)
    la = Laplace(model, "classification", "all", structure).fit(cut(x, y, 8))
    layout = la.posterior.fit.layout
    start = sum(layout.sizes[: layout.names.index(name)])
    h = la.posterior.fit.curvature.matrix()
    assert float(h[start : start + 4].abs().max()) < 1e-5 * float(h.abs().max())
    reference = copy.deepcopy(model).double()
    _, expected = oracle.curvature_all(reference, list(layout.names), x.double(), y, "classification")
    if structure == "full":
        assert_close(h.double(), expected, 1e-4 if dtype == torch.float32 else 1e-7)


# ---- how a module is used ------------------------------------------------------------------------------------


def twice(self, x):
    return self.head(torch.tanh(self.a(torch.tanh(self.a(x)))))


def twice_on_different_shapes(self, x):
    mean = torch.tanh(self.a(x.mean(1)))  # (N, 4)
    each = torch.tanh(self.a(x))  # (N, T, 4)
    return self.head(mean + each.sum(1))


def twice_beside_each_other(self, x):
    return self.head(torch.tanh(self.a(x)) * torch.sin(self.a(x + 1)))


def sometimes_without_an_effect(self, x):
    self.a(x * 2)
    return self.head(torch.tanh(self.a(x)))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("forward", "shape"),
    [(twice, (9, 4)), (twice_on_different_shapes, (9, 3, 4)), (twice_on_different_shapes, (9, 5, 4)),
     (twice_beside_each_other, (9, 4)), (sometimes_without_an_effect, (9, 4))],
)  # fmt: skip
def test_a_module_may_be_called_twice(forward, shape, task):
    model = seeded(lambda: Net(forward, a=nn.Linear(4, 4), head=nn.Linear(4, 3)))
    assert_exact(model, inputs(*shape), task, rules={"a": "linear", "head": "linear"})


def test_one_module_under_two_names():
    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))

    layer = nn.Linear(4, 4)
    model = seeded(lambda: Net(forward, a=layer, b=layer, head=nn.Linear(4, 2)))
    la = assert_exact(model, inputs(9, 4))
    assert list(la.posterior.fit.layout.names) == ["a.weight", "a.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize("task", TASKS)
def test_tied_weights_count_every_use(task):
    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))

    model = seeded(lambda: Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), head=nn.Linear(4, 3)))
    model.b.weight = model.a.weight
    la = assert_exact(model, inputs(9, 4), task, rules={"a": "linear", "b": "linear"})
    assert "b.weight" not in la.posterior.fit.layout.names


def test_a_weight_tied_to_its_own_transpose():
    def forward(self, x):
        return self.head(nn.functional.linear(torch.tanh(self.a(x)), self.a.weight.T))

    model = seeded(lambda: Net(forward, a=nn.Linear(4, 3), head=nn.Linear(4, 2)))
    assert_exact(model, inputs(9, 4))


def functionally(self, x):
    h = torch.tanh(x @ self.a.weight.T + self.a.bias)
    return self.head(h)


def functionally_and_called(self, x):
    h = torch.tanh(self.a(x)) + nn.functional.linear(x, self.a.weight)
    return self.head(h)


def a_penalty_like_use(self, x):
    return self.head(torch.tanh(self.a(x)) * self.a.weight.norm())


def through_the_output_layer(self, x):
    f = self.head(torch.tanh(self.a(x)))
    return f / self.head.weight.norm(dim=1)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "forward", [functionally, functionally_and_called, a_penalty_like_use, through_the_output_layer]
)
def test_weights_may_be_used_without_their_module(forward, task):
    model = seeded(lambda: Net(forward, a=nn.Linear(4, 4), head=nn.Linear(4, 3)))
    assert_exact(model, inputs(9, 4), task)


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_parameters_of_the_network_itself_also_numbers(structure):
    """As the temperature of a contrastive network: a parameter without a dimension."""

    def forward(self, x):
        return self.head(torch.tanh(x * self.scale + self.shift)) * self.temperature.exp() + self.offset

    model = seeded(
        lambda: Net(
            forward,
            scale=nn.Parameter(torch.randn(4)),
            shift=nn.Parameter(torch.randn(1)),
            temperature=nn.Parameter(torch.randn(())),
            offset=nn.Parameter(torch.randn(1, 2)),
            head=nn.Linear(4, 2),
        )
    )
    x, y = inputs(9, 4), labels("regression", 9, 2)
    la = Laplace(model, "regression", "all", structure).fit(cut(x, y, 4))
    assert la(x)[1].isfinite().all()
    assert la.functional_samples(x, "nn", 2).isfinite().all()
    la.optimize_prior_precision(prior_structure="layerwise")
    if structure == "full":
        assert_exact(model, x)


def test_parameters_of_any_number_of_dimensions():
    def forward(self, x):
        return self.head(torch.einsum("ni,ijk->njk", x, self.cube).flatten(1) + self.row)

    model = seeded(
        lambda: Net(
            forward,
            cube=nn.Parameter(torch.randn(4, 2, 3)),
            row=nn.Parameter(torch.randn(1, 6)),
            head=nn.Linear(6, 2),
        )
    )
    assert_exact(model, inputs(9, 4))


def test_reparametrised_weights():
    model = seeded(lambda: nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 2)))
    assert_exact(model, inputs(9, 4))


def test_a_subclass_of_linear_with_another_forward():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 3 * super().forward(x) + x

    model = seeded(lambda: nn.Sequential(Scaled(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    assert_exact(model, inputs(9, 4))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(batch_first, task):
    def forward(self, x):
        h = x if batch_first else x.transpose(0, 1)
        h, weights = self.attention(h, h, h)
        h = h if batch_first else h.transpose(0, 1)
        return self.head(h.mean(1)) + weights[:, 0]  # (N, 3): both outputs are used

    model = seeded(
        lambda: Net(forward, attention=nn.MultiheadAttention(4, 2, batch_first=batch_first), head=nn.Linear(4, 3))
    )
    assert_exact(model, inputs(9, 3, 4), task)


def test_cross_attention_with_a_query_of_the_networks_own():
    def forward(self, x):
        query = self.query.expand(len(x), -1, -1)
        return self.head(self.attention(query, x, x, need_weights=False)[0].squeeze(1))

    model = seeded(
        lambda: Net(
            forward,
            query=nn.Parameter(torch.randn(1, 1, 4)),
            attention=nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True),
            head=nn.Linear(4, 2),
        )
    )
    assert_exact(model, inputs(9, 5, 3))


@pytest.mark.parametrize("padding_idx", [None, 0])
def test_embeddings(padding_idx):
    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.embed(x.long() % 4))).sum(1))

    model = seeded(
        lambda: Net(forward, embed=nn.Embedding(4, 3, padding_idx), mix=nn.Linear(3, 3), head=nn.Linear(3, 2))
    )
    assert_exact(model, torch.arange(27).reshape(9, 3).double())
