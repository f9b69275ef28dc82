"""Hyperparameters of any prior by the evidence, trained with, saved and loaded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, marglik_training
from laplace.errors import CheckpointError, InputError, LaplaceWarning, OptionError, UnsupportedError
from laplace.priors import CorrelatedGaussian, GaussianPrior, Prior, SmoothedLaplace, StudentT, from_log_density
from priors.test_priors import Case, Logistic, _logistic, correlated, same, spd


def _flat_top(theta: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Independent logistic weights around a mean that may be negative."""
    return _logistic(theta - shift, scale)


TUNED = {
    "student-t": (lambda case: StudentT(30.0, 1.0), "full", ["scale"]),
    "laplace": (lambda case: SmoothedLaplace(1.0, 0.5), "diag", ["scale"]),
    "correlated": (lambda case: CorrelatedGaussian(correlated(case)[0]), "kron", ["strength"]),
    "own": (lambda case: from_log_density(_logistic, independent="weights", scale=1.0), "block", ["scale"]),
    "own class": (lambda case: Logistic(1.0), "diag", ["scale"]),
    "own, two": (
        lambda case: from_log_density(_flat_top, independent="weights", unrestricted="shift", scale=1.0, shift=0.0),
        "full",
        ["scale", "shift"],
    ),
}


