"""Warn of subclasses that change a method in laplace-torch's way, where nothing here would call it."""

from __future__ import annotations

from laplace.errors import warn

__all__ = ["warn_of_overrides"]

_STEPS = frozenset(  # what predictions, the evidence or a fit go through there, and what has other ways here
    {
        "_check_jacobians",
        "_curv_closure",
        "_glm_forward_call",
        "_glm_functional_samples",
        "_glm_predictive_distribution",
        "_glm_predictive_samples",
        "_init_H",
        "_nn_functional_samples",
        "_nn_predictive_samples",
        "functional_covariance",
        "functional_variance",
        "log_det_posterior_precision",
        "log_det_prior_precision",
        "log_det_ratio",
        "log_likelihood",
        "log_marginal_likelihood",
        "posterior_covariance",
        "posterior_precision",
        "posterior_scale",
        "posterior_variance",
        "prior_precision_diag",
        "sample",
        "scatter",
        "square_norm",
    }
)


def warn_of_overrides(cls: type) -> None:
    """Warn if a class from outside this package overrides a step that laplace-torch takes, and this package does not.

    Args:
        cls: the class, as it is being defined.
    """
    found = sorted(_STEPS & vars(cls).keys())
    if found and cls.__module__.partition(".")[0] != "laplace":
        warn(
            f"{cls.__name__} overrides {', '.join(found)}, which is used where you call it. But fit, predictions and "
            "tuning do not go through methods here, and stay as they are. For a curvature or a posterior of your own "
            "write a structure: see 'Extend' in the documentation."
        )
