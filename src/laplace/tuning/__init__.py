"""Tune prior precision, noise and temperatures by evidence, leave-one-out or validation; regress on features."""

from laplace.tuning.calibrated import Calibrated, Calibration, Gain
from laplace.tuning.features import LastLayerRegression, regress_on_features
from laplace.tuning.lula import with_uncertainty_units
from laplace.tuning.methods import Method, register_method
from laplace.tuning.problem import Problem
from laplace.tuning.result import Point, Tuned
from laplace.tuning.space import Space as Space

__all__ = [
    "Calibrated",
    "Calibration",
    "Gain",
    "LastLayerRegression",
    "Method",
    "Point",
    "Problem",
    "Tuned",
    "register_method",
    "regress_on_features",
    "with_uncertainty_units",
]


def __dir__() -> list[str]:
    return __all__
