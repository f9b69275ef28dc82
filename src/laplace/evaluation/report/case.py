"""Collect the data of verdicts, and format numbers for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from laplace.evaluation.report.answers import Answers
from laplace.evaluation.report.outside import Detected
from laplace.evaluation.report.reading import LAPLACE, Reading, Reported
from laplace.evaluation.report.resampling import Estimate
from laplace.evaluation.report.scores import Measured
from laplace.evaluation.report.verdicts import Thresholds

CALIBRATE = "la.calibrate(val_loader)"


@dataclass(frozen=True)
class Case:
    """Holds all that a verdict may look at.

    Attributes:
        la: The posterior.
        test: What all methods say of the test data.
        measured: Their scores.
        thresholds: From where on there is fault.
        validated: Whether there was validation data.
        changed: What has changed in the network since the fit, or None.
        in_common: How many test examples are among the training data; None if unknown.
        reused: What the test data is that was used before, in words, or ''.
        validating: How many test examples are among the validation data.
        curve: The evidence along the prior precision, or None.
        detected: How well inputs from outside are noticed.
    """

    la: Reported
    test: Reading
    measured: Measured
    thresholds: Thresholds
    validated: bool
    changed: str | None
    in_common: int | None
    reused: str
    validating: int
    curve: dict[str, Any] | None
    detected: list[Detected]

    @property
    def mine(self) -> dict[str, Estimate]:
        """Return the scores of Laplace."""
        return self.measured.values[LAPLACE]

    @property
    def answers(self) -> Answers:
        """Return the answers of Laplace."""
        return self.test.answers[LAPLACE]


def calibrate(case: Case) -> tuple[str, str]:
    """Return what to do about miscalibrated predictions: words and code."""
    if case.la.softmax_temperature == 1:
        return "Calibrate on validation data.", CALIBRATE
    return (
        "It has a softmax temperature already: take more validation data that is like the test data, or guarantee "
        "the coverage with conformal prediction.",
        f"la.conformal(cal_loader, level={case.thresholds.level:g})",
    )


def share(value: float) -> str:
    """Return a share in per cent."""
    return f"{100 * value:.1f} %"


def points(*values: float) -> str:
    """Return one share or two in points, without their sign."""
    text = " and ".join(f"{abs(100 * value):.1f}" for value in sorted(values, key=abs))
    return f"{text} points"
