"""Newton's way to the evidence's optimum: few steps, and both ends of the range of precisions."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import BoundaryWarning, LaplaceWarning, NumericalError
from laplace.structures import STRUCTURES
from networks import cut, make
from zoo import build

PRIORS = [(s, p) for s in STRUCTURES for p in STRUCTURES[s].prior_structures]


def steps(capsys, la, **options):
    capsys.readouterr()
    la.optimize_prior_precision(verbose=True, **options)
    return sum(line.startswith("step") for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(("structure", "prior"), PRIORS)
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("seed", [0, 1])
def test_newton_needs_at_most_twelve_steps(structure, prior, task, seed, capsys):
    model, x, y = make("mlp", task, n=60, seed=seed)
    la = Laplace(model, task, hessian_structure=structure).fit(cut(x, y, 16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        needed = steps(capsys, la, prior_structure=prior, tune_sigma_noise=task == "regression")
    if any(issubclass(w.category, BoundaryWarning) for w in caught):
        pytest.skip("the optimum lies at a bound, some steps of bounded length away")
    assert 2 <= needed <= 12


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_newton_needs_at_most_twelve_steps_for_all_weights(structure, task, capsys):
    model, x, y, _ = build("mlp", task, n=40)
    la = Laplace(model, task, "all", structure).fit(cut(x, y, 16))
    assert 2 <= steps(capsys, la, tune_sigma_noise=task == "regression") <= 12
    assert 1 <= steps(capsys, la, init_prior_prec=la.prior_precision) <= 2  # from the optimum


def without_curvature(scale):
    """A network whose features are zero at every input: the last weight has no curvature, the bias has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
        model[2].weight.mul_(scale)
    return model, torch.randn(30, 4).double(), torch.randint(3, (30,))


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_precision_of_a_tensor_without_curvature_goes_to_zero_and_is_warned_of(structure, scale):
    """Without curvature only -delta |theta|^2 / 2 is left of the evidence: the smaller delta, the better."""
    model, x, y = without_curvature(scale)
    la = Laplace(model, "classification", hessian_structure=structure).fit(cut(x, y, 8))
    with pytest.warns(BoundaryWarning, match=r"1 of 2 prior precisions \(2\.weight\) to 0.*without curvature.*1e-08"):
        la.optimize_prior_precision(prior_structure="layerwise")
    assert float(la.prior_precision[0]) == pytest.approx(1e-8, rel=1e-5)
    assert 1e-3 < float(la.prior_precision[1]) < 1e6


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if "diag" in STRUCTURES[s].prior_structures])
def test_weights_without_curvature_are_counted_one_by_one(structure):
    model, x, y = without_curvature(3.0)
    la = Laplace(model, "classification", hessian_structure=structure).fit(cut(x, y, 8))
    with pytest.warns(BoundaryWarning, match=r"15 of 18 prior precisions to 0"):
        la.optimize_prior_precision(prior_structure="diag")
    torch.testing.assert_close(la.prior_precision[:15], torch.full((15,), 1e-8).double(), rtol=1e-5, atol=0)


def test_too_few_steps_are_warned_of():
    model, x, y = make("mlp", "classification", n=60)
    la = Laplace(model, "classification").fit(cut(x, y, 16))
    with pytest.warns(LaplaceWarning, match=r"not converged after 1 steps.*n_steps"):
        la.optimize_prior_precision(n_steps=1, init_prior_prec=1e4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("structure", ["full", "block", "kron"])
def test_noise_may_go_to_almost_nothing(structure, dtype):
    """A network that explains its data to seven digits: what the data says is 1e11 times what the prior does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 1)).to(dtype)
    x = torch.randn(200, 4, dtype=dtype)
    with torch.no_grad():
        y = model(x) + 1e-6 * torch.randn(200, 1, dtype=dtype)
    la = Laplace(model, "regression", "all", structure).fit([(x, y)])
    before = float(la.log_marginal_likelihood())
    tuned = la.tune("prior_precision", "sigma_noise", method="evidence", prior_structure="layerwise")
    assert tuned.score > before
    assert 1e-7 < tuned.sigma_noise < (1e-4 if structure == "full" else 0.1)  # tensors apart explain less
    assert la(x)[1].isfinite().all()


def test_a_step_to_where_the_prior_is_lost_is_taken_back():
    """Rank one, in float64: from some ratio on, the precision is no longer positive definite in this precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(1, 3).double().expand(30, -1).contiguous()
    with torch.no_grad():
        y = model(x)
    la = Laplace(model, "regression", "all", "full").fit([(x, y)])
    la.prior_precision, la.sigma_noise = torch.full((4,), 1e-8), 1e-8
    with pytest.raises(NumericalError, match="not positive definite"):
        la.log_marginal_likelihood()
    la.prior_precision, la.sigma_noise = 1.0, 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)
        tuned = la.tune("prior_precision", "sigma_noise", method="evidence", prior_structure="layerwise")
    assert tuned.sigma_noise < 1e-3
    assert all(a.score <= tuned.score for a in tuned.points)
    assert la.log_marginal_likelihood().isfinite()
