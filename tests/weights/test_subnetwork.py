"""Everything that works on all weights works on a subnetwork: tuning, files, warnings, dtypes, draws."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import InputError, LaplaceWarning, MemoryBudgetError, StaleWarning
from networks import cut
from subsets import options, scattered
from zoo import build


def subnetwork(task="regression", network="residual", **told):
    model, x, y, _ = build(network, task)
    la = Laplace(model, task, "subnetwork", told.pop("structure", "full"), subnetwork_indices=scattered(model), **told)
    return la.fit(cut(x, y, 4)), x, y


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diag"])
def test_tuning_finds_a_stationary_point(structure, prior):
    la, *_ = subnetwork(structure=structure, network="mlp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)  # some precisions go to the edge
        la.optimize_prior_precision(prior_structure=prior)
    precision = la.prior_precision.log().requires_grad_()
    (gradient,) = torch.autograd.grad(la.log_marginal_likelihood(precision.exp()), precision)
    assert float((gradient * (precision.detach().abs() < 18)).abs().max()) < 1e-4


@pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
def test_grid_search_takes_the_value_of_best_score():
    la, x, y = subnetwork("classification")
    y, scores = y.roll(3), {}  # other labels than those of the fit
    for value in (1e-2, 1.0, 1e2):
        la.prior_precision = value
        scores[value] = float(-la(x).gather(1, y[:, None]).log().mean())
    told = {"grid_size": 3, "log_prior_prec_min": -2, "log_prior_prec_max": 2}
    la.optimize_prior_precision(method="gridsearch", val_loader=[(x, y)], **told)
    assert len(set(scores.values())) == 3
    assert float(la.prior_precision) == pytest.approx(min(scores, key=scores.get))


@pytest.mark.parametrize("subset", ["globs", "predicate", "scattered"])
def test_a_round_trip_through_a_file_is_exact(subset, tmp_path):
    model, x, y, _ = build("residual", "classification")
    told, _ = options(subset, model)
    la = Laplace(model, "classification", hessian_structure="full", **told).fit(cut(x, y, 4))
    la.prior_precision = torch.linspace(0.5, 2, la.n_params, dtype=torch.float64)
    torch.save(la.state_dict(), tmp_path / "la.pt")
    again = Laplace(model, "classification", hessian_structure="full", **told)
    again.load_state_dict(torch.load(tmp_path / "la.pt", weights_only=True))
    assert torch.equal(again(x), la(x))
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    assert torch.equal(again(x, "nn", generator=torch.Generator().manual_seed(0)),
                       la(x, "nn", generator=torch.Generator().manual_seed(0)))  # fmt: skip
    again.fit(cut(x, y, 4), override=False)
    assert again.n_data == 22


def test_the_state_of_another_subset_is_refused():
    la, *_ = subnetwork()
    state = la.state_dict()
    index = la.subnetwork_indices
    other = Laplace(la.model, "regression", "subnetwork", "full", subnetwork_indices=index[1:])
    with pytest.raises(InputError, match="another subnetwork"):
        other.load_state_dict(state)
    with pytest.raises(InputError, match="subset_of_weights='subnetwork', this object has 'all'"):
        Laplace(la.model, "regression", "all", "full").load_state_dict(state)
    key = next(k for k in state if k.startswith("index/"))
    with pytest.raises(InputError, match="indices outside the parameter"):
        Laplace(la.model, "regression", "subnetwork", "full", subnetwork_indices=index).load_state_dict(
            state | {key: state[key] + 10_000}
        )


def test_changed_weights_are_noticed():
    la, x, _ = subnetwork()
    with torch.no_grad():
        la.model.out.weight[0, 0] += 1  # every third weight is chosen: the first is
    with pytest.warns(StaleWarning, match="uncertain weights of the network have changed"):
        la(x)
    la, x, _ = subnetwork()
    with torch.no_grad():
        la.model.out.weight[0, 1] += 1
    with pytest.warns(StaleWarning, match="have been written to"):
        la(x)


def test_a_structure_that_cannot_fit_names_those_that_serve_scattered_weights():
    model, x, y = nn.Linear(120, 10), torch.randn(3, 120), torch.randn(3, 10)
    la = Laplace(model, "regression", "subnetwork", "full", subnetwork_indices=torch.arange(1100), memory_budget=10**6)
    with pytest.raises(MemoryBudgetError, match=r"1,100 weights.*What would fit: (?!.*'kron').*'diag'"):
        la.fit([(x, y)])


def test_coverage_and_summary_count_the_chosen_weights():
    la, *_ = subnetwork(structure="diag")
    rows = {row.name: row for row in la.coverage()}
    assert (rows["block.weight"].shape, rows["block.weight"].weights) == ((4, 4, 3), 16)
    assert rows["block.weight"].rule == "conv"
    assert sum(row.weights for row in rows.values()) == la.n_params == len(la.subnetwork_indices)
    assert "subnetwork: 14 tensors, conv.weight to out.bias (70 weights)" in repr(la)
    assert "['*.bias']" in repr(Laplace(la.model, "regression", "*.bias"))
    assert la.to("cpu") is la


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_close_to_float64(dtype):
    exact, x, _ = subnetwork("classification", "mlp")
    model, x, y, _ = build("mlp", "classification")
    model = model.to(dtype)
    la = Laplace(model, "classification", "subnetwork", "full", subnetwork_indices=scattered(model))
    la.fit(cut(x.to(dtype), y, 4))
    assert la.mean.dtype == torch.float32
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    assert float((la(x.to(dtype)).double() - exact(x)).abs().max()) < tolerance
    assert la(x.to(dtype), "nn").isfinite().all()


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_gradients_of_the_predictive_in_the_inputs(structure):
    la, x, _ = subnetwork(structure=structure, enable_backprop=True)
    new = x[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda inputs: la(inputs, diagonal_output=True)[1], (new,), atol=1e-6)
