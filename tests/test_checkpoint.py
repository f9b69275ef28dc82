"""`state_dict`: a round trip changes nothing, and what does not fit is refused."""

from __future__ import annotations

import pytest
import torch

from laplace import Laplace
from laplace.errors import InputError
from networks import cut, make


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_round_trip_through_a_file_is_exact(structure, task, tmp_path):
    model, x, y = make("mlp", task)
    options = {"hessian_structure": structure, "temperature": 0.5}
    la = Laplace(model, task, **options).fit(cut(x, y, 6))
    la.optimize_prior_precision(prior_structure="layerwise")
    if task == "regression":
        la.sigma_noise = 0.3
    torch.save(la.state_dict(), tmp_path / "la.pt")
    again = Laplace(model, task, hessian_structure=structure)
    again.load_state_dict(torch.load(tmp_path / "la.pt", weights_only=True))
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    assert torch.equal(again.posterior_covariance, la.posterior_covariance)
    a, b = la(x), again(x)
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    la.fit(cut(x, y, 6), override=False)
    again.fit(cut(x, y, 6), override=False)
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())


def test_the_state_does_not_change_with_the_object():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 6))
    state = la.state_dict()
    copy = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    la.fit(cut(x, y, 6), override=False)
    assert all(torch.equal(v, copy[k]) for k, v in state.items() if isinstance(v, torch.Tensor))


def test_another_structure_network_or_file_is_refused_and_nothing_changes():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 6))
    state = la.state_dict()
    other = Laplace(model, "classification", hessian_structure="diag").fit(cut(x, y, 6))
    evidence = float(other.log_marginal_likelihood())
    with pytest.raises(InputError, match="structure='kron', this object has 'diag'"):
        other.load_state_dict(state)
    assert float(other.log_marginal_likelihood()) == evidence
    wider = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    with pytest.raises(InputError, match=r"'2.weight' of shape \(3, 7\); the network's is \(3, 9\)"):
        Laplace(wider, "classification").load_state_dict(state)
    with pytest.raises(InputError, match="not the state of a Laplace posterior"):
        la.load_state_dict({"weights": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"names": None},
        {"mean": None},
        {"sums/2.weight/A": None},
        {"sums/2.weight/A": torch.ones(2)},
        {"sums/2.weight/A": torch.full((1, 5, 5), torch.nan, dtype=torch.float64)},
        {"n_data": "many"},
    ],
    ids=["names", "mean", "no sum", "another shape", "nan", "a word"],
)
def test_a_damaged_state_is_refused_and_nothing_is_lost(change):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 6))
    before, state = la(x), la.state_dict()
    assert {*change} <= {*state}
    with pytest.raises(InputError, match="damaged"):
        la.load_state_dict(state | change)
    assert torch.equal(la(x), before)
