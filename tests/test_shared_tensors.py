"""Tensors that all examples share are never cut, and those of the examples always, whatever their shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, close_in_blocks, labels
from laplace import Laplace
from laplace.errors import InputError
from laplace.network.inputs import Inputs
from laplace.network.sharing import Sharing
from traps import inputs, seeded

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")
ROWS = 5  # of what is shared


class Reading(nn.Module):
    """Reads a table beside its inputs; only the whole network explains `scale`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.head = how, nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor, table: Tensor, weight: Tensor | None = None) -> Tensor:
        near = x @ table.mT  # (N, ROWS)
        if self.how == "each":
            read = near.softmax(1) @ table
        elif self.how == "sum":
            read = table.sum(0).expand_as(x)
        else:
            read = table[near.argmax(1)]
        h = torch.tanh(self.a(x + read)) * self.scale
        return self.head(h if weight is None else h * weight)


class WithTable(nn.Module):
    """The same of one tensor, for the oracle."""

    def __init__(self, model: Reading, table: Tensor, weight: Tensor | None = None) -> None:
        super().__init__()
        for name in ("a", "head", "scale"):
            setattr(self, name, getattr(model, name))
        self.inner, self.table, self.weight = [model], table, weight  # a list, so that names are the network's own

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x, self.table, self.weight)


def case(how: str) -> tuple[Reading, Tensor, Tensor, Tensor]:
    return seeded(lambda: Reading(how)).eval(), inputs(20, 3), inputs(ROWS, 3) + 0.3, labels("regression", 20, 2)


def batched(x: Tensor, table: Tensor, y: Tensor, size: int):
    return [((a, table), b) for a, b in zip(x.split(size), y.split(size), strict=True)]


@pytest.mark.parametrize("size", [3, ROWS, 7, 20])
@pytest.mark.parametrize("how", ["each", "sum", "lookup"])
def test_the_posterior_does_not_depend_on_the_batch_size(how, size):
    model, x, table, y = case(how)
    la = Laplace(model, "regression", "all", "full").fit(batched(x, table, y, size))
    names = list(la.posterior.fit.layout.names)
    _, h = oracle.curvature_all(WithTable(model, table), names, x, y, "regression")
    close_in_blocks(la.H, h, la.posterior.fit.layout.sizes)
    assert {row.name: row.rule for row in la.coverage().rows}["scale"] == "generic, whole network"


@pytest.mark.parametrize("sizes", [[4, ROWS], [ROWS, 4], [1, ROWS, 4]], ids=str)
def test_batches_of_as_many_examples_as_there_are_rows_among_others(sizes):
    model, x, table, y = case("each")
    n = sum(sizes)
    loader = [((a, table), b) for a, b in zip(x[:n].split(sizes), y[:n].split(sizes), strict=True)]
    la = Laplace(model, "regression", "all", "full").fit(loader)
    _, h = oracle.curvature_all(
        WithTable(model, table), list(la.posterior.fit.layout.names), x[:n], y[:n], "regression"
    )
    close_in_blocks(la.H, h, la.posterior.fit.layout.sizes)


def predicted(la: Laplace, model: Reading, x: Tensor, table: Tensor, weight: Tensor | None = None) -> Tensor:
    names = list(la.posterior.fit.layout.names)
    if weight is not None and weight.shape[:1] == x.shape[:1]:  # of the examples
        rows = zip(x.split(1), weight.split(1), strict=True)
        jac = torch.cat([oracle.jacobian_loop(WithTable(model, table, w), names, a) for a, w in rows])
    else:
        jac = oracle.jacobian_loop(WithTable(model, table, weight), names, x)
    return jac @ la.posterior_covariance @ jac.mT


