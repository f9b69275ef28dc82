"""Scores as functions of weights: with weights 1 the usual score, with others that of repeated rows."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from laplace import evaluation as metrics
from laplace.evaluation.report import weighted
from laplace.evaluation.report.resampling import Resamples, bootstrap, interval

RNG = np.random.default_rng(0)
N, C = 211, 4
LOGITS = RNG.normal(size=(N, C)) * 2
P = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
Y = np.array([RNG.choice(C, p=0.7 * p + 0.3 / C) for p in P])
TOP, RIGHT = P.max(-1), (P.argmax(-1) == Y).astype(float)
LOSS, SURE = 1 - RIGHT, np.round(TOP, 1)  # with ties

SCORES = {
    "mean": weighted.mean_of(LOSS),
    "root": weighted.root_mean_of(LOSS),
    "ece": weighted.calibration_error(TOP, RIGHT),
    "mce": weighted.calibration_error(TOP, RIGHT, largest=True),
    "adaptive": weighted.adaptive_error(TOP, RIGHT),
    "classwise": weighted.classwise_error(P, Y),
    "risk": weighted.area_under_risk(1 - SURE, LOSS),
}


def repeated(w):
    """The same scores of the rows, each as often as its weight says."""
    rows = np.repeat(np.arange(N), w.astype(int))
    top, right, loss = TOP[rows], RIGHT[rows], LOSS[rows]
    return {
        "mean": weighted.mean_of(loss),
        "root": weighted.root_mean_of(loss),
        "ece": weighted.calibration_error(top, right),
        "mce": weighted.calibration_error(top, right, largest=True),
        "adaptive": weighted.adaptive_error(top, right),
        "classwise": weighted.classwise_error(P[rows], Y[rows]),
        "risk": weighted.area_under_risk(1 - SURE[rows], loss),
    }


def test_with_weights_of_one_they_are_the_scores_of_the_library():
    bins = metrics.reliability(P, Y)
    assert SCORES["ece"](np.ones(N)) == pytest.approx(bins.ece)
    assert SCORES["mce"](np.ones(N)) == pytest.approx(bins.mce)
    assert SCORES["classwise"](np.ones(N)) == pytest.approx(metrics.classwise_ece(P, Y))
    assert SCORES["risk"](np.ones(N)) == pytest.approx(metrics.aurc(LOSS, 1 - SURE))
    assert SCORES["adaptive"](np.ones(N)) == pytest.approx(metrics.adaptive_ece(P, Y))
    assert 1 - SCORES["mean"](np.ones(N)) == pytest.approx(metrics.accuracy(P, Y))


@pytest.mark.parametrize("name", SCORES)
def test_a_weight_is_a_number_of_copies(name):
    for seed in range(5):
        w = np.random.default_rng(seed).integers(0, 4, N).astype(float)
        assert SCORES[name](w) == pytest.approx(repeated(w)[name](np.ones(int(w.sum()))), abs=1e-12)


@pytest.mark.parametrize("digits", [1, 8])
def test_detection_is_that_of_scikit_learn_and_of_the_library(digits):
    inside, outside = RNG.normal(size=150).round(digits), (RNG.normal(size=80) + 1).round(digits)
    truth, score = np.r_[np.zeros(150), np.ones(80)], np.r_[inside, outside]
    auroc, aupr, fpr = weighted.Detector(inside, outside).scores(np.ones(150), np.ones(80))
    assert auroc == pytest.approx(roc_auc_score(truth, score))
    assert aupr == pytest.approx(average_precision_score(truth, score))
    assert fpr == pytest.approx(metrics.fpr95(inside, outside))


def test_weights_of_detection_are_numbers_of_copies():
    inside, outside = RNG.normal(size=60).round(1), (RNG.normal(size=40) + 1).round(1)
    w, v = RNG.integers(0, 3, 60).astype(float), RNG.integers(0, 3, 40).astype(float)
    again = weighted.Detector(np.repeat(inside, w.astype(int)), np.repeat(outside, v.astype(int)))
    expected = again.scores(np.ones(int(w.sum())), np.ones(int(v.sum())))
    assert weighted.Detector(inside, outside).scores(w, v) == pytest.approx(expected)


def test_bootstrap_intervals_cover_the_mean_as_often_as_they_say():
    rng, held = np.random.default_rng(2), 0
    for seed in range(100):
        column = rng.exponential(size=80)
        found = bootstrap({"mean": weighted.mean_of(column)}, Resamples(np.arange(80), 100, seed))["mean"]
        estimate = interval(*found)
        held += estimate.low <= 1 <= estimate.high
    assert 0.84 <= held / 100 <= 0.99


def test_rows_of_one_example_are_drawn_together():
    examples = np.repeat(np.arange(30), 4)
    for w in Resamples(examples, 20, 0):
        assert (w.reshape(30, 4) == w.reshape(30, 4)[:, :1]).all()
        assert w.sum() == 120


def test_the_interval_of_a_calibration_error_takes_its_bias_out():
    """A calibrated prediction has an ECE of zero, which a bootstrap of the error itself would exclude."""
    rng, held = np.random.default_rng(3), 0
    for seed in range(40):
        p = rng.uniform(0.5, 1, 300)
        right = (rng.random(300) < p).astype(float)
        value, drawn = bootstrap({0: weighted.calibration_error(p, right)}, Resamples(np.arange(300), 100, seed))[0]
        assert drawn.mean() > value
        held += interval(value, drawn, biased=True, least=0).low < 0.01
    assert held >= 32
