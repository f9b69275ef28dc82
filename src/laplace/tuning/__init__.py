"""Hyperparameters: prior precision, noise and temperature, by evidence or by validation; units learned for variance."""

from laplace.tuning.lula import with_uncertainty_units
from laplace.tuning.result import Point, Tuned

__all__ = ["Point", "Tuned", "with_uncertainty_units"]
