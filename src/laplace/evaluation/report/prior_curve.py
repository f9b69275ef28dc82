"""Follow the log evidence along the prior precision: where it is largest, and where the posterior is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from laplace.errors import LaplaceError
from laplace.posterior.posterior import Posterior
from laplace.priors.gaussian import GaussianPrior

_DECADES: Final = 4  # on each side of the present prior precision
_EACH: Final = 3  # points in a decade


def prior_curve(posterior: Posterior) -> dict[str, Any] | str:
    """Return the log evidence for factors of the prior precision, or why there is no such curve."""
    prior = posterior.prior
    if not isinstance(prior, GaussianPrior):
        return f"the prior is {type(prior).__name__}, which is not given by a precision."
    factors, evidence = [], []
    for exponent in np.linspace(-_DECADES, _DECADES, 2 * _DECADES * _EACH + 1):
        factor = float(10**exponent)
        try:
            other = replace(posterior, prior=prior.with_precision(prior.precision * factor))
            value = float(other.log_evidence.detach())
        except LaplaceError:
            continue
        factors.append(factor)
        evidence.append(value)
    if len(factors) < 3:
        return "the evidence cannot be computed around this prior precision."
    best = int(np.argmax(evidence))
    many = prior.precision.numel() > 1
    level = 1.0 if many else float(prior.precision)
    return {
        "factor": factors,
        "precision": [level * factor for factor in factors],
        "several": many,
        "log_evidence": evidence,
        "present": level,
        "best": level * factors[best],
        "edge": "low" if best == 0 else "high" if best == len(factors) - 1 else "",
    }
