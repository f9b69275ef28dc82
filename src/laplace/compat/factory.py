"""Provide laplace-torch's `Laplace(...)`, whose objects have the shapes that they have there."""

from __future__ import annotations

from typing import Any

from torch import nn

from laplace.compat import classes, functional
from laplace.compat.classes import BaseLaplace
from laplace.laplace import Laplace as OurLaplace

__all__ = ["Laplace"]

_OF_WEIGHTS: dict[Any, type[BaseLaplace]] = {
    cls._parts: cls
    for cls in (
        classes.FullLaplace,
        classes.KronLaplace,
        classes.DiagLaplace,
        classes.LowRankLaplace,
        classes.FullLLLaplace,
        classes.KronLLLaplace,
        classes.DiagLLLaplace,
        classes.FullSubnetLaplace,
        classes.DiagSubnetLaplace,
    )
}
_OF_FUNCTIONS: dict[Any, type[BaseLaplace]] = {
    ("all", "sod"): functional.FunctionalLaplace,
    ("last_layer", "sod"): functional.FunctionalLLLaplace,
    ("all", "nystrom"): functional.ELLA,
    ("all", "variational"): functional.VaLLA,
}


def Laplace(
    model: nn.Module,
    likelihood: Any,
    subset_of_weights: Any = "last_layer",
    hessian_structure: Any = "kron",
    *args: Any,
    **options: Any,
) -> OurLaplace:
    """Return an object of the class of a combination: `KronLLLaplace` by default.

    Combinations that laplace-torch does not have are `laplace.Laplace` objects.

    Args:
        model: the trained network.
        likelihood: what its outputs mean.
        subset_of_weights: which weights are uncertain.
        hessian_structure: what is kept of the curvature.
        *args: further arguments in the order of the class.
        **options: the same by name.
    """
    subset, structure = str(subset_of_weights), str(hessian_structure)
    if structure == "gp":
        cls = _OF_FUNCTIONS.get((subset, str(options.get("functional_approximation", "sod"))))
    else:
        cls = _OF_WEIGHTS.get((subset, structure))
    if cls is None:
        return OurLaplace(model, likelihood, subset_of_weights, hessian_structure, *args, **options)
    return cls(model, likelihood, *args, **options)
