"""The evidence's optimum: stationary, the same as Adam's, MacKay's fixed point, bounded where there is none."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from laplace import Laplace
from laplace.errors import BoundaryWarning, OptionError, UnsupportedError
from laplace.priors.gaussian import GaussianPrior
from laplace.structures import STRUCTURES
from networks import CLOSED, cut, make

CASES = [(s, p) for s in CLOSED for p in STRUCTURES[s].prior_structures]


def fitted(task, structure, **options):
    model, x, y = make("mlp", task, n=60)
    return Laplace(model, task, hessian_structure=structure, **options).fit(cut(x, y, 16))


@pytest.mark.parametrize(("structure", "prior"), CASES)
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("curvature", ["ggn", "ef"])
def test_the_optimum_is_stationary(structure, prior, task, curvature):
    la = fitted(task, structure, curvature=curvature, temperature=0.8)
    noisy = task == "regression"
    la.optimize_prior_precision(prior_structure=prior, tune_sigma_noise=noisy)
    precision = la.prior_precision.log().requires_grad_()
    sigma = la.sigma_noise.log().requires_grad_()
    value = la.log_marginal_likelihood(precision.exp(), sigma.exp() if noisy else None)
    gradients = torch.autograd.grad(value, (precision, sigma) if noisy else (precision,))
    at_edge = precision.detach().abs() > 18
    assert float((gradients[0] * ~at_edge).abs().max()) < 1e-5
    if noisy:
        assert float(gradients[1].abs()) < 1e-5


@pytest.mark.parametrize("structure", [s if s == "kron" else pytest.param(s, marks=pytest.mark.slow) for s in CLOSED])
def test_newton_finds_what_a_long_run_of_adam_finds_in_a_hundredth_of_its_factorisations(structure):
    la = fitted("regression", structure)
    log_precision = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    log_sigma = torch.zeros((), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([log_precision, log_sigma], lr=0.05)

    for _ in range(1500):
        adam.zero_grad()
        (-la.log_marginal_likelihood(log_precision.exp(), log_sigma.exp())).backward()
        adam.step()
    la.prior_precision, la.sigma_noise = 1.0, 1.0
    tuned = la.tune("prior_precision", "sigma_noise", method="evidence", prior_structure="layerwise")
    torch.testing.assert_close(la.prior_precision.log(), log_precision.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(la.sigma_noise.log(), log_sigma.detach(), atol=1e-4, rtol=1e-4)
    assert tuned.factorisations <= 15


@pytest.mark.parametrize("start", [1e-6, 1.0, 1e6])
def test_the_optimum_does_not_depend_on_the_start(start):
    la = fitted("classification", "kron")
    la.optimize_prior_precision(init_prior_prec=start, prior_structure="layerwise")
    found = la.prior_precision
    la.optimize_prior_precision(prior_structure="layerwise")
    torch.testing.assert_close(found, la.prior_precision, rtol=1e-6, atol=0)


def test_mackays_fixed_point_holds():
    la = fitted("regression", "full")
    la.optimize_prior_precision(tune_sigma_noise=True)
    delta, sigma = float(la.prior_precision), float(la.sigma_noise)
    gamma = la.n_params - delta * float(la.posterior_variance.sum())
    assert delta == pytest.approx(gamma / float(la.mean.square().sum()), rel=1e-6)
    assert sigma**2 == pytest.approx(2 * la.loss / (60 * 2 - gamma), rel=1e-6)


@pytest.mark.parametrize("damping", [True, "balanced"])
def test_a_damped_prior_is_tuned_to_a_stationary_point(damping):
    la = fitted("regression", "kron", damping=damping)
    la.optimize_prior_precision(prior_structure="layerwise", tune_sigma_noise=True)
    precision, sigma = la.prior_precision.log().requires_grad_(), la.sigma_noise.log().requires_grad_()
    value = la.log_marginal_likelihood(precision.exp(), sigma.exp())
    for gradient in torch.autograd.grad(value, (precision, sigma)):
        assert float(gradient.abs().max()) < 1e-5


def test_a_bias_at_its_prior_mean_is_held_at_the_bound_and_warned_of():
    model, x, y = make("mlp", "classification")
    torch.nn.init.zeros_(model[2].bias)
    la = Laplace(model, "classification").fit(cut(x, y, 8))
    with pytest.warns(BoundaryWarning, match=r"2\.bias.*infinity"):
        la.optimize_prior_precision(prior_structure="layerwise")
    assert float(la.prior_precision[1]) == pytest.approx(1e8, rel=1e-5)
    assert 1e-3 < float(la.prior_precision[0]) < 1e3


def test_float32_finds_the_same_optimum():
    model, x, y = make("mlp", "regression", n=60)
    double = Laplace(model, "regression", hessian_structure="full").fit(cut(x, y, 16))
    double.optimize_prior_precision(tune_sigma_noise=True)
    single = Laplace(model.float(), "regression", hessian_structure="full").fit(cut(x.float(), y.float(), 16))
    single.optimize_prior_precision(tune_sigma_noise=True)
    assert float(single.prior_precision) == pytest.approx(float(double.prior_precision), rel=1e-3)
    assert float(single.sigma_noise) == pytest.approx(float(double.sigma_noise), rel=1e-4)


@pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
@pytest.mark.parametrize(("structure", "prior"), [*CASES])
@pytest.mark.parametrize("start", [1e-3, 1.0, 1e3])
def test_tuning_never_ends_below_its_start_even_in_float32_with_dead_units(structure, prior, start):
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))
    with torch.no_grad():
        model[0].bias[:4] = -100.0  # never active: no curvature
        model[2].weight[:, 0] = 0.0  # and at the prior mean
    x, y = torch.randn(80, 6), torch.randn(80, 4)
    la = Laplace(model, "regression", hessian_structure=structure).fit(cut(x, y, 16))
    la.prior_precision = start
    before = float(la.log_marginal_likelihood())
    la.optimize_prior_precision(prior_structure=prior, tune_sigma_noise=True, init_prior_prec=start)
    assert float(la.log_marginal_likelihood()) >= before
    scalar = Laplace(model, "regression", hessian_structure=structure).fit(cut(x, y, 16))
    scalar.optimize_prior_precision(tune_sigma_noise=True)
    assert float(la.log_marginal_likelihood()) >= float(scalar.log_marginal_likelihood()) - 1e-2


def test_verbose_prints_the_way_and_the_result(capsys):
    la = fitted("classification", "kron")
    la.optimize_prior_precision(verbose=True)
    out = capsys.readouterr().out
    assert "log evidence" in out
    assert "prior precision" in out


def test_what_cannot_be_tuned_is_said():
    la = fitted("classification", "kron")
    with pytest.raises(UnsupportedError, match=r"no optimum in the temperature.*method='validation'"):
        la.tune("temperature", method="evidence")
    with pytest.raises(
        UnsupportedError, match=r"kron has no form.*'scalar', 'layerwise'.*'full', 'diag', 'block', 'inf' or 'lowrank'"
    ):
        la.optimize_prior_precision(prior_structure="diag")
    with pytest.raises(OptionError, match="for regression"):
        la.optimize_prior_precision(tune_sigma_noise=True)
    with pytest.raises(OptionError, match=r"method='newton'.*'marglik', 'gridsearch'"):
        la.optimize_prior_precision(method="newton")
    with pytest.raises(OptionError, match=r"prior_structure='block'"):
        la.optimize_prior_precision(prior_structure="block")
    assert float(la.prior_precision) == 1
    assert la.temperature == 1


@pytest.mark.parametrize("precision", [2.0, [0.3, 20.0]])
def test_noise_alone_is_tuned_with_the_prior_held(precision):
    la = fitted("regression", "kron", prior_precision=torch.tensor(precision, dtype=torch.float64))
    tuned = la.tune("sigma_noise", method="evidence")
    assert la.prior_precision.tolist() == precision
    assert tuned.prior_precision.tolist() == pytest.approx(precision)
    log_sigma = la.sigma_noise.log().requires_grad_()
    (gradient,) = torch.autograd.grad(la.log_marginal_likelihood(None, log_sigma.exp()), log_sigma)
    assert float(gradient.abs()) < 1e-5


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_is_returned_is_what_was_seen_and_is_set(structure):
    la = fitted("regression", structure)
    tuned = la.tune("sigma_noise", "prior_precision", method="evidence")
    assert float(la.prior_precision) == float(tuned.prior_precision)
    assert float(la.sigma_noise) == tuned.sigma_noise
    assert tuned.score == pytest.approx(float(la.log_marginal_likelihood()))
    assert tuned.score == max(point.score for point in tuned.points)
    for point in tuned.points:
        value = la.log_marginal_likelihood(point.prior_precision, point.sigma_noise)
        assert point.score == pytest.approx(float(value))
    assert tuned.factorisations == len(tuned.points) >= tuned.steps
    values, scores = tuned.curve()
    assert len(values) == len(scores) == len(tuned.points)
    assert (values.diff() >= 0).all()
    assert f"log evidence {tuned.score:.6g}" in repr(tuned)
    with pytest.raises(OptionError, match=r"index=3: there are 1 values"):
        tuned.curve(index=3)


@pytest.mark.parametrize("groups", ["scalar", "layerwise", "diag"])
def test_the_terms_of_the_prior_are_those_of_its_dense_precision(groups):
    la = fitted("regression", "diag")
    layout, theta = la.posterior.fit.layout, la.mean
    torch.manual_seed(0)
    count = {"scalar": 1, "layerwise": len(layout.names), "diag": layout.n_params}[groups]
    prior = GaussianPrior(0.1 + torch.rand(count, dtype=torch.float64), torch.randn_like(theta))
    owner = torch.arange(len(layout.names)).repeat_interleave(torch.tensor(layout.sizes))  # the tensor of each weight
    owner = {"scalar": 0 * owner, "layerwise": owner, "diag": torch.arange(len(theta))}[groups]
    dense, away = prior.precision[owner].diag(), theta - prior.mean
    terms = prior.terms(theta, layout, groups, prior.distances(theta, layout, groups))
    close = partial(torch.allclose, rtol=1e-12)
    assert close(terms.scatter, away @ dense @ away)
    assert close(terms.logdet, torch.logdet(dense))
    for power, found in enumerate(terms.traces, 1):
        variances = torch.linalg.matrix_power(dense.inverse(), power).diagonal()
        assert close(found, torch.zeros(count, dtype=torch.float64).index_add(0, owner, variances))


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_every_point_of_the_way_has_the_evidence_that_is_computed_from_the_weights(prior):
    la = fitted("classification", "kron", prior_mean=0.1)
    tuned = la.tune(method="evidence", prior_structure=prior)
    for point in tuned.points:
        assert point.score == pytest.approx(float(la.log_marginal_likelihood(point.prior_precision)), rel=1e-12)


def test_what_was_warned_of_is_noted():
    model, x, y = make("mlp", "classification")
    torch.nn.init.zeros_(model[2].bias)
    la = Laplace(model, "classification").fit(cut(x, y, 8))
    with pytest.warns(BoundaryWarning):
        tuned = la.tune(prior_structure="layerwise", method="evidence")
    assert "2.bias" in tuned.notes[0]
    assert f"note: {tuned.notes[0]}" in repr(tuned)
