"""scikit-learn's own checks of estimators; each that is left out is named with its reason."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from laplace.integrations.sklearn import LaplaceClassifier, LaplaceRegressor

LEFT_OUT: dict[str, str] = {}


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [LaplaceClassifier(max_epochs=30), LaplaceRegressor(max_epochs=30)], expected_failed_checks=lambda _: LEFT_OUT
)
def test_estimators_pass_the_checks_of_scikit_learn(estimator, check):
    check(estimator)