@pytest.mark.parametrize("chunked", [False, True], ids=["at once", "in chunks"])
@pytest.mark.parametrize("n", [4, ROWS, 20])
def test_tables_as_keywords(n, chunked, monkeypatch):
    model, x, table, y = case("each")
    la = Laplace(model, "regression", "all", "full").fit(batched(x, table, y, 4))
    if chunked:
        monkeypatch.setattr("laplace.budget.Budget.count", lambda *args, **kwargs: 2)
    assert_close(la(x[:n], table=table)[1], predicted(la, model, x[:n], table))
    assert_close(la.predict(x[:n], table=table).outputs.covariance, predicted(la, model, x[:n], table))
    drawn = la.functional_samples(x[:n], "nn", 3, table=table, generator=torch.Generator().manual_seed(0))
    whole = la.functional_samples((x, table), "nn", 3, generator=torch.Generator().manual_seed(0))
    assert_close(drawn, whole[:, :n])


@pytest.mark.parametrize("chunked", [False, True], ids=["at once", "in chunks"])
@pytest.mark.parametrize("shape", [(7, 1), (7, 4), (1, 4), (4,), ()], ids=str)
def test_keywords_of_the_examples_and_of_all(shape, chunked, monkeypatch):
    model, x, table, y = case("each")
    la = Laplace(model, "regression", "all", "full").fit(batched(x, table, y, 4))
    if chunked:
        monkeypatch.setattr("laplace.budget.Budget.count", lambda *args, **kwargs: 2)
    weight = inputs(*shape, seed=3) if shape else torch.tensor(0.7, dtype=x.dtype)
    for _ in range(2):  # what is known from the first call does not mislead the second
        assert_close(la((x[:7], table), weight=weight)[1], predicted(la, model, x[:7], table, weight))
    one = torch.full((1, 4), 0.5, dtype=x.dtype)
    assert_close(la((x[:7], table), weight=one)[1], predicted(la, model, x[:7], table, one))


def test_a_vector_of_as_many_outputs_as_there_are_examples_is_not_theirs():
    model, x, table, y = case("each")
    la = Laplace(model, "regression", "all", "full").fit(batched(x, table, y, 4))
    weight = inputs(4, seed=3)  # (4,) beside four examples: one for each unit
    names = list(la.posterior.fit.layout.names)
    jac = oracle.jacobian_loop(WithTable(model, table, weight), names, x[:4])
    assert_close(la((x[:4], table), weight=weight)[1], jac @ la.posterior_covariance @ jac.mT)


@pytest.mark.parametrize("size", [4, ROWS])
def test_the_last_layer_is_found_beside_a_table(size):
    model, x, table, y = case("sum")
    one = Laplace(model, "regression", hessian_structure="full").fit(batched(x, table, y, size))
    other = Laplace(model, "regression", hessian_structure="full").fit(batched(x, table, y, 20))
    assert_close(one.H, other.H)


@pytest.mark.parametrize("size", [4, ROWS])
def test_points_cannot_be_kept_of_what_is_shared(size):
    model, x, table, y = case("each")
    with pytest.raises(InputError, match="all have the examples in their first dimension"):
        Laplace(model, "regression", "all", "gp").fit(batched(x, table, y, size))


def test_one_tensor_takes_no_run():
    calls = []
    model = nn.Linear(3, 2)
    model.register_forward_hook(lambda *args: calls.append(1))
    assert Sharing().told_apart(Inputs(torch.randn(4, 3)), model).shared == frozenset()
    assert not calls


def test_what_was_found_is_remembered():
    model, x, table, _ = case("each")
    calls, sharing = [], Sharing()
    model.register_forward_hook(lambda *args: calls.append(1))
    assert sharing.told_apart(Inputs((x[:ROWS], table)), model).shared == {1}
    seen = len(calls)
    assert seen <= 4
    for n in (ROWS, 4, 1, 20):
        assert sharing.told_apart(Inputs((x[:n], table)), model).shared == {1}
    assert len(calls) == seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_rounding_of_half_precision_does_not_hide_what_is_shared(dtype, subset):
    model, x, table, y = case("each")
    model, x, table, y = model.to(dtype), x.to(dtype), table.to(dtype), y.to(dtype)
    la = Laplace(model, "regression", subset, "full").fit(batched(x, table, y, ROWS))
    other = Laplace(model, "regression", subset, "full").fit(batched(x, table, y, 20))
    assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood(), 0.1)
