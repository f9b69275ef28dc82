"""Hyperparameters: prior precision, noise and temperature, by evidence or by validation; units learned for variance."""

from laplace.tuning.calls import Tunable
from laplace.tuning.lula import with_uncertainty_units
from laplace.tuning.result import Point, Tuned

__all__ = ["Point", "Tunable", "Tuned", "with_uncertainty_units"]
