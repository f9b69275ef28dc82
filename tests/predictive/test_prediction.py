"""`la.predict`: one distribution with noise included, and the two kinds of uncertainty apart."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Dirichlet, MultivariateNormal, Normal
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace, Prediction
from laplace.backprop import network
from laplace.errors import InputError, OptionError
from networks import cut, make


@pytest.fixture(params=["full", "kron", "diag"])
def structure(request):
    return request.param


def fitted(task, structure="kron", **options):
    model, x, y = make("mlp", task)
    if task == "regression":
        options.setdefault("sigma_noise", 0.5)
    return Laplace(model, task, hessian_structure=structure, **options).fit(cut(x, y, 6)), x


def test_regression_is_a_normal_with_the_noise_included(structure):
    la, x = fitted("regression", structure)
    p = la.predict(x)
    mean, covariance = la(x)
    assert isinstance(p, Prediction)
    assert isinstance(p.distribution, MultivariateNormal)
    torch.testing.assert_close(p.mean, mean)
    torch.testing.assert_close(p.epistemic, covariance.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(p.aleatoric, torch.full_like(mean, 0.25))
    torch.testing.assert_close(p.distribution.variance, p.total)
    independent = la.predict(x, diagonal_output=True)
    assert isinstance(independent.distribution, Normal)
    torch.testing.assert_close(independent.distribution.variance, p.total)


def test_intervals_and_quantiles_of_regression_are_the_normals():
    la, x = fitted("regression")
    p = la.predict(x, diagonal_output=True)
    lower, upper = p.interval(0.9)
    torch.testing.assert_close(lower, p.distribution.icdf(torch.tensor(0.05)))
    torch.testing.assert_close(upper, p.distribution.icdf(torch.tensor(0.95)))
    torch.testing.assert_close(p.quantile(0.5), p.mean)
    assert p.quantile(torch.tensor([0.1, 0.2, 0.3])).shape == (3, *p.mean.shape)


def test_classification_is_categorical_and_its_entropies_add_up(structure):
    la, x = fitted("classification", structure, prior_precision=0.1)
    for link in ("probit", "mc", "delta"):
        p = la.predict(x, link_approx=link)
        assert isinstance(p.distribution, Categorical)
        torch.testing.assert_close(p.total, p.distribution.entropy())
        assert (p.epistemic > 0).all()
        assert (p.aleatoric > 0).all()


def test_the_mutual_information_is_that_of_many_draws():
    la, x = fitted("classification", prior_precision=0.1)
    p = la.predict(x, link_approx="mc", n_samples=20_000, generator=torch.Generator().manual_seed(0))
    draws = la.predictive_samples(x, n_samples=20_000, generator=torch.Generator().manual_seed(1))
    entropy = torch.special.entr(draws.mean(0)).sum(-1)
    expected = entropy - torch.special.entr(draws).sum(-1).mean(0)
    torch.testing.assert_close(p.epistemic, expected, atol=8e-3, rtol=0)


def test_epistemic_uncertainty_goes_with_more_data_and_the_labels_own_entropy_stays():
    model, x, y = make("mlp", "classification", n=40)
    one = Laplace(model, "classification").fit(cut(x, y, 8)).predict(x)
    many = Laplace(model, "classification").fit(cut(x, y, 8) * 100).predict(x)
    assert (many.epistemic < 0.2 * one.epistemic).all()
    noise = torch.distributions.Categorical(logits=model(x).detach()).entropy()
    assert ((many.aleatoric - noise).abs() < 0.05).all()


def test_the_bridge_is_a_dirichlet_with_the_same_mean():
    la, x = fitted("classification")
    for link in ("bridge", "bridge_norm"):
        p = la.predict(x, link_approx=link)
        assert isinstance(p.distribution, Dirichlet)
        torch.testing.assert_close(p.distribution.mean, la(x, link_approx=link))
        torch.testing.assert_close(p.mean, la(x, link_approx=link))
        lower, upper = p.interval(0.95)
        assert ((lower < p.mean) & (p.mean < upper)).all()


@pytest.mark.parametrize("link", ["probit", "mc", "delta"])
def test_epistemic_uncertainty_is_the_mutual_information_whatever_the_link(link):
    la, x = fitted("classification", prior_precision=0.02)
    p = la.predict(x, link_approx=link, n_samples=5000, generator=torch.Generator().manual_seed(0))
    draws = la.predictive_samples(x, n_samples=20_000, generator=torch.Generator().manual_seed(1))
    expected = torch.special.entr(draws.mean(0)).sum(-1) - torch.special.entr(draws).sum(-1).mean(0)
    torch.testing.assert_close(p.epistemic, expected, atol=0.02, rtol=0)


def test_monte_carlo_keeps_covariances_for_any_number_of_classes():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 40).double()
    x, y = torch.randn(60, 5).double(), torch.randint(40, (60,))
    la = Laplace(model, "classification").fit(cut(x, y, 30))
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    torch.testing.assert_close(
        la.predict(x, link_approx="mc", generator=generators[0]).mean, la(x, link_approx="mc", generator=generators[1])
    )


def test_class_probability_intervals_hold_the_draws():
    la, x = fitted("classification", prior_precision=0.1)
    lower, upper = la.predict(x).interval(0.9)
    draws = la.predictive_samples(x, n_samples=4000, generator=torch.Generator().manual_seed(3))
    inside = ((draws > lower) & (draws < upper)).double().mean(0)
    assert ((inside - 0.9).abs() < 0.06).all()


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_a_loader_gives_what_one_call_gives(task, pred_type, capsys):
    la, x = fitted(task)
    y = torch.zeros(len(x))
    generator = [torch.Generator().manual_seed(0) for _ in range(2)]
    whole = la.predict(x, pred_type=pred_type, n_samples=500, generator=generator[0])
    for dataset in (TensorDataset(x), TensorDataset(x, y)):
        parts = la.predict(DataLoader(dataset, 4), pred_type=pred_type, n_samples=500, generator=generator[1])
        assert len(parts) == len(x)
        tolerance = 1e-10 if pred_type == "glm" else 0.25
        torch.testing.assert_close(parts.mean, whole.mean, atol=tolerance, rtol=0)
    assert capsys.readouterr().err == ""
    la.predict(DataLoader(TensorDataset(x), 4), progress_bar=True)
    assert "predict" in capsys.readouterr().err


def test_numpy_gives_arrays_and_repr_is_short():
    la, x = fitted("regression")
    arrays = la.predict(x).numpy()
    assert set(arrays) == {"mean", "std", "variance", "epistemic", "aleatoric", "total", "entropy"}
    assert arrays.pop("entropy").shape == (23,)
    assert all(isinstance(a, np.ndarray) and a.shape == (23, 2) for a in arrays.values())
    assert repr(la.predict(x)).startswith("Prediction(23 inputs, 2 outputs, MultivariateNormal")


def test_predictions_are_the_same_each_time_without_a_generator():
    la, x = fitted("classification")
    state = torch.get_rng_state()
    a, b = la.predict(x), la.predict(x)
    assert torch.equal(a.epistemic, b.epistemic)
    assert torch.equal(a.quantile(0.3), b.quantile(0.3))
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_levels_and_inputs_are_refused():
    la, x = fitted("regression")
    p = la.predict(x)
    for level in (0, 1, 1.5):
        with pytest.raises(OptionError, match="between 0 and 1"):
            p.interval(level)
        with pytest.raises(OptionError, match="between 0 and 1"):
            p.quantile(level)
    with pytest.raises(InputError, match="no batch"):
        la.predict(iter([]))
    with pytest.raises(InputError, match="int; a tensor"):
        la.predict(3)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_prediction_sends_its_vectors_back_once(task, monkeypatch):
    model, x, y = make("mlp", task)
    la = Laplace(model, task, "all").fit(cut(x, y, 6))
    calls, jacobian = [], network.NetworkForward.jacobian
    monkeypatch.setattr(network.NetworkForward, "jacobian", lambda self, *a: calls.append(1) or jacobian(self, *a))
    la.predict(x[:3])
    assert len(calls) == 1


def test_quantiles_of_a_bridge_are_finite_however_large_the_variance():
    la, x = fitted("classification", "full", prior_precision=1e-7)
    p = la.predict(1e3 * x, link_approx="bridge")
    assert float(p.distribution.concentration.min()) < 1e-3
    low, high = p.interval(0.9)
    assert low.isfinite().all()
    assert high.isfinite().all()
    assert (low <= high).all()


def test_quantiles_of_a_bridge_are_those_of_its_dirichlet():
    la, x = fitted("classification", "full")
    p = la.predict(x[:2], link_approx="bridge")
    torch.manual_seed(0)
    drawn = p.distribution.sample((20_000,)).quantile(0.5, 0)
    torch.testing.assert_close(p.quantile(0.5), drawn, atol=0.05, rtol=0)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_distribution_at_positions_can_be_asked_again(task):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 3), torch.randn(5, 2, 4)
    y = torch.randint(3, (5, 2)) if task == "classification" else torch.randn(5, 2, 3)
    p = Laplace(model, task).fit([(x, y)]).predict(x)
    before = p.distribution.log_prob(y)
    p.rows.distribution.log_prob(y.flatten(0, 1))
    p.rows.distribution.entropy()
    _ = getattr(p.rows.distribution, "covariance_matrix", None)
    torch.testing.assert_close(p.distribution.log_prob(y), before)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_what_is_read_in_inference_mode_or_autocast_leaves_nothing_behind(structure):
    model, x, y = make("mlp", "classification")
    la = Laplace(model.float(), "classification", "all", structure, enable_backprop=True).fit([(x.float(), y)])
    expected = copy.deepcopy(la).posterior_variance, copy.deepcopy(la).square_norm(torch.zeros(la.n_params))
    with torch.inference_mode():
        _ = la.posterior_variance, la.log_prob(la.mean), la.log_det_ratio, la.posterior_covariance, repr(la)
    with torch.autocast("cpu", torch.bfloat16):
        found = la.posterior_variance, la.square_norm(torch.zeros(la.n_params))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    inputs = x.float().clone().requires_grad_()
    la(inputs).sum().backward()
    assert inputs.grad.isfinite().all()
