"""Every score against scikit-learn, scipy or its formula written out, and the properties that define it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn_metrics

from laplace.errors import InputError, LaplaceError
from laplace.evaluation import (
    accuracy,
    auroc,
    brier,
    confidence,
    ece,
    gaussian_nll,
    interval_coverage,
    nll,
    reliability,
    rmse,
)

CLASSIFIER_SCORES = (accuracy, nll, brier, ece)


def classified(n=200, n_classes=5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(n, n_classes, generator=generator, dtype=dtype), -1)
    return probs, torch.randint(n_classes, (n,), generator=generator)


@pytest.mark.parametrize("n_classes", [2, 5])
def test_classifier_scores_agree_with_scikit_learn(n_classes):
    probs, y = classified(n_classes=n_classes)
    labels = range(n_classes)
    assert accuracy(probs, y) == pytest.approx(sklearn_metrics.accuracy_score(y, probs.argmax(-1)))
    assert nll(probs, y) == pytest.approx(sklearn_metrics.log_loss(y, probs.numpy(), labels=labels))
    one_hot = np.eye(n_classes)[y.numpy()]
    assert brier(probs, y) == pytest.approx(((probs.numpy() - one_hot) ** 2).sum(1).mean())


def test_confidence_is_the_mean_top_probability():
    probs = torch.tensor([[0.7, 0.3], [0.1, 0.9]])
    assert confidence(probs) == pytest.approx(0.8)


def test_true_class_ruled_out_scores_infinite_nll():
    assert nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == math.inf


def test_ece_agrees_with_a_loop_over_the_bins():
    probs, y = classified(n=500)
    top, hit = probs.amax(-1).numpy(), (probs.argmax(-1) == y).numpy()
    expected = 0.0
    for b in range(15):
        inside = (top > b / 15) & (top <= (b + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(hit[inside].mean() - top[inside].mean())
    assert ece(probs, y) == pytest.approx(expected)


def test_calibrated_predictions_have_vanishing_ece_and_overconfident_ones_do_not():
    probs, _ = classified(n=200_000)
    y = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(1)).squeeze(-1)
    sharpened = probs.square() / probs.square().sum(-1, keepdim=True)
    assert ece(probs, y) < 0.01
    assert ece(sharpened, y) > 0.05


def test_reliability_counts_every_example_once_and_averages_back_to_the_whole():
    probs, y = classified(n=333)
    bins = reliability(probs, y, n_bins=7)
    held = bins.count > 0
    share = bins.count[held] / 333
    assert bins.edges.shape == (8,)
    assert bins.count.sum() == 333
    assert (share * bins.accuracy[held]).sum().item() == pytest.approx(accuracy(probs, y), rel=1e-6)
    assert (share * bins.confidence[held]).sum().item() == pytest.approx(confidence(probs), rel=1e-6)
    assert bins.accuracy[~held].isnan().all()
    assert 0 <= bins.ece <= bins.mce <= 1


def test_confidence_on_an_edge_falls_in_the_bin_below():
    bins = reliability(torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64), torch.tensor([0, 0]), n_bins=2)
    assert bins.count.tolist() == [1, 1]


@given(
    inside=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    outside=st.lists(st.integers(0, 5), min_size=1, max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_auroc_agrees_with_scikit_learn_ties_included(inside, outside):
    labels = [0] * len(inside) + [1] * len(outside)
    expected = sklearn_metrics.roc_auc_score(labels, inside + outside)
    inside, outside = torch.tensor(inside), torch.tensor(outside)
    assert auroc(inside, outside) == pytest.approx(expected)
    assert auroc(outside, inside) == pytest.approx(1 - expected)
    assert auroc(3 * inside + 1, 3 * outside + 1) == pytest.approx(expected)


def test_auroc_of_constant_scores_is_guessing_and_of_separated_scores_is_one():
    assert auroc(torch.ones(10), torch.ones(4)) == 0.5
    assert auroc(torch.zeros(10), torch.ones(4)) == 1.0


@pytest.mark.parametrize("shape", [(50,), (50, 3)])
def test_gaussian_nll_and_rmse_agree_with_scipy(shape):
    rng = np.random.default_rng(0)
    mean, y = rng.normal(size=shape), rng.normal(size=shape)
    variance = rng.uniform(0.1, 2, size=shape)
    logpdf = stats.norm.logpdf(y, mean, np.sqrt(variance)).reshape(50, -1).sum(1)
    mean, y, variance = map(torch.from_numpy, (mean, y, variance))
    assert gaussian_nll(mean, variance, y) == pytest.approx(-logpdf.mean())
    assert rmse(mean, y) == pytest.approx(sklearn_metrics.root_mean_squared_error(y.ravel(), mean.ravel()))


def test_gaussian_nll_of_a_covariance_agrees_with_scipy_and_of_a_diagonal_one_with_its_variances():
    rng = np.random.default_rng(0)
    mean, y, root = rng.normal(size=(20, 3)), rng.normal(size=(20, 3)), rng.normal(size=(20, 3, 3))
    covariance = root @ root.transpose(0, 2, 1) + np.eye(3)
    logpdf = [stats.multivariate_normal.logpdf(*row) for row in zip(y, mean, covariance, strict=True)]
    mean, y, covariance = map(torch.from_numpy, (mean, y, covariance))
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    assert gaussian_nll(mean, covariance, y) == pytest.approx(-np.mean(logpdf))
    assert gaussian_nll(mean, torch.diag_embed(variance), y) == pytest.approx(gaussian_nll(mean, variance, y))


def test_coverage_counts_the_ends_in():
    lower, upper = torch.zeros(4), torch.ones(4)
    assert interval_coverage(lower, upper, torch.tensor([0.0, 0.5, 1.0, 1.5])) == 0.75


def test_central_interval_of_the_true_distribution_covers_its_level():
    y = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    half = torch.full_like(y, stats.norm.ppf(0.95))
    assert interval_coverage(-half, half, y) == pytest.approx(0.9, abs=0.005)


@pytest.mark.parametrize("score", CLASSIFIER_SCORES)
def test_classifier_scores_do_not_depend_on_the_order_of_examples_or_classes(score):
    probs, y = classified()
    generator = torch.Generator().manual_seed(1)
    rows, classes = (torch.randperm(size, generator=generator) for size in probs.shape)
    assert score(probs[rows], y[rows]) == pytest.approx(score(probs, y))
    assert score(probs[:, classes], classes.argsort()[y]) == pytest.approx(score(probs, y))


@pytest.mark.parametrize("score", CLASSIFIER_SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_probabilities_are_scored_in_double(score, dtype):
    probs, y = classified()
    rounded = probs.to(dtype)
    assert score(rounded, y) == pytest.approx(score(probs, y), abs=3e-2)


@pytest.mark.parametrize("score", CLASSIFIER_SCORES)
@pytest.mark.parametrize(
    ("probs", "y", "advice"),
    [
        (torch.randn(4, 3), torch.zeros(4).long(), "softmax"),
        (torch.full((4, 3), torch.nan), torch.zeros(4).long(), "sum to one"),
        (torch.rand(4), torch.zeros(4).long(), "torch.stack"),
        (torch.rand(4, 1), torch.zeros(4).long(), "torch.stack"),
        (torch.ones(0, 3), torch.zeros(0).long(), "no examples"),
        (torch.full((4, 2), 0.5), torch.zeros(4), "long"),
        (torch.full((4, 2), 0.5), torch.zeros(5).long(), r"\(4,\)"),
        (torch.full((4, 2), 0.5), torch.zeros(4, 2).long(), "argmax"),
        (torch.full((4, 2), 0.5), torch.full((4,), 2), r"0\.\.1"),
        (torch.full((4, 2), 0.5), torch.full((4,), -1), r"0\.\.1"),
    ],
)
def test_bad_classifier_input_is_refused_with_advice(score, probs, y, advice):
    with pytest.raises(InputError, match=advice):
        score(probs, y)


def test_bad_regression_input_is_refused_rather_than_broadcast():
    column, row = torch.zeros(4, 1), torch.zeros(4)
    for call in (
        lambda: rmse(column, row),
        lambda: gaussian_nll(column, torch.ones(4, 1), row),
        lambda: gaussian_nll(row, torch.ones(4, 1), row),
        lambda: gaussian_nll(row, torch.zeros(4), row),
        lambda: gaussian_nll(column, -torch.ones(4, 1, 1), column),
        lambda: rmse(torch.zeros(0), torch.zeros(0)),
        lambda: interval_coverage(row, column, row),
        lambda: interval_coverage(row + 1, row, row),
    ):
        with pytest.raises(InputError):
            call()


def test_bad_scores_and_bins_are_refused():
    scores = torch.zeros(3)
    probs, y = classified(n=5)
    with pytest.raises(InputError, match="scores_out"):
        auroc(scores, torch.zeros(3, 2))
    with pytest.raises(InputError, match="nan"):
        auroc(torch.tensor([torch.nan]), scores)
    with pytest.raises(InputError, match="n_bins"):
        reliability(probs, y, n_bins=0)


def test_input_errors_are_both_ours_and_value_errors():
    assert issubclass(InputError, LaplaceError)
    assert issubclass(InputError, ValueError)
