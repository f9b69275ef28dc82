"""Hyperparameters: prior precision, noise and temperature, by evidence or by validation."""

from laplace.tuning.calls import Tunable
from laplace.tuning.result import Point, Tuned

__all__ = ["Point", "Tunable", "Tuned"]
