"""`la.calibrate` on other likelihoods and posteriors, and on data that does not suit it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from laplace import Laplace
from laplace.errors import InputError, LaplaceWarning, NotFittedError, NumericalError, OptionError, UnsupportedError
from laplace.likelihoods import Ordinal, from_log_prob
from laplace.network.loaders import ArrayBatches
from laplace.network.overlap import overlap
from laplace.predictive.links import Link
from laplace.priors import StudentT

G = torch.Generator().manual_seed(0)
X = torch.randn(160, 4, dtype=torch.float64, generator=G)
CLASSES = torch.arange(160) % 3
QUIET = pytest.mark.filterwarnings("ignore::laplace.errors.LaplaceWarning")


def net(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def rate(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (y * f - f.exp()).sum(-1)


COUNTS = X[:, :2].abs().round()
CASES = {
    "binary": ("binary", 1, (CLASSES > 0).double()),
    "multilabel": ("multilabel", 3, (X[:, :3] > 0).double()),
    "ordinal": (Ordinal([-1.0, 0.5]), 1, CLASSES),
    "poisson": ("poisson", 2, COUNTS),
    "heteroscedastic": ("heteroscedastic", 2, X[:, :1].sin()),
    "own": (from_log_prob(rate), 2, COUNTS),
    "two outputs": ("regression", 2, X[:, :2].sin()),
}


@QUIET
def test_a_dataset_of_single_examples_is_joined_to_batches():
    def la():
        return Laplace(net(), "classification").fit([(X[:80], CLASSES[:80])])

    held_out = X[80:].clone(), CLASSES[80:].clone()
    result = la().calibrate(TensorDataset(*held_out))
    assert result.n_data == 80
    assert result.chosen.nll == pytest.approx(la().calibrate(held_out).chosen.nll, rel=1e-9)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*draws:laplace.errors.LaplaceWarning")
def test_other_likelihoods(case):
    likelihood, outputs, y = CASES[case]
    la = Laplace(net(outputs), likelihood).fit([(X[:80], y[:80])])
    result = la.calibrate([(X[80:110], y[80:110]), (X[110:], y[110:])], rule="best")
    assert result.chosen.nll <= min(result.network.nll, result.rescaled.nll)
    assert la.softmax_temperature == result.softmax_temperature
    assert (la.softmax_temperature != 1) == la.likelihood.has_logits
    if case != "own":  # which predicts f
        labels = y[80:, None] if case == "binary" else y[80:]
        log_p = la.predict(X[80:]).distribution.log_prob(labels).reshape(80, -1).sum(1)
        assert result.chosen.nll == pytest.approx(-float(log_p.mean()), abs=1e-7)
    assert repr(result)


def test_preferences():
    pairs, y = X.reshape(80, 2, 4), torch.arange(80) % 2
    la = Laplace(net(1), "reward_modeling").fit([(pairs[:20], y[:20])])
    result = la.calibrate([(pairs[20:], y[20:])], rule="best")
    p = la.preference(pairs[20:, 1], pairs[20:, 0])
    nll = -torch.where(y[20:] == 1, p, 1 - p).log().mean()
    assert result.chosen.nll == pytest.approx(float(nll), abs=1e-7)
    assert result.chosen.nll <= result.network.nll


@QUIET
def test_given_noise_and_noise_per_output():
    y, noise = X[:, :2].sin(), 0.5 + X[:, :2].abs()
    la = Laplace(net(2), "given_noise").fit([(X[:80], y[:80], noise[:80])])
    result = la.calibrate([(X[80:], y[80:], noise[80:])], rule="best")
    assert result.chosen.nll <= result.rescaled.nll <= result.network.nll
    la = Laplace(net(2), "regression", sigma_noise=torch.tensor([0.5, 2.0])).fit([(X[:80], y[:80])])
    result = la.calibrate([(X[80:], y[80:])])
    assert float(la.sigma_noise[1] / la.sigma_noise[0]) == pytest.approx(4)
    nll = -la.predict(X[80:]).distribution.log_prob(y[80:]).mean()
    assert result.chosen.nll == pytest.approx(float(nll), abs=1e-7)


@QUIET
def test_the_prior_of_a_task_is_calibrated_with_its_noise_held():
    y = X[:, :2].sin()
    first = Laplace(net(2), "regression", "all", "diag").fit([(X[:40], y[:40])])
    la = Laplace(net(2), "regression", "all", "diag", prior=first.as_prior(), sigma_noise=0.7).fit(
        [(X[40:80], y[40:80])]
    )
    result = la.calibrate([(X[80:], y[80:])])
    assert float(la.sigma_noise) == pytest.approx(0.7)
    nll = -la.predict(X[80:]).distribution.log_prob(y[80:]).mean()
    assert result.chosen.nll == pytest.approx(float(nll), abs=1e-7)


@pytest.fixture(scope="module")
def la() -> Laplace:
    return Laplace(net(), "classification").fit([(X[:80], CLASSES[:80])])


def warned(la, loader, match: str):
    la.prior_precision, la.softmax_temperature = 1.0, 1.0
    with pytest.warns(LaplaceWarning, match=match):
        return la.calibrate(loader)


def test_few_examples_are_said_with_the_width_of_the_interval(la):
    result = warned(la, [(X[80:100], CLASSES[80:100])], r"20 validation examples are few: .* 95 % interval from -?\d")
    low, high = result.gain.interval
    assert f"from {low:.3f} to {high:.3f}" in result.notes[0]


def test_missing_classes_are_named(la):
    y = CLASSES[80:].clone()
    y[y == 1] = 2
    warned(la, [(X[80:], y)], "1 of 3 classes are missing from the validation data: 1")
    binary = Laplace(net(1), "binary").fit([(X[:80], (CLASSES[:80] > 0).double())])
    warned(binary, [(X[80:], torch.ones(80, dtype=torch.float64))], "the label is the same for all validation")
    several = Laplace(net(3), "multilabel").fit([(X[:80], (X[:80, :3] > 0).double())])
    warned(several, [(X[80:], torch.tensor([[1.0, 0.0, 1.0]]).expand(80, 3).double())], "labels 0, 1, 2 are the same")


def test_targets_in_other_units_are_noticed():
    y = X[:, :1].sin()
    regression = Laplace(net(1), "regression", sigma_noise=0.5).fit([(X[:80], y[:80])])
    with pytest.warns(LaplaceWarning, match=r"the residuals on val_loader have a standard deviation of [\d.]+,"):
        regression.calibrate([(X[80:], 100 * y[80:])])


def test_training_data_is_noticed(la):
    loader = [(X[:80], CLASSES[:80])]
    la.fit(loader)
    warned(la, loader, "val_loader is the loader that la was fitted on")
    warned(la, [(X[:80], CLASSES[:80])], "val_loader holds the tensors that la was fitted on")


def test_what_loaders_have_in_common():
    data, other = TensorDataset(X, CLASSES), TensorDataset(X.clone(), CLASSES.clone())
    same, tensors = "has the dataset that la was fitted on", "holds the tensors that la was fitted on"
    assert overlap(DataLoader(data, 10), DataLoader(data, 20)) == same
    assert (
        overlap(DataLoader(data, 10), DataLoader(TensorDataset(X, CLASSES)))
        == "holds the tensors that la was fitted on"
    )
    assert overlap(ArrayBatches(X, CLASSES), ArrayBatches(X, CLASSES, 7)) == tensors
    assert overlap(ArrayBatches(X.numpy(), CLASSES), ArrayBatches(X.numpy(), CLASSES.clone())) == tensors
    assert overlap(ArrayBatches(X[:80], CLASSES[:80]), ArrayBatches(X[80:], CLASSES[80:])) == ""
    assert overlap(DataLoader(data), DataLoader(other)) == ""
    assert overlap(DataLoader(TensorDataset(X[:80])), DataLoader(TensorDataset(X[80:]))) == ""
    first, second = Subset(data, range(80)), Subset(data, range(80, 160))
    assert overlap(DataLoader(first), DataLoader(second)) == ""
    assert (
        overlap(DataLoader(first), DataLoader(Subset(data, range(70, 100)))) == "has 10 examples that la was fitted on"
    )
    assert overlap(DataLoader(first), DataLoader(Subset(second, range(5)))) == ""
    assert overlap(DataLoader(first), DataLoader(data)) == same
    assert overlap(None, DataLoader(data)) == ""
    assert overlap([{"x": X}], [{"x": X}]) == tensors


def test_empty_and_sparse_tensors_lie_nowhere_in_common():
    for pair in ((X[:0], X.clone()[:0]), (X.to_sparse(), X.to_sparse()), (np.empty(0), np.empty(0))):
        assert overlap([{"more": pair[0]}], [{"more": pair[1]}]) == ""


REFUSED = {
    "iterator": (lambda la: la.calibrate(iter([(X, CLASSES)])), InputError, "can be read once"),
    "nothing": (lambda la: la.calibrate(None), OptionError, "needs val_loader="),
    "no batch": (lambda la: la.calibrate([]), InputError, "gave no batch"),
    "rule": (lambda la: la.calibrate([(X, CLASSES)], rule="two_se"), OptionError, "rule='two_se'"),
    "hyperprior": (lambda la: la.calibrate([(X, CLASSES)], hyperprior="x"), OptionError, "hyperprior"),
    "bridge": (lambda la: la.calibrate([(X, CLASSES)], link_approx="bridge"), OptionError, "own probabilities where"),
    "weight": (lambda la: la.calibrate([(X, CLASSES)], ood_weight=0.3), OptionError, "goes with ood_loader="),
    "labels": (lambda la: la.calibrate([(X, CLASSES + 7)]), InputError, "class labels lie in"),
    "inputs": (lambda la: la.calibrate([(X * math.nan, CLASSES)]), InputError, "NaN"),
    "own link": (
        lambda la: la.calibrate([(X, CLASSES)], link_approx=Link.of_variances(lambda f, v: f.softmax(-1) * math.nan)),
        OptionError,
        "own probabilities where",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_change_nothing(la, case):
    la.prior_precision, la.softmax_temperature = 1.0, 1.3
    call, error, match = REFUSED[case]
    with pytest.raises(error, match=match):
        call(la)
    assert (float(la.prior_precision), la.softmax_temperature) == (1.0, 1.3)


def test_scores_that_are_not_finite_are_refused(la):
    def wrong(f: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return torch.where(variance > 1e-3, torch.nan, f.softmax(-1))

    with pytest.raises(NumericalError, match=r"the validation score at .* is NaN or infinite .*; nothing changed"):
        la.calibrate([(X[80:], CLASSES[80:])], link_approx=Link.of_variances(wrong))


def test_labels_that_are_not_finite_are_refused():
    regression = Laplace(net(1), "regression").fit([(X, X[:, :1])])
    with pytest.raises(InputError, match="NaN or infinite"):
        regression.calibrate([(X, X[:, :1] * math.nan)])


def test_other_priors_and_unfitted_posteriors_are_told_what_to_write():
    other = Laplace(net(), "classification", hessian_structure="diag", prior=StudentT(df=4, scale=0.3))
    with pytest.raises(UnsupportedError, match=r"has none. Write la.tune\(\)"):
        other.fit([(X, CLASSES)]).calibrate([(X, CLASSES)])
    with pytest.raises(NotFittedError):
        Laplace(net(), "classification").calibrate([(X, CLASSES)])
