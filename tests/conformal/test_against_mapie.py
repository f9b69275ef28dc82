"""The same predictions and the same calibration examples give MAPIE's intervals and sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import APSConformityScore, LACConformityScore, ResidualNormalisedScore
from mapie.regression import ConformalizedQuantileRegressor, SplitConformalRegressor
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

from laplace.conformal import from_predictions
from laplace.conformal.quantiles import threshold
from laplace.conformal.rules import Adaptive
from made_up_predictions import classes, random_classes, random_regression, regression

N, CAL = 500, 200
X = np.arange(N, dtype=float).reshape(-1, 1)  # the number of an example is its input


class Numbers(RegressorMixin, BaseEstimator):
    """Looks predictions up."""

    def __init__(self, table):
        self.table = table

    def fit(self, x, y=None):
        self.fitted_ = True
        return self

    def predict(self, x):
        return self.table[np.asarray(x)[:, 0].astype(int)]


class Probabilities(ClassifierMixin, BaseEstimator):
    def __init__(self, table):
        self.table = table

    def fit(self, x, y=None):
        self.classes_ = np.arange(self.table.shape[1])
        return self

    def predict_proba(self, x):
        return self.table[np.asarray(x)[:, 0].astype(int)]

    def predict(self, x):
        return self.predict_proba(x).argmax(1)


def theirs(mapie, y):
    mapie.conformalize(X[:CAL], y[:CAL])
    return mapie.predict_interval(X[CAL:])[1][:, :, 0]


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("method", ["absolute", "scaled"])
def test_split_intervals_are_those_of_mapie(method, level):
    mean, std, y = random_regression(N)
    made = from_predictions(regression(mean[:CAL], std[:CAL]), y[:CAL], level, method)
    score = "absolute"
    if method == "scaled":
        score = ResidualNormalisedScore(Numbers(std.numpy()[:, 0]).fit(X), prefit=True, sym=True)
    point = Numbers(mean.numpy()[:, 0]).fit(X)
    ends = theirs(SplitConformalRegressor(point, level, score, prefit=True), y.numpy()[:, 0])
    lower, upper = made.interval(regression(mean[CAL:], std[CAL:]))
    np.testing.assert_allclose(lower[:, 0], ends[:, 0], rtol=1e-9)
    np.testing.assert_allclose(upper[:, 0], ends[:, 1], rtol=1e-9)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_conformalised_quantiles_are_those_of_mapie(level):
    mean, std, y = random_regression(N)
    low, high = regression(mean, std).interval(level)
    tables = [t.numpy()[:, 0] for t in (low, high, mean)]
    mapie = ConformalizedQuantileRegressor([Numbers(t).fit(X) for t in tables], level, prefit=True)
    mapie.conformalize(X[:CAL], y.numpy()[:CAL, 0])
    ends = mapie.predict_interval(X[CAL:], symmetric_correction=True)[1][:, :, 0]
    made = from_predictions(regression(mean[:CAL], std[:CAL]), y[:CAL], level, "cqr")
    lower, upper = made.interval(regression(mean[CAL:], std[CAL:]))
    np.testing.assert_allclose(lower[:, 0], ends[:, 0], rtol=1e-9)
    np.testing.assert_allclose(upper[:, 0], ends[:, 1], rtol=1e-9)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_threshold_sets_are_those_of_mapie(level):
    p, y = random_classes(N)
    mapie = SplitConformalClassifier(Probabilities(p.numpy()).fit(X), level, LACConformityScore(), prefit=True)
    mapie.conformalize(X[:CAL], y.numpy()[:CAL])
    expected = mapie.predict_set(X[CAL:])[1][:, :, 0]
    found = from_predictions(classes(p[:CAL]), y[:CAL], level).set(classes(p[CAL:]))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_adaptive_sets_are_those_of_mapie_with_the_same_random_numbers(level):
    p, y = random_classes(N)
    estimator = Probabilities(p.numpy()).fit(X)
    mapie = SplitConformalClassifier(estimator, level, APSConformityScore(), prefit=True, random_state=7)
    mapie.conformalize(X[:CAL], y.numpy()[:CAL])
    expected = mapie.predict_set(X[CAL:], conformity_score_params={"include_last_label": "randomized"})[1][:, :, 0]
    rule = Adaptive()
    u = [torch.tensor(np.random.RandomState(7).uniform(size=(n, 1))) for n in (CAL, N - CAL)]
    q = threshold(rule.scores(p[:CAL, None], u[0]).gather(-1, y[:CAL, None, None]).flatten(), level)
    found = rule.scores(p[CAL:, None], u[1]).squeeze(1) <= q
    np.testing.assert_array_equal(found, expected)
