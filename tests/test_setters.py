"""A hyperparameter that is set later is the same as one given to the constructor, for every kind of posterior."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

from laplace import Laplace
from laplace.errors import NotFittedError, OptionError, UnknownAttributeError, UnsupportedError
from laplace.inference import values as held
from laplace.structures import STRUCTURES
from networks import cut, make
from zoo import build

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")


def values(task, subset, structure):
    """Every hyperparameter away from its default, vectors where they are allowed."""
    model, _, _, names = build("residual", task)
    parameters = [p for n, p in model.named_parameters() if subset == "all" or n in ("out.weight", "out.bias")]
    weights = sum(p.numel() for p in parameters)
    torch.manual_seed(3)
    out = {
        "prior_mean": torch.randn(weights, dtype=torch.float64),
        "prior_precision": torch.rand(len(parameters), dtype=torch.float64) + 0.5,
        "temperature": 0.4,
    }
    if "diag" in STRUCTURES[structure].prior_structures:
        out["prior_precision"] = torch.rand(weights, dtype=torch.float64) + 0.5
    if task == "regression":
        out["sigma_noise"] = 0.3
    assert len(names) > 2
    return out


def numbers(la, x):
    """Everything that depends on a hyperparameter."""
    with torch.no_grad():
        out = [
            la.log_marginal_likelihood(), la.log_likelihood, la.scatter, la.log_det_posterior_precision,
            la.log_det_prior_precision, la.posterior_covariance, la.prior_precision_diag,
            la.log_prob(la.mean + 0.1), la.predict(x).epistemic,
        ]  # fmt: skip
        prediction = la(x)
    return [*out, prediction[1] if isinstance(prediction, tuple) else prediction]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_values_set_later_equal_values_of_the_constructor(task, subset, structure):
    model, x, y, _ = build("residual", task)
    given = values(task, subset, structure)
    late = Laplace(model, task, subset, structure).fit(cut(x, y, 5))
    plain = numbers(late, x)
    for name, value in given.items():
        before = float(late.log_marginal_likelihood())
        setattr(late, name, value)
        assert float(late.log_marginal_likelihood()) != before  # nothing old is kept
        early = Laplace(model, task, subset, structure, **{name: value}).fit(cut(x, y, 5))
        alone = Laplace(model, task, subset, structure).fit(cut(x, y, 5))
        numbers(alone, x)
        setattr(alone, name, value)
        for one, other in zip(numbers(alone, x), numbers(early, x), strict=True):
            torch.testing.assert_close(one, other)
    early = Laplace(model, task, subset, structure, **given).fit(cut(x, y, 5))
    for one, other, old in zip(numbers(late, x), numbers(early, x), plain, strict=True):
        torch.testing.assert_close(one, other)
        assert not torch.allclose(one, old)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_evidence_with_every_hyperparameter_is_its_formula(task, subset, structure):
    model, x, y, _ = build("residual", task)
    given = values(task, subset, structure)
    la = Laplace(model, task, subset, structure, **given).fit(cut(x, y, 5))
    sigma, temperature = given.get("sigma_noise", 1.0), given["temperature"]
    delta, mu = la.prior_precision_diag, given["prior_mean"]
    precision = la.posterior.fit.curvature.matrix() / (sigma**2 * temperature) + delta.diag()
    f = model(x).detach()
    if task == "classification":
        loglik = -torch.nn.functional.cross_entropy(f, y, reduction="sum")
    else:
        loglik = torch.distributions.Normal(f, sigma).log_prob(y).sum()
    scatter = ((la.mean - mu).square() * delta).sum()
    expected = loglik / temperature - 0.5 * (scatter + torch.logdet(precision) - delta.log().sum())
    torch.testing.assert_close(la.log_marginal_likelihood(), expected)
    torch.testing.assert_close(la.posterior_covariance, torch.linalg.inv(precision))


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_values_survive_a_further_fit(subset):
    model, x, y, _ = build("residual", "regression")
    given = values("regression", subset, "full")
    la = Laplace(model, "regression", subset, "full").fit(cut(x[:6], y[:6], 5))
    for name, value in given.items():
        setattr(la, name, value)
    la.fit(cut(x[6:], y[6:], 5), override=False)
    whole = Laplace(model, "regression", subset, "full", **given).fit(cut(x, y, 5))
    torch.testing.assert_close(la.log_marginal_likelihood(), whole.log_marginal_likelihood())
    torch.testing.assert_close(la(x), whole(x))


def test_an_evidence_that_fails_leaves_every_value_as_it_was(monkeypatch):
    model, x, y, _ = build("residual", "regression")
    la = Laplace(model, "regression", sigma_noise=0.3, prior_precision=2.0)
    before = la.values, la.runner.spec
    with pytest.raises(NotFittedError):
        la.log_marginal_likelihood(sigma_noise=[0.2, 0.4])  # their relation is the likelihood's
    assert (la.values, la.runner.spec) == before
    la.fit(cut(x, y, 5))
    before = la.values, la.runner.spec
    with pytest.raises(OptionError):
        la.log_marginal_likelihood(prior_precision=3.0, sigma_noise=-1.0)
    monkeypatch.setattr(held, "posterior", interrupted)
    with pytest.raises(KeyboardInterrupt):
        la.log_marginal_likelihood(prior_precision=3.0, sigma_noise=0.5)
    assert la.values is before[0]
    assert la.runner.spec is before[1]


def interrupted(la):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "meant"),
    [("prior_precison", "prior_precision"), ("prior_prec", "prior_precision"), ("sigma", "sigma_noise")],
)
def test_a_misspelt_hyperparameter_is_refused(name, meant):
    model, _, _, _ = build("residual", "regression")
    la = Laplace(model, "regression")
    for kind in (UnknownAttributeError, AttributeError, OptionError):
        with pytest.raises(kind, match=f"no attribute '{name}'. Did you mean '{meant}'?"):
            setattr(la, name, 10.0)
    assert not hasattr(la, name)


def test_attributes_of_ones_own_are_kept():
    class Own(Laplace):
        def __init__(self, *args):
            super().__init__(*args)
            self.history = []

    model, _, _, _ = build("residual", "regression")
    la = Own(model, "regression")
    la.run_name, la._private = "first", 1
    assert (la.history, la.run_name, la._private) == ([], "first", 1)
    assert copy.deepcopy(la).run_name == "first"


@pytest.mark.parametrize("fit", [False, True])
def test_an_option_cannot_be_set_later(fit):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification")
    if fit:
        la.fit(cut(x, y, 8))
    may_be_set = {"prior_precision", "prior_mean", "prior", "sigma_noise", "temperature", "softmax_temperature"}
    options = {*inspect.signature(Laplace).parameters} - may_be_set - {"enable_backprop"}
    before = {name: getattr(la, name) for name in options if name != "backend"}
    for name in options:
        with pytest.raises(UnsupportedError, match=rf"^{name} is fixed. Write another Laplace\(..., {name}='full'\)"):
            setattr(la, name, "full")
    assert all(getattr(la, name) is value for name, value in before.items())
    la.note = "mine"
    la.note = "still mine"
