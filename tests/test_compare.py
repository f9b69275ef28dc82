"""`laplace.compare`: each number is what it says, and those that may not be compared are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import laplace
import oracle
from laplace import Laplace
from laplace.errors import NotFittedError, OptionError, UnsupportedError
from networks import cut, make, split_task


def fitted(task="regression", subset="all", structure="full", seed=0, n=40, **options):
    model, x, y = make("mlp", task, seed=seed, n=n)
    return Laplace(model, task, subset, structure, **options).fit(cut(x, y, 9)), x, y


def alike(task="regression", **options):
    """Two networks on the same data."""
    first, x, y = fitted(task, **options)
    model = make("mlp", task, seed=1)[0]
    second = Laplace(model, task, first.subset_of_weights, first.hessian_structure).fit(cut(x, y, 9))
    return first, second


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
def test_every_number_is_recomputed(task):
    (model, training, validation), options = split_task(task), {"prior_precision": 3.0}
    options |= {"sigma_noise": 0.7} if task == "regression" else {}
    la = Laplace(model, task, "all", "full", **options).fit(training)
    row = laplace.compare([la, la], val_loader=validation, names=["a", "b"])["a"]
    x, y = (torch.cat(parts) for parts in zip(*validation, strict=True))
    distribution = la.predict(x).distribution
    nll = -distribution.log_prob(y)
    nll = nll if nll.dim() == 1 else nll.sum(1)
    assert row.validation == pytest.approx(float(nll.mean()), rel=1e-8)
    assert row.validation_error == pytest.approx(float((nll - nll.mean()).square().sum().sqrt() / len(nll)), rel=1e-6)
    assert row.evidence == pytest.approx(float(la.log_marginal_likelihood()), rel=1e-9)
    x, y = (torch.cat(parts) for parts in zip(*training, strict=True))
    dense = oracle.fit(model, [k for k, _ in model.named_parameters()], x, y, task, "full")
    sigma = options.get("sigma_noise", 1.0)
    covariance = dense.covariance(dense.expand(3.0), sigma=sigma)
    assert row.effective == pytest.approx(float(torch.trace(covariance @ (dense.h / sigma**2))), rel=1e-8)
    bounds = {"prior_precision": (3.0, 3.001)}
    tuned = la.tune("prior_precision", method="loo", bounds=bounds, grid_size=2)
    assert row.loo == pytest.approx(tuned.points[0].score)


def test_all_weights_of_two_networks_may_be_compared():
    found = laplace.compare(alike())
    assert not found.refused
    assert found.best("evidence").evidence == max(row.evidence for row in found)
    assert found.best("loo").loo == min(row.loo for row in found)
    with pytest.raises(OptionError, match="val_loader="):
        found.best("validation")


def test_evidences_of_last_layers_on_different_features_are_refused():
    found = laplace.compare(alike(subset="last_layer", structure="kron"), names=["one", "two"])
    assert "conditional on its own features" in found.refused["evidence"][0]
    with pytest.raises(UnsupportedError, match=r"one and two .* features.*best\('loo'\)"):
        found.best("evidence")
    assert found.best("loo").name in ("one", "two")
    assert f"({found['one'].evidence:.2f})" in repr(found)
    assert "have seen it" in " ".join(found.notes)


def test_last_layers_on_the_same_features_may_be_compared():
    la, x, y = fitted(subset="last_layer")
    model = copy.deepcopy(la.model)
    with torch.no_grad():
        model[2].weight.mul_(0.5)
    other = Laplace(model, "regression", "last_layer", "full").fit(cut(x, y, 9))
    assert not laplace.compare([la, other]).refused


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"structure": "kron"}, "approximate the curvature differently"),
        ({"subset": "last_layer"}, "different sets of uncertain weights"),
        ({"temperature": 0.5}, "different temperatures"),
        ({"curvature": "ef"}, "approximate the curvature differently"),
        ({"n": 30}, "different data .40 and 30 examples."),
    ],
)
def test_what_else_may_not_be_compared_is_refused(change, match):
    found = laplace.compare([fitted()[0], fitted(**change)[0]])
    with pytest.raises(UnsupportedError, match=match):
        found.best("evidence")
    assert ("loo" in found.refused) == ("n" in change)


def test_other_labels_are_other_data():
    la, x, y = fitted()
    other = Laplace(la.model, "regression", "all", "full").fit(cut(x, -y, 9))
    found = laplace.compare([la, other])
    assert "as far as their labels show" in found.refused["loo"][0]
    assert not laplace.compare([la, other], train_loader=cut(x, y, 9)).refused


def test_likelihoods_are_not_mixed():
    found = laplace.compare([fitted("regression")[0], fitted("classification")[0]])
    assert {*found.refused} == {"evidence", "loo", "validation"}


def test_a_posterior_without_its_data_has_no_leave_one_out_score():
    la = fitted()[0]
    found = laplace.compare([copy.copy(la), copy.copy(la)])
    assert found["0"].loo is None
    assert "leave-one-out NLL" not in repr(found)
    with pytest.raises(OptionError, match="train_loader="):
        found.best("loo")


@pytest.mark.parametrize("wrong", [[], "la", None, [nn.Linear(1, 1), nn.Linear(1, 1)]])
def test_other_things_are_refused(wrong):
    with pytest.raises(OptionError, match="two or more"):
        laplace.compare(wrong)


def test_names_are_one_each():
    la = fitted()[0]
    for names in (["a"], ["a", "a"], [1, 2]):
        with pytest.raises(OptionError, match="a name of its own"):
            laplace.compare([la, la], names=names)
    with pytest.raises(NotFittedError):
        laplace.compare([la, Laplace(la.model, "regression")])
    with pytest.raises(OptionError, match="'a', 'b'"):
        laplace.compare([la, la], names=["a", "b"])["c"]
