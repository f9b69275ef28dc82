"""Hyperparameters: prior precision, noise and temperatures, by evidence or validation; units learned for variance."""

from laplace.tuning.calibrated import Calibrated, Calibration, Gain
from laplace.tuning.lula import with_uncertainty_units
from laplace.tuning.methods import Method, register_method
from laplace.tuning.problem import Problem
from laplace.tuning.result import Point, Tuned
from laplace.tuning.space import Space as Space

__all__ = [
    "Calibrated",
    "Calibration",
    "Gain",
    "Method",
    "Point",
    "Problem",
    "Tuned",
    "register_method",
    "with_uncertainty_units",
]
