"""Scores agree with torchmetrics, scikit-learn and MAPIE, or with their definition written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mapie.metrics.regression import regression_coverage_score, regression_mean_width_score, regression_mwi_score
from scipy import integrate, stats
from sklearn import metrics as sklearn_metrics
from sklearn.calibration import calibration_curve
from torchmetrics.functional import classification as torchmetrics
from torchmetrics.functional.regression import continuous_ranked_probability_score

from laplace.errors import InputError
from laplace.evaluation import (
    accuracy,
    adaptive_ece,
    aupr,
    auroc,
    binary_accuracy,
    binary_brier,
    binary_ece,
    binary_nll,
    brier,
    classwise_ece,
    coverage_at,
    crps,
    ece,
    fpr95,
    fpr_at_tpr,
    gaussian_crps,
    gaussian_pit,
    interval_coverage,
    interval_score,
    interval_width,
    mce,
    quantile_calibration_error,
    reliability,
    sample_pit,
    sharpness,
)


def classified(n=400, c=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(n, c, generator=generator, dtype=torch.float64), -1)
    return probs, torch.randint(c, (n,), generator=generator)


def gaussians(shape=(60, 2), seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape), rng.uniform(0.2, 3, size=shape), 2 * rng.normal(size=shape)


@pytest.mark.parametrize("n_bins", [1, 7, 15])
@pytest.mark.parametrize("c", [2, 4])
def test_calibration_errors_are_those_of_torchmetrics(n_bins, c):
    probs, y = classified(c=c)
    theirs = {norm: torchmetrics.multiclass_calibration_error(probs, y, c, n_bins, norm) for norm in ("l1", "max")}
    assert ece(probs, y, n_bins) == pytest.approx(theirs["l1"].item(), abs=1e-6)
    assert mce(probs, y, n_bins) == pytest.approx(theirs["max"].item(), abs=1e-6)
    each = [torchmetrics.binary_calibration_error(probs[:, k], (y == k).long(), n_bins).item() for k in range(c)]
    assert classwise_ece(probs, y, n_bins) == pytest.approx(np.mean(each), abs=1e-6)


def test_classifier_scores_are_those_of_torchmetrics_and_scikit_learn():
    probs, y = classified()
    assert accuracy(probs, y) == pytest.approx(torchmetrics.multiclass_accuracy(probs, y, 4, average="micro").item())
    theirs = sklearn_metrics.brier_score_loss(y.numpy(), probs.numpy(), scale_by_half=False)
    assert brier(probs, y) == pytest.approx(theirs)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_bins_are_those_of_scikit_learn_also_where_probabilities_tie(adaptive, ties):
    probs, y = classified(n=300, c=2)
    top = probs.amax(-1)
    if ties:  # on edges of the bins, and with many equal ones
        top = (top * 10).round() / 10
        probs = torch.stack([top, 1 - top], -1)
    bins = reliability(probs, y, 10, adaptive=adaptive)
    hit = (probs.argmax(-1) == y).numpy()
    theirs = calibration_curve(hit, top.numpy(), n_bins=10, strategy="quantile" if adaptive else "uniform")
    held = bins.count > 0
    np.testing.assert_allclose(bins.accuracy[held], theirs[0])
    np.testing.assert_allclose(bins.confidence[held], theirs[1])


def test_adaptive_bins_hold_equally_many_examples():
    probs, y = classified(n=300)
    bins = reliability(probs, y, 15, adaptive=True)
    assert bins.count.min() >= 19
    assert bins.count.max() <= 21
    assert adaptive_ece(probs, y) == bins.ece
    constant = torch.tensor([[0.75, 0.25]]).expand(8, 2)
    assert adaptive_ece(constant, [0, 0, 0, 0, 0, 0, 1, 1]) == pytest.approx(0)


def test_scores_of_labels_are_those_of_torchmetrics_and_scikit_learn():
    probs, y = classified()[0], (torch.rand(400, 4, generator=torch.Generator().manual_seed(3)) > 0.6).long()
    theirs = torchmetrics.multilabel_accuracy(probs, y, 4, average="micro").item()
    assert binary_accuracy(probs, y) == pytest.approx(theirs)
    flat, ones = probs.numpy().ravel(), y.numpy().ravel()
    assert binary_nll(probs, y) == pytest.approx(sklearn_metrics.log_loss(ones, flat))
    assert binary_brier(probs, y) == pytest.approx(sklearn_metrics.brier_score_loss(ones, flat))
    each = [torchmetrics.binary_calibration_error(probs[:, k], y[:, k], 15).item() for k in range(4)]
    assert binary_ece(probs, y) == pytest.approx(np.mean(each), abs=1e-6)
    assert binary_ece(probs[:, 0], y[:, 0].bool()) == pytest.approx(each[0], abs=1e-6)
    bad = [((probs * 9, y), "sigmoid"), ((probs, y + 1), "0 or 1"), ((probs, y[:3]), "shapes must be equal")]
    for arguments, match in bad:
        with pytest.raises(InputError, match=match):
            binary_ece(*arguments)


SCORES = st.lists(st.integers(0, 6), min_size=1, max_size=30)


@given(inside=SCORES, outside=SCORES)
@settings(max_examples=80, deadline=None)
def test_detection_scores_are_those_of_scikit_learn_with_outside_as_the_positive_class(inside, outside):
    target, both = [0] * len(inside) + [1] * len(outside), inside + outside
    assert auroc(inside, outside) == pytest.approx(sklearn_metrics.roc_auc_score(target, both))
    assert aupr(inside, outside) == pytest.approx(sklearn_metrics.average_precision_score(target, both))
    fpr, tpr, _ = sklearn_metrics.roc_curve(target, both, drop_intermediate=False)
    for wanted in (0.5, 0.8, 0.95):
        assert fpr_at_tpr(inside, outside, wanted) == pytest.approx(fpr[tpr >= wanted - 1e-12].min())
    assert fpr95(inside, outside) == fpr_at_tpr(inside, outside, 0.95)
    # inside as the positive class
    fpr, tpr, _ = sklearn_metrics.roc_curve([1 - t for t in target], [-s for s in both], drop_intermediate=False)
    assert fpr95([-s for s in outside], [-s for s in inside]) == pytest.approx(fpr[tpr >= 0.95 - 1e-12].min())


def test_detection_scores_are_those_of_torchmetrics():
    rng = np.random.default_rng(0)
    inside, outside = torch.from_numpy(rng.uniform(size=80)), torch.from_numpy(rng.uniform(size=50) ** 0.5)
    both, target = torch.cat([inside, outside]), torch.tensor([0] * 80 + [1] * 50)
    assert auroc(inside, outside) == pytest.approx(torchmetrics.binary_auroc(both, target).item(), abs=1e-6)
    assert aupr(inside, outside) == pytest.approx(torchmetrics.binary_average_precision(both, target).item(), abs=1e-6)


def test_higher_means_out():
    low, high = [0.0, 0.1, 0.2], [5.0, 6.0, 7.0]
    assert [score(low, high) for score in (auroc, aupr, fpr95)] == [1, 1, 0]
    assert [score(high, low) for score in (auroc, fpr95)] == [0, 1]


def test_constant_scores_are_guessing():
    assert auroc([1.0] * 5, [1.0] * 3) == 0.5
    assert aupr([1.0] * 5, [1.0] * 3) == pytest.approx(3 / 8)
    assert fpr95([1.0] * 5, [1.0] * 3) == 1


@pytest.mark.parametrize("score", [auroc, aupr, fpr95])
@pytest.mark.parametrize(
    ("first", "second", "match"),
    [([], [1.0], "N > 0"), ([1.0], [], "N > 0"), ([1.0, math.nan], [1.0, 2.0], "nan"), ([[1.0]], [1.0], "one score")],
)
def test_scores_that_have_no_order_are_refused(score, first, second, match):
    with pytest.raises(InputError, match=match):
        score(first, second)


@pytest.mark.parametrize("shape", [(30,), (15, 2)])
def test_the_crps_of_a_gaussian_is_its_integral(shape):
    mean, variance, y = gaussians(shape)
    each = []
    for m, v, t in zip(mean.ravel(), variance.ravel(), y.ravel(), strict=True):
        cdf = stats.norm(m, np.sqrt(v)).cdf
        below = integrate.quad(lambda z, f=cdf: f(z) ** 2, -20, t)[0]
        each.append(below + integrate.quad(lambda z, f=cdf: (1 - f(z)) ** 2, t, 20)[0])
    assert gaussian_crps(mean, variance, y) == pytest.approx(np.mean(each), rel=1e-6)


def test_the_crps_of_draws_is_that_of_torchmetrics_and_goes_to_that_of_the_gaussian():
    rng = np.random.default_rng(0)
    mean, variance, y = gaussians((25,))
    draws = mean + np.sqrt(variance) * rng.normal(size=(3000, 25))
    theirs = continuous_ranked_probability_score(torch.from_numpy(draws[:9].T.copy()), torch.from_numpy(y))
    assert crps(draws[:9], y) == pytest.approx(theirs.item(), rel=1e-6)
    assert crps(draws, y) == pytest.approx(gaussian_crps(mean, variance, y), rel=0.02)
    assert crps(np.stack([draws, draws], -1), np.stack([y, y], -1)) == pytest.approx(crps(draws, y))
    assert crps(y[None], y) == 0
    with pytest.raises(InputError, match="number of draws in front"):
        crps(draws.T, y)


def test_the_crps_of_no_variance_is_the_absolute_error():
    mean, _, y = gaussians((20,))
    assert gaussian_crps(mean, np.full(20, 1e-18), y) == pytest.approx(np.abs(mean - y).mean(), rel=1e-6)
    with pytest.raises(InputError, match="positive"):
        gaussian_crps(mean, np.zeros(20), y)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_scores_of_intervals_are_those_of_mapie(level):
    mean, variance, y = gaussians((200,))
    half = stats.norm.ppf((1 + level) / 2) * np.sqrt(variance)
    lower, upper = mean - half, mean + half
    ends = np.stack([lower, upper], 1)[:, :, None]
    assert interval_coverage(lower, upper, y) == pytest.approx(regression_coverage_score(y, ends)[0])
    assert interval_width(lower, upper) == pytest.approx(regression_mean_width_score(ends)[0])
    assert interval_score(lower, upper, y, level) == pytest.approx(float(regression_mwi_score(y, ends, level)))


def test_the_true_quantiles_have_the_lowest_interval_score():
    y = np.random.default_rng(0).normal(size=20_000)
    z = stats.norm.ppf(0.95)
    scores = [interval_score(np.full_like(y, -half), np.full_like(y, half), y, 0.9) for half in (0.8 * z, z, 1.2 * z)]
    assert scores[1] == min(scores)
    for level in (0, 1, -0.5, [0.5, 0.9]):
        with pytest.raises(InputError, match="level"):
            interval_score(y - 1, y + 1, y, level)


def test_coverage_from_the_pit_is_that_of_the_central_intervals():
    mean, variance, y = gaussians((300, 2))
    levels = np.linspace(0.05, 0.95, 10)
    found = coverage_at(gaussian_pit(mean, variance, y), levels)
    for level, share in zip(levels, found, strict=True):
        lower, upper = stats.norm.interval(level, mean, np.sqrt(variance))
        assert share.item() == pytest.approx(interval_coverage(lower, upper, y))
    assert coverage_at(gaussian_pit(mean, variance, y), 0.5).dim() == 0


def test_pit_is_uniform_where_the_prediction_is_right_and_not_where_it_is_not():
    rng = np.random.default_rng(0)
    mean, variance, _ = gaussians((4000,))
    y = mean + np.sqrt(variance) * rng.normal(size=4000)
    u = gaussian_pit(mean, variance, y)
    assert stats.kstest(u.numpy(), "uniform").pvalue > 0.01
    assert quantile_calibration_error(u) < 0.02
    narrow = gaussian_pit(mean, variance / 4, y)
    assert quantile_calibration_error(narrow) > 0.1
    assert coverage_at(narrow, 0.9).item() < 0.7
    expected = np.mean([abs((u.numpy() <= q / 10).mean() - q / 10) for q in range(1, 10)])
    assert quantile_calibration_error(u, n_levels=9) == pytest.approx(expected)


def test_the_pit_of_counts_is_uniform_when_ties_are_broken_at_random():
    rng = np.random.default_rng(0)
    rate = rng.gamma(2, 1, size=3000)
    y, draws = rng.poisson(rate), rng.poisson(rate, size=(20, 3000))
    u = sample_pit(draws, y, generator=torch.Generator().manual_seed(0))
    assert stats.kstest(u.numpy(), "uniform").pvalue > 0.01
    middle = sample_pit(draws, y)
    expected = ((draws < y).sum(0) + 0.5 * ((draws == y).sum(0) + 1)) / 21
    np.testing.assert_allclose(middle, expected)
    for bad in ([1.5], [], [[[0.5]]]):
        with pytest.raises(InputError, match="between 0 and 1"):
            coverage_at(bad, 0.5)


def test_sharpness_is_the_root_mean_variance():
    assert sharpness([1.0, 7.0]) == 2
    with pytest.raises(InputError, match="negative"):
        sharpness([-1.0])
