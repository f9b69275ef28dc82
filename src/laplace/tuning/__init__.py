"""Hyperparameters: prior precision and noise, by evidence or by validation."""

from laplace.tuning.evidence import climb, maximise_evidence
from laplace.tuning.validation import How, log_grid, search_grid

__all__ = ["How", "climb", "log_grid", "maximise_evidence", "search_grid"]
