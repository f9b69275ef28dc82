"""Scores and figures for predictive distributions. The figures need the extra `plots`."""

from laplace.evaluation.bootstrap import Bootstrap, bootstrap
from laplace.evaluation.calibration import Reliability, adaptive_ece, classwise_ece, ece, mce, reliability
from laplace.evaluation.classification import accuracy, brier, confidence, nll
from laplace.evaluation.curves import coverage_diagram, risk_coverage_diagram
from laplace.evaluation.detection import aupr, auroc, fpr95, fpr_at_tpr
from laplace.evaluation.intervals import interval_coverage, interval_score, interval_width
from laplace.evaluation.labels import binary_accuracy, binary_brier, binary_ece, binary_nll
from laplace.evaluation.pit import coverage_at, gaussian_pit, quantile_calibration_error, sample_pit
from laplace.evaluation.plots import regression_band, reliability_diagram
from laplace.evaluation.regression import crps, gaussian_crps, gaussian_nll, rmse, sharpness
from laplace.evaluation.report.result import Report
from laplace.evaluation.report.verdicts import Thresholds, Verdict
from laplace.evaluation.selective import RiskCoverage, aurc, excess_aurc, risk_coverage, selective_accuracy

__all__ = [
    "Bootstrap",
    "Reliability",
    "Report",
    "RiskCoverage",
    "Thresholds",
    "Verdict",
    "accuracy",
    "adaptive_ece",
    "aupr",
    "aurc",
    "auroc",
    "binary_accuracy",
    "binary_brier",
    "binary_ece",
    "binary_nll",
    "bootstrap",
    "brier",
    "classwise_ece",
    "confidence",
    "coverage_at",
    "coverage_diagram",
    "crps",
    "ece",
    "excess_aurc",
    "fpr95",
    "fpr_at_tpr",
    "gaussian_crps",
    "gaussian_nll",
    "gaussian_pit",
    "interval_coverage",
    "interval_score",
    "interval_width",
    "mce",
    "nll",
    "quantile_calibration_error",
    "regression_band",
    "reliability",
    "reliability_diagram",
    "risk_coverage",
    "risk_coverage_diagram",
    "rmse",
    "sample_pit",
    "selective_accuracy",
    "sharpness",
]


def __dir__() -> list[str]:
    return __all__