def slope(la: Laplace, prior: Prior, name: str) -> Tensor:
    """The derivative of the evidence in a hyperparameter by central differences, each refitted from nothing."""
    value, step = prior.hyperparameters[name], 1e-4
    ends = []
    for sign in (1, -1):
        la.prior = prior.with_hyperparameters(**{name: value + sign * step})
        ends.append(la.log_marginal_likelihood())
    la.prior = prior
    return (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("kind", TUNED)
def test_tuning_ends_where_the_evidence_is_flat_in_every_hyperparameter(kind, task):
    make, structure, names = TUNED[kind]
    case = Case(task, "all" if structure in ("kron", "full") else "last_layer")
    la = case.fit(make(case), structure)
    start = float(la.log_marginal_likelihood())
    found = la.tune(*([*names, "sigma_noise"] if task == "regression" else []), method="evidence")
    assert found.converged
    assert found.score > start
    assert float(la.log_marginal_likelihood()) == pytest.approx(found.score, abs=1e-9)
    assert list(found.hyperparameters) == list(la.prior.hyperparameters)
    for name in names:
        assert float(la.prior.hyperparameters[name]) == float(found.hyperparameters[name])
        assert abs(float(slope(la, la.prior, name))) < 1e-3
    values, scores = found.curve(names[0])
    assert len(values) == len(scores) == len(found.points)
    assert names[0] in str(found)


def test_one_scale_per_tensor_is_tuned_layerwise():
    case = Case("regression", "all")
    la = case.fit(SmoothedLaplace(1.0, 0.5))
    shared = la.tune().score
    found = la.tune(prior_structure="layerwise")
    assert la.prior.hyperparameters["scale"].shape == (4,)
    assert la.prior.hyperparameters["smoothing"].shape == ()
    assert found.score > shared
    with pytest.raises(UnsupportedError, match="Take 'scalar' or 'layerwise'"):
        la.tune(prior_structure="diag")


def test_optimize_prior_precision_tunes_what_the_prior_has():
    case = Case("regression")
    la, other = case.fit(StudentT(30.0, 1.0)), case.fit(StudentT(30.0, 1.0))
    la.optimize_prior_precision()
    other.tune("scale")
    same(la.prior.hyperparameters["scale"], other.prior.hyperparameters["scale"])
    assert float(la.prior.hyperparameters["df"]) == 30.0


def test_names_that_the_prior_has_not_are_refused():
    la = Case("regression").fit(StudentT(30.0, 1.0))
    with pytest.raises(OptionError, match="'df', 'scale', 'sigma_noise', 'temperature'"):
        la.tune("prior_precision")
    batches = [(Case("regression").x, Case("regression").y)]
    with pytest.raises(UnsupportedError, match="method='evidence'"):
        la.tune("scale", method="validation", val_loader=batches)
    with pytest.raises(OptionError, match="no hyperparameters"):
        Case().fit(from_log_density(lambda w: -w.square().sum())).tune()
    la.tune("sigma_noise", "temperature", method="validation", val_loader=batches)
    assert la.tune("sigma_noise").converged
    assert float(la.prior.hyperparameters["scale"]) == 1.0


def test_a_gaussian_by_its_log_density_is_tuned_to_the_same_precision():
    case = Case("regression", "all")

    def density(theta: Tensor, precision: Tensor) -> Tensor:
        return 0.5 * (len(theta) * (precision / (2 * torch.pi)).log() - precision * theta.square().sum())

    la, exact = case.fit(from_log_density(density, precision=1.0)), case.fit(GaussianPrior(1.0, 0.0))
    same(la.log_marginal_likelihood(), exact.log_marginal_likelihood())
    la.tune()
    exact.tune()
    assert float(la.prior.hyperparameters["precision"]) == pytest.approx(float(exact.prior_precision), rel=1e-5)


def test_the_evidence_is_differentiable_in_hyperparameters_of_the_user():
    case = Case("regression")
    la = case.fit(StudentT(30.0, 1.0))
    scale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    la.prior = la.prior.with_hyperparameters(scale=scale)
    (found,) = torch.autograd.grad(la.log_marginal_likelihood(), scale)
    assert float(found) == pytest.approx(float(slope(la, StudentT(30.0, 0.8), "scale")), rel=1e-5)


PENALTIES = [StudentT(5.0, 0.5), SmoothedLaplace(0.5, 0.3), CorrelatedGaussian({"0.bias": spd(4, 0)})]


@pytest.mark.parametrize("prior", PENALTIES)
def test_training_goes_down_the_negative_log_posterior(prior):
    """Once trained, the gradient of -log p(y given theta) - log p(theta) is zero."""
    case = Case("regression", "all")
    model = copy.deepcopy(case.model)
    la, trained, evidences, losses = marglik_training(
        model, [(case.x, case.y)], "regression", "full", n_epochs=200, marglik_frequency=200, fix_sigma_noise=True,
        n_hypersteps=1, lr_hyp=1e-9, prior=prior, prior_structure="scalar", optimizer_kwargs={"lr": 0.03},
    )  # fmt: skip
    assert len(losses) == 200
    assert len(evidences) == 1
    theta = torch.cat([p.flatten() for p in trained.parameters()])
    log_lik = -0.5 * (trained(case.x) - case.y).square().sum()
    loss = -log_lik - prior.log_density(theta, la.posterior.fit.layout)
    slopes = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(trained.parameters()))])
    assert slopes.abs().max() < 0.3
    assert losses[-1] < losses[0]


def test_training_tunes_the_prior_and_goes_on_from_a_checkpoint(tmp_path):
    case = Case("regression", "all")
    options = {
        "likelihood": "regression", "hessian_structure": "diag", "prior": SmoothedLaplace(1.0, 0.5),
        "optimizer_kwargs": {"lr": 0.01}, "keep_best": True,
    }  # fmt: skip
    loader = [(case.x, case.y)]
    whole, _, evidences, _ = marglik_training(copy.deepcopy(case.model), loader, n_epochs=6, **options)
    assert whole.prior.hyperparameters["scale"].shape == (4,)
    assert (whole.prior.hyperparameters["scale"] != 1.0).any()
    path = tmp_path / "training"
    marglik_training(copy.deepcopy(case.model), loader, n_epochs=3, checkpoint=path, **options)
    again, _, evidences_again, _ = marglik_training(
        copy.deepcopy(case.model), loader, n_epochs=6, checkpoint=path, **options
    )
    assert evidences_again == pytest.approx(evidences)
    same(again.prior.hyperparameters["scale"], whole.prior.hyperparameters["scale"])
    with pytest.raises(CheckpointError, match="prior"):
        marglik_training(
            copy.deepcopy(case.model), loader, n_epochs=6, checkpoint=path, **options | {"prior": StudentT()}
        )
    with pytest.raises(UnsupportedError, match="Take 'scalar' or 'layerwise'"):
        marglik_training(copy.deepcopy(case.model), loader, prior_structure="diag", **options)


