"""scikit-learn's own checks of estimators. None is left out."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

from laplace.integrations.sklearn import LaplaceClassifier, LaplaceRegressor

ESTIMATORS = [LaplaceClassifier(max_epochs=30), LaplaceRegressor(max_epochs=30)]
QUICK = {  # some that found mistakes, and take little time; `make test SLOW=1` runs all
    "check_estimators_unfitted",
    "check_fit2d_1sample",
    "check_methods_subset_invariance",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_supervised_y_2d",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(ESTIMATORS)
def test_estimators_pass_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_estimators_pass_some_checks_of_scikit_learn(estimator):
    checks = {getattr(c, "func", c).__name__: (e, c) for e, c in estimator_checks_generator(estimator)}
    assert checks.keys() >= QUICK
    for name in QUICK:
        made, check = checks[name]
        check(made)
