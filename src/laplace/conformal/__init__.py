"""Conformal prediction on top of any prediction: sets and intervals with a finite-sample guarantee.

conformal = la.conformal(cal_loader, level=0.9)
lower, upper = conformal.interval(x)            # regression
members = conformal.set(x)                      # classification, (N, C) of booleans
"""

from laplace.conformal.calibrated import Conformal
from laplace.conformal.calls import from_predictions
from laplace.conformal.coverage import Cell, CoverageTest

__all__ = ["Cell", "Conformal", "CoverageTest", "from_predictions"]


def __dir__() -> list[str]:
    return __all__
