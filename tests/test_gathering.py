"""Small batches are run together: the same posterior, the same errors, fewer runs of the network."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from exact import assert_close
from laplace import Laplace
from laplace.errors import InputError
from laplace.network.batch_merging import Group, gathered
from laplace.network.batches import Batch
from laplace.network.inputs import Inputs
from networks import cut
from zoo import ZOO, build

pytestmark = [pytest.mark.usefixtures("gathering"), pytest.mark.filterwarnings("ignore:kron keeps")]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("kind", ["ggn", "sketch"])
@pytest.mark.parametrize("network", list(ZOO))
def test_the_posterior_is_that_of_one_batch(network, structure, kind):
    model, x, y, _ = build(network, "classification")
    one = Laplace(model, "classification", "all", structure, curvature=kind).fit([(x, y)], generator=seeded())
    many = Laplace(model, "classification", "all", structure, curvature=kind).fit(cut(x, y, 2), generator=seeded())
    assert_close(many.log_marginal_likelihood(), one.log_marginal_likelihood())
    assert_close(many(x), one(x))
    assert many.n_data == len(x)


class Counts(nn.Module):
    """Remembers the sizes of its batches, but for the few examples that the audit looks at."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self.layer, self.only = nn.Linear(3, 2), only
        Counts.sizes.clear()

    def forward(self, x):
        if len(x) > 5:
            Counts.sizes.append(len(x))
        if self.only is not None and len(x) > self.only:
            raise RuntimeError("this network takes small batches")
        return self.layer(x)


def batches_of(*sizes: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 3, generator=g), torch.randint(2, (n,), generator=g)) for n in sizes]


def test_all_but_the_first_are_run_together():
    Laplace(Counts(), "classification", "all", "diag").fit(batches_of(20, 10, 30, 7))
    assert Counts.sizes == [20, 47, 10]  # the ten once more alone, to see that joining changes nothing


def test_a_network_that_takes_small_batches_only_gets_them_as_they_come():
    batches = batches_of(20, 10, 20, 7)
    network = Counts(only=20)
    la = Laplace(network, "classification", "all", "full").fit(batches)
    assert Counts.sizes == [20, 37, 10, 20, 7]
    whole = Laplace(Counts(), "classification", "all", "full")
    whole.model.load_state_dict(network.state_dict())
    assert_close(la.H, whole.fit(batches).H, 1e-5)


def test_an_error_names_the_batch_of_the_loader():
    batches = batches_of(20, 10, 20, 7)
    batches[2][1][4] = 9
    with pytest.raises(InputError, match="batch 2: class labels lie in"):
        Laplace(Counts(), "classification", "all", "diag").fit(batches)


def test_a_loader_may_reuse_its_memory():
    batches = batches_of(6, 6, 6, 6)

    def reusing():
        x, y = torch.empty(6, 3), torch.empty(6, dtype=torch.long)
        for a, b in batches:
            yield x.copy_(a), y.copy_(b)

    torch.manual_seed(0)
    network = Counts()
    one = Laplace(network, "classification", "all", "full").fit(batches)
    assert torch.equal(Laplace(network, "classification", "all", "full").fit(reusing()).H, one.H)


def groups(*batches: Batch, room: int = 10) -> list[list[int]]:
    found = gathered(batches, lambda: room)
    return [group.indices if isinstance(group, Group) else [group.index] for group in found]


def batch(index: int, n: int, width: int = 3, x=None, y=None) -> Batch:
    inputs = Inputs(torch.zeros(n, width) if x is None else x)
    return Batch(index, inputs, torch.zeros(n, dtype=torch.long) if y is None else y)


def test_groups_hold_what_there_is_room_for():
    assert groups(batch(0, 4), batch(1, 4), batch(2, 4), batch(3, 9), batch(4, 1)) == [[0, 1], [2], [3], [4]]


def test_only_batches_of_one_kind_are_joined():
    other = batch(1, 4, 5), batch(1, 4, y=torch.zeros(4)), batch(1, 4, x=(torch.zeros(4, 3), torch.zeros(4, 3)))
    for one in other:
        assert groups(batch(0, 4), one, batch(2, 4)) == [[0], [1], [2]]
    cannot = [
        (torch.zeros(4, 3), torch.zeros(2, 3)),  # which are the examples?
        {"x": torch.zeros(4, 3), "name": "a"},  # something that is no tensor
        torch.zeros(3, 4),  # examples are not first
    ]
    for x in cannot:
        assert groups(batch(0, 4, x=x), batch(1, 4, x=x)) == [[0], [1]]


def test_mappings_and_tuples_are_joined_tensor_by_tensor():
    def mapped(index: int, n: int) -> Batch:
        return batch(index, n, x={"a": torch.full((n, 2), index), "b": (torch.full((n,), index), torch.zeros(n, 1))})

    group = Group(mapped(3, 2), 10)
    group.add(mapped(4, 3))
    whole = group.joined()
    assert whole.inputs.x["a"][:, 0].tolist() == [3, 3, 4, 4, 4]
    assert whole.inputs.x["b"][0].tolist() == [3, 3, 4, 4, 4]
    assert whole.inputs.size == len(whole.y) == 5
    assert [(len(one.y), one.index) for one in group.batches()] == [(2, 3), (3, 4)]
    assert group.batches()[1].inputs.x["b"][0].tolist() == [4, 4, 4]


def test_batches_stay_in_their_order():
    given = [Batch(i, Inputs(x), y) for i, (x, y) in enumerate(batches_of(1, 1, 4, 2, 6, 1))]
    order = [g.indices if isinstance(g, Group) else [g.index] for g in gathered(given, lambda: 6)]
    assert [index for part in order for index in part] == [0, 1, 2, 3, 4, 5]
    assert [0, 1] in order
