"""`softmax_temperature` divides the logits of predictions, p = link(N(f / T, S / T^2)), and no posterior sees it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call

from laplace import Laplace
from laplace.errors import InputError, OptionError
from laplace.linalg.contrasts import centred, centred_twice
from laplace.linalg.sampling import Draws
from laplace.predictive.outputs import OutputGaussian

T = 1.7
X = torch.linspace(-2, 2, 60, dtype=torch.float64).reshape(15, 4).sin()
LABELS = {
    "classification": torch.arange(15) % 3,
    "binary": torch.arange(15).double() % 2,
    "multilabel": (X[:, :3] > 0).double(),
}
FILES = Path(__file__).parents[1] / "files"


def fitted(task: str = "classification", structure: str = "kron", subset: str = "last_layer", **options) -> Laplace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1 if task == "binary" else 3)).double()
    return Laplace(model, task, subset, structure, **options).fit(
        [(X[:8], LABELS[task][:8]), (X[8:], LABELS[task][8:])]
    )


def divided(la: Laplace) -> OutputGaussian:
    """N(f / T, S / T^2) from the functions that do not see the temperature."""
    f = la.model(X).detach()
    jacobian = torch.func.vmap(torch.func.jacrev(lambda w, x: functional_call(la.model, w, (x,))), (None, 0))(
        {name: p.detach() for name, p in la.model.named_parameters() if name.startswith("2")}, X
    )
    rows = torch.cat([part.flatten(2) for part in jacobian.values()], 2)
    covariance = rows @ la.posterior_covariance @ rows.mT
    outputs = OutputGaussian(f / T, covariance.diagonal(dim1=1, dim2=2) / T**2, covariance / T**2)
    if not la.likelihood.only_differences:
        return outputs
    inner = centred_twice(covariance) / T**2
    return replace(outputs, contrasts=OutputGaussian(centred(f) / T, inner.diagonal(dim1=1, dim2=2), inner))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("task", LABELS)
def test_every_link_sees_the_divided_gaussian(task):
    la = fitted(task, "full", softmax_temperature=T)
    outputs = divided(la)
    for name, link in la.likelihood.links.items():
        expected = link.apply(outputs, Draws(50, generator()))
        if link.may_leave_simplex:
            continue
        found = la(X, link_approx=name, n_samples=50, generator=generator())
        torch.testing.assert_close(found, expected)
        prediction = la.predict(X, link_approx=name, n_samples=50, generator=generator())
        torch.testing.assert_close(prediction.mean, expected)
        torch.testing.assert_close(prediction.outputs.mean, outputs.mean)
        torch.testing.assert_close(prediction.outputs.variance, outputs.variance)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_draws_of_f_are_plain_and_draws_of_probabilities_are_divided(pred_type):
    la, scaled = fitted(), fitted(softmax_temperature=T)
    f = scaled.functional_samples(X, pred_type, generator=generator())
    torch.testing.assert_close(f, la.functional_samples(X, pred_type, generator=generator()))
    p = scaled.predictive_samples(X, pred_type, generator=generator())
    torch.testing.assert_close(p, (f / T).softmax(-1))
    if pred_type == "nn":
        torch.testing.assert_close(scaled(X, "nn", generator=generator()), p.mean(0))
        torch.testing.assert_close(scaled.predict(X, "nn", generator=generator()).mean, p.mean(0))


def test_the_posterior_does_not_see_it():
    la, scaled = fitted(), fitted(softmax_temperature=T)
    assert torch.equal(la.log_marginal_likelihood(), scaled.log_marginal_likelihood())
    assert torch.equal(la.posterior_covariance, scaled.posterior_covariance)


@pytest.mark.parametrize("link", ["probit", "mc", "quadrature"])
def test_preferences_see_it(link):
    torch.manual_seed(0)
    model, pairs = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double(), X[:14].reshape(7, 2, 4)
    la = Laplace(model, "reward_modeling").fit([(pairs, torch.arange(7) % 2)])
    a, b = X[:5], X[5:10]
    mean, covariance = la(torch.cat([a, b]), joint=True)
    sign = torch.cat([torch.eye(5), -torch.eye(5)], 1).double()
    difference, variance = sign @ mean, (sign @ covariance @ sign.T).diagonal()
    la.softmax_temperature = T
    outputs = OutputGaussian(difference[:, None] / T, variance[:, None] / T**2)
    draws = Draws(100, torch.Generator().manual_seed(0))
    torch.testing.assert_close(la.preference(a, b, link), la.likelihood.links[link].apply(outputs, draws).squeeze(1))
    torch.testing.assert_close(la(torch.cat([a, b]), joint=True), (mean / T, covariance / T**2))
    torch.testing.assert_close(la.predict(a).mean, mean[:5, None] / T)


@pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
def test_validation_scores_the_divided_predictions():
    la = fitted(softmax_temperature=T)
    for pred_type in ("glm", "nn"):
        tuned = la.tune(method="validation", val_loader=[(X, LABELS["classification"])], grid_size=2,
                        pred_type=pred_type, bounds={"prior_precision": (0.999, 1.001)})  # fmt: skip
        p = la.predict(X, pred_type, generator=torch.Generator().manual_seed(0)).mean
        nll = -p.gather(1, LABELS["classification"][:, None]).log().mean()
        assert tuned.score == pytest.approx(float(nll), abs=1e-9)


def test_setting_it_later_and_copies():
    la = fitted(softmax_temperature=T)
    late = fitted()
    late.softmax_temperature = T
    assert torch.equal(la(X), late(X))
    assert (la + late).softmax_temperature == T
    assert "softmax     temperature 1.7, which divides the logits" in repr(la)
    assert "softmax" not in repr(fitted())


def test_files_keep_it_and_files_from_before_have_one(tmp_path):
    la = fitted(softmax_temperature=T)
    la.save(tmp_path / "la")
    loaded = Laplace.load(tmp_path / "la", la.model)
    assert loaded.softmax_temperature == T
    assert torch.equal(loaded(X), la(X))
    state = la.state_dict()
    del state["softmax_temperature"]
    la.load_state_dict(state)
    assert la.softmax_temperature == 1
    for wrong in ("2", -1.0, float("nan"), True):
        with pytest.raises(InputError, match=r"softmax_temperature is .*; needed: a number above 0"):
            la.load_state_dict(state | {"softmax_temperature": wrong})
    assert la.softmax_temperature == 1


@pytest.mark.parametrize("task", ["regression", "poisson", "heteroscedastic", "given_noise"])
def test_outputs_that_are_no_logits_refuse_it(task):
    with pytest.raises(OptionError, match=r"softmax_temperature=2 divides logits; the outputs of \w+ are none"):
        Laplace(nn.Linear(4, 2), task, softmax_temperature=2.0)
    la = Laplace(nn.Linear(4, 2), task, softmax_temperature=1.0)
    with pytest.raises(OptionError, match="Leave it at 1"):
        la.softmax_temperature = 0.5
    assert la.softmax_temperature == 1


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), torch.ones(2)])
def test_it_is_one_positive_number(wrong):
    with pytest.raises(OptionError, match="softmax_temperature"):
        fitted(softmax_temperature=wrong)
