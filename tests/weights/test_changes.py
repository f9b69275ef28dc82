"""A network is the one that was fitted only where every value is where it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import InputError, StaleWarning, UnsupportedError
from laplace.weights import Snapshot
from networks import cut


def network() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()
    model(torch.randn(30, 4).double())
    return model.eval(), torch.randn(9, 4).double(), torch.randn(9, 2).double()


def permute_rows(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.flip(0)


def permute_entries(model: nn.Module) -> None:
    w = model[0].weight.data
    w.copy_(w.flatten()[torch.randperm(w.numel())].view_as(w))


def flip_signs(model: nn.Module) -> None:
    """In pairs of equal numbers, so that sum and norm stay."""
    b = model[0].bias.data
    b[0], b[1] = -b[1].clone(), -b[0].clone()
    b[0] = -b[1]


def swap_statistics(model: nn.Module) -> None:
    model[1].running_mean.data = model[1].running_mean.roll(1)


CHANGES = [permute_rows, permute_entries, flip_signs, swap_statistics]


@pytest.mark.parametrize("change", CHANGES)
def test_rearranged_values_are_noticed_where_answers_are_kept(change, tmp_path):
    model, x, y = network()
    la = Laplace(model, "regression", "last_layer", "full").fit(cut(x, y, 4))
    saved = copy.deepcopy(model.state_dict())
    change(model)
    with pytest.raises(UnsupportedError, match=r"'(0|1)\.\w+' has other values"):
        la.fit(cut(x, y, 4), override=False)
    with pytest.raises(UnsupportedError, match="have changed"):
        la.save(tmp_path / "posterior.safetensors")
    other = Laplace(model, "regression", "last_layer", "full").fit(cut(x, y, 4))
    for one, two in ((la, other), (other, la)):
        with pytest.raises(InputError, match="the weights of the network"):
            _ = one + two
        with pytest.raises(InputError, match="the weights of the network"):
            _ = one - two
    model.load_state_dict(saved)
    la.fit(cut(x, y, 4), override=False)
    la.save(tmp_path / "posterior.safetensors")
    assert Laplace.load(tmp_path / "posterior.safetensors", model).n_data == 18


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_of_a_posterior_notices_rearranged_values(change):
    model, x, y = network()
    la = copy.deepcopy(Laplace(model, "regression", "last_layer", "full").fit(cut(x, y, 4)))
    change(la.model)
    with pytest.warns(StaleWarning):
        la(x)


def test_posteriors_of_shards_add_across_copies_of_a_network():
    model, x, y = network()
    a = Laplace(model, "regression", "last_layer", "full").fit([(x[:5], y[:5])])
    twin = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    b = Laplace(twin, "regression", "last_layer", "full").fit([(x[5:], y[5:])])
    whole = Laplace(model, "regression", "last_layer", "full").fit([(x, y)])
    torch.testing.assert_close((a + b).posterior_precision, whole.posterior_precision)


def test_values_are_the_same_in_another_layout_of_memory():
    model = nn.Conv2d(3, 4, 3)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("phase", torch.randn(3, dtype=torch.cfloat).conj())
    model.register_buffer("table", torch.zeros(2), persistent=False)
    before = Snapshot.of(model)
    model.to(memory_format=torch.channels_last)
    model.table = torch.zeros(5)  # made on the way, as long as the inputs
    assert not before.differs(Snapshot.of(model))
    model.phase = model.phase.conj()
    assert "'phase' has other values" in before.differs(Snapshot.of(model))


def test_a_pickle_of_a_posterior_without_digests_can_still_be_used():
    """Earlier versions kept sums of the values."""
    model, x, y = network()
    la = Laplace(model, "regression", "last_layer", "full").fit(cut(x, y, 4))
    old = Snapshot.__new__(Snapshot)
    old.__dict__.update(versions=None, sums=((1.0, 2.0),))
    la.runner.snapshot = old
    expected = la(x)
    la = copy.deepcopy(la)  # as a pickle does
    torch.testing.assert_close(la(x), expected)
    la.fit(cut(x, y, 4), override=False)
    assert la.n_data == 18
