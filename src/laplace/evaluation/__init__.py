"""Scores and figures for predictive distributions. The figures need the extra `plots`."""

from laplace.evaluation.metrics import (
    Reliability,
    accuracy,
    auroc,
    brier,
    confidence,
    coverage,
    ece,
    gaussian_nll,
    nll,
    reliability,
    rmse,
)
from laplace.evaluation.plots import regression_band, reliability_diagram
from laplace.evaluation.report.result import Report
from laplace.evaluation.report.verdicts import Thresholds, Verdict

__all__ = [
    "Reliability",
    "Report",
    "Thresholds",
    "Verdict",
    "accuracy",
    "auroc",
    "brier",
    "confidence",
    "coverage",
    "ece",
    "gaussian_nll",
    "nll",
    "regression_band",
    "reliability",
    "reliability_diagram",
    "rmse",
]