@pytest.mark.parametrize("kind", TUNED)
def test_a_saved_posterior_comes_back_with_its_prior(kind, tmp_path):
    make, structure, names = TUNED[kind]
    case = Case("regression", "all" if structure in ("kron", "full") else "last_layer")
    la = case.fit(make(case), structure)
    la.prior = la.prior.with_hyperparameters(**{names[0]: 1.3})
    path = tmp_path / "posterior.safetensors"
    la.save(path)
    own = {"prior": make(case)} if kind.startswith("own") else {}
    back = Laplace.load(path, case.model, **own)
    same(back.log_marginal_likelihood(), la.log_marginal_likelihood())
    same(back.posterior_variance, la.posterior_variance)
    assert repr(back.prior) == repr(la.prior)
    fresh = Laplace(case.model, "regression", case.subset, structure, **own)
    fresh.load_state_dict(la.state_dict())
    same(fresh.log_marginal_likelihood(), la.log_marginal_likelihood())


def test_files_with_a_density_of_the_user_ask_for_it(tmp_path):
    case, path = Case("regression"), tmp_path / "posterior.safetensors"
    case.fit(from_log_density(_logistic, scale=1.0)).save(path)
    with pytest.raises(InputError, match=r"Laplace\.load\(\.\.\., prior=\)"):
        Laplace.load(path, case.model)
    with pytest.raises(CheckpointError, match="from_log_density\\(_logistic\\), but prior= is"):
        Laplace.load(path, case.model, prior=from_log_density(_flat_top, scale=1.0, shift=1.0))
    case.fit(StudentT()).save(path)
    with pytest.raises(CheckpointError, match="Leave it out for others"):
        Laplace.load(path, case.model, prior=StudentT())


def test_matrices_follow_their_tensors_to_new_names(tmp_path):
    case, path = Case("regression"), tmp_path / "posterior.safetensors"
    la = case.fit(CorrelatedGaussian({"2.bias": spd(2, 0)}), "kron")
    la.save(path)
    other = nn.Module()
    other.net = case.model
    other.forward = other.net.forward  # type: ignore[method-assign]
    back = Laplace.load(path, other, names={"": "net"})
    same(back.log_marginal_likelihood(), la.log_marginal_likelihood())


def test_states_with_a_damaged_prior_are_refused():
    la = Case("regression").fit(StudentT(4.0, 1.5))
    for prior in ({"kind": "cauchy"}, {"kind": "student_t", "df": -1.0}, {"df": 1.0}, 3, {"kind": "student_t", "a": 1}):
        with pytest.raises((InputError, OptionError)):
            la.load_state_dict(la.state_dict() | {"prior": prior})
    assert float(la.prior.hyperparameters["df"]) == 4.0


def test_a_posterior_moves_copies_and_adds_with_its_prior():
    case = Case("regression")
    la = case.fit(StudentT(4.0, 1.5)).to("cpu")
    same((la + la).posterior_precision, 2 * la.posterior_precision - la.prior_precision_diag.diag())
    same(copy.deepcopy(la).log_marginal_likelihood(), la.log_marginal_likelihood())


def test_float32_networks_have_the_evidence_of_float64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(30, 3), torch.randn(30, 2)
    values = []
    for dtype in (torch.float32, torch.float64):
        la = Laplace(model.to(dtype), "regression", "all", "full", prior=StudentT(5.0, 2.0))
        values.append(float(la.fit([(x.to(dtype), y.to(dtype))]).log_marginal_likelihood()))
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_an_evidence_without_an_optimum_is_said():
    case = Case("regression")
    la = case.fit(from_log_density(lambda w, scale: scale.log() - w.square().sum(), independent="weights", scale=1.0))
    with pytest.warns(LaplaceWarning, match="no optimum in scale"):
        la.tune()
