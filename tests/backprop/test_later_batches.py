"""What a plan says of the first examples must hold for all: where it does not, the parameters are handed up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, assert_exact, assert_predicts_exactly, close_in_blocks, labels
from laplace import Laplace
from laplace.backprop import network
from networks import cut
from traps import Net, inputs, seeded


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The curvature of all weights, each example run alone."""
    names = [k for k, _ in model.named_parameters()]
    pairs = zip(x.split(1), y.split(1), strict=True)
    return sum(oracle.curvature_all(model, names, a, b, "regression")[1] for a, b in pairs)


def assert_right(model: nn.Module, x: Tensor, sizes: list[int]) -> Laplace:
    model.eval()
    y = labels("regression", len(x), 2)
    expected = one_by_one(model, x, y)
    full = Laplace(model, "regression", "all", "full").fit(cut(x, y, sizes))
    close_in_blocks(full.H, expected, full.posterior.fit.layout.sizes)
    assert_close(Laplace(model, "regression", "all", "diag").fit(cut(x, y, sizes)).H, expected.diagonal())
    assert_predicts_exactly(full, model, x)
    return full


# ---- examples that a layer does not see ----------------------------------------------------------------------


def adapted(self, x):
    routed = x[:, 0] > 0
    x = x.clone()
    x[routed] = torch.tanh(self.a(x[routed]))
    return self.head(x)


def two_experts(self, x):
    first = x[:, 0] > 0
    out = x.new_zeros(len(x), 4)
    out[first], out[~first] = self.a(x[first]), self.b(x[~first])
    return self.head(torch.tanh(out))


def routed(seen: int, n: int = 12) -> Tensor:
    """The first `seen` examples go the same way, the others both ways."""
    x = inputs(n, 4)
    x[:, 0] = x[:, 0].abs() * torch.tensor([1.0, -1.0], dtype=x.dtype).repeat(n // 2)
    x[:seen, 0] = x[:seen, 0].abs()
    return x


@pytest.mark.parametrize("sizes", [[12], [5, 7], [6, 6], [4, 4, 4]], ids=str)
@pytest.mark.parametrize("forward", [adapted, two_experts])
def test_a_layer_may_see_all_of_the_first_examples_and_some_of_the_others(forward, sizes):
    experts = ["a"] if forward is adapted else ["a", "b"]
    model = seeded(lambda: Net(forward, **{name: nn.Linear(4, 4) for name in experts}, head=nn.Linear(4, 2)))
    la = assert_right(model, routed(sizes[0] if len(sizes) > 1 else 5), sizes)
    assert {row.name: row.rule for row in la.coverage().rows}["head.weight"] == "linear"


@pytest.mark.parametrize("alone", [0, 3], ids=["in the first batch", "in a later one"])
@pytest.mark.parametrize("forward", [adapted, two_experts])
def test_a_layer_may_see_a_single_example(forward, alone):
    """Its output, (1, ...), is that example's, not what is computed once for all."""
    x = routed(0, 16)
    x[:, 0] = -x[:, 0].abs()
    x[[alone, 4, 5, 8, 9], 0] *= -1  # batches of 4: one example here, two there
    x = torch.cat([x[:4], x[4:8], x[8:12]]) if alone == 0 else torch.cat([x[4:8], x[:4], x[8:12]])
    experts = ["a"] if forward is adapted else ["a", "b"]
    model = seeded(lambda: Net(forward, **{name: nn.Linear(4, 4) for name in experts}, head=nn.Linear(4, 2)))
    assert_right(model, x, [4, 4, 4])


class Nested(nn.Module):
    """The routed layer is inside a block that sees every example: the block explains it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Net(adapted, a=nn.Linear(4, 4), head=nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(x)))


def test_it_is_handed_to_the_nearest_module_that_sees_all_examples():
    la = assert_right(seeded(Nested), routed(6), [6, 6])
    rules = {row.name: row.rule for row in la.coverage().rows}
    assert rules["block.a.weight"] == "generic in 'block'"
    assert rules["block.head.weight"] == "linear"


def test_a_plan_comes_to_rest(monkeypatch):
    """Batches of both kinds in turn: what was handed up stays there."""
    made = []
    make_plan = network.make_plan
    monkeypatch.setattr(network, "make_plan", lambda *args: made.append(make_plan(*args)) or made[-1])
    monkeypatch.setattr(network, "_NARROW", 0)  # batches are not joined
    x, y = routed(6), labels("regression", 12, 2)
    model = seeded(lambda: Net(adapted, a=nn.Linear(4, 4), head=nn.Linear(4, 2))).eval()
    Laplace(model, "regression", "all", "full").fit(cut(x, y, [6, 6]) * 3)
    assert len(made) == 2
    assert made[-1].rule_of("a.weight") == "generic, whole network"


# ---- examples that are elsewhere -----------------------------------------------------------------------------


def packed(self, x):  # (N, T, 4); padding ends in a zero
    there = x[..., -1] != 0
    h = x.new_zeros(*x.shape[:2], 4)
    h[there] = torch.tanh(self.a(x[there]))
    return self.head(h.sum(1))


@pytest.mark.parametrize("sizes", [[12], [6, 6], [5, 7]], ids=str)
def test_packed_tokens_of_unequal_lengths(sizes):
    """Eighteen rows of six examples look like three each."""
    x = inputs(12, 4, 4)
    x[6, 3] = x[7, 2:] = x[8, 3] = x[9, 2:] = 0
    assert int((x[6:, :, -1] != 0).sum()) == 18
    assert_right(seeded(lambda: Net(packed, a=nn.Linear(4, 4), head=nn.Linear(4, 2))), x, sizes)


def test_packed_tokens_of_equal_lengths_keep_their_rule():
    model = seeded(lambda: Net(packed, a=nn.Linear(4, 4), head=nn.Linear(4, 2)))
    assert_exact(model, inputs(11, 4, 4), rules={"a": "linear", "head": "linear"}, kinds=("ggn",))


def sorts(self, x):
    order = x[:, 0].argsort()
    return self.head(torch.tanh(self.a(x[order]))[order.argsort()])


@pytest.mark.parametrize(("seen", "sizes"), [(5, [12]), (2, [2, 10]), (6, [6, 5, 1])], ids=str)
def test_a_network_that_sorts_its_batch(seen, sizes):
    x = inputs(12, 4)
    x[:seen] = x[:seen][x[:seen, 0].argsort()]
    assert_right(seeded(lambda: Net(sorts, a=nn.Linear(4, 4), head=nn.Linear(4, 2))), x, sizes)


# ---- inputs that are the same for all ------------------------------------------------------------------------


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(x * self.scale + shift)


@pytest.mark.parametrize("positions", [5, 6, 7])
def test_a_constant_with_as_many_rows_as_there_are_examples(positions):
    """(T, .) with T = N is no batch of examples."""

    def forward(self, x):
        shift = torch.arange(x.shape[1]).to(x).sin().unsqueeze(1)
        return self.head(self.inner(x, shift).sum(1))

    assert_right(seeded(lambda: Net(forward, inner=Shifted(), head=nn.Linear(4, 2))), inputs(11, positions, 4), [6, 5])


def test_attention_masks_of_as_many_positions_as_there_are_examples():
    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.attention(x, x, x, attn_mask=mask, need_weights=False)[0].mean(1))

    model = seeded(lambda: Net(forward, attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 2)))
    la = assert_right(model, inputs(7, 7, 4), [7])
    assert "attention" in {row.rule for row in la.coverage().rows}
