"""A fitted posterior as a flat dict of tensors, numbers and strings, loadable with `torch.load(weights_only=True)`.

It holds sums over the data, never the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.errors import InputError
from laplace.posterior import Fit
from laplace.prior import Prior
from laplace.replica import plain_name, unwrap
from laplace.weights import AllWeights, LastLayer, Layout

if TYPE_CHECKING:
    from laplace.laplace import Laplace

_OPTIONS = ("likelihood", "structure", "curvature", "subset_of_weights")
_NEEDED = ("names", "shapes", "mean", "n_data", "n_outputs", "linear", "last_layer", "feature_reduction",
           "prior_precision", "prior_mean", "sigma_noise", "temperature")  # fmt: skip
_SUMS, _DATA = "sums/", "data/"


def state_dict(la: Laplace) -> dict[str, Any]:
    """Everything that prediction, evidence and further fitting need."""
    fit, weights = la.posterior.fit, la._weights
    assert weights is not None
    state: dict[str, Any] = _options(la) | {
        "names": list(fit.layout.names),
        "shapes": [list(shape) for shape in fit.layout.shapes],
        "last_layer": getattr(weights, "module", None),
        "feature_reduction": getattr(weights, "reduction", None),
        "mean": fit.mean.clone(),
        "n_data": fit.n_data,
        "n_outputs": fit.n_outputs,
        "linear": fit.linear,
        "prior_precision": la.prior_precision.detach().clone(),
        "prior_mean": la.prior_mean.detach().clone(),
        "sigma_noise": la.sigma_noise.detach().clone(),
        "temperature": la.temperature,
    }
    state.update({_SUMS + key: value.clone() for key, value in fit.sums.items()})
    state.update({_DATA + key: value.clone() for key, value in fit.data.items()})
    return state


def load_state_dict(la: Laplace, state: Mapping[str, Any]) -> None:
    """Put a saved posterior onto `la`; nothing changes where it does not fit."""
    if not isinstance(state, Mapping):
        raise InputError(f"a state is a mapping, as state_dict() gives it; this is a {type(state).__name__}.")
    missing = [key for key in (*_NEEDED, *_OPTIONS) if key not in state]
    if missing:
        raise InputError(f"this is no state of a Laplace posterior: {', '.join(missing)} missing.")
    for key, here in _options(la).items():
        if state[key] != here:
            raise InputError(
                f"the state has {key}={state[key]!r}, this object {here!r}. Make it with the same options."
            )
    layout = Layout(tuple(state["names"]), tuple(tuple(shape) for shape in state["shapes"]))
    parameters = {plain_name(name): p for name, p in unwrap(la.model).named_parameters()}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        found = tuple(parameters[name].shape) if name in parameters else None
        if found != shape:
            raise InputError(f"the state has a parameter {name!r} of shape {shape}; the network's is {found}.")
    sums = {key.removeprefix(_SUMS): value.clone() for key, value in state.items() if key.startswith(_SUMS)}
    data = {key.removeprefix(_DATA): value.clone() for key, value in state.items() if key.startswith(_DATA)}
    mean: Tensor = state["mean"].clone()
    dtypes = {torch.promote_types(parameters[name].dtype, torch.float32) for name in layout.names}
    if dtypes != {mean.dtype}:
        raise InputError(f"the state is of a network in {mean.dtype}; this one's posterior would be in {dtypes.pop()}.")
    counts = (state["n_data"], state["n_outputs"], state["linear"])
    fit = Fit(la.structure, la.likelihood, la.curvature, layout, mean, sums, data, *counts)
    try:
        _ = fit.curvature, layout.split(mean)
    except (KeyError, RuntimeError) as error:
        raise InputError(f"the state is damaged: its sums or its mean do not fit its parameters ({error}).") from error
    prior = Prior.of(state["prior_precision"], state["prior_mean"])
    prior.check(layout, la.structure.prior_structures)
    last = state["last_layer"]
    la._restore(
        fit,
        AllWeights(layout) if last is None else LastLayer(last, layout, state["feature_reduction"]),
        prior,
        state["sigma_noise"],
        state["temperature"],
    )


def _options(la: Laplace) -> dict[str, Any]:
    damping, sharing = (getattr(la.structure, key, None) for key in ("damping", "weight_sharing"))
    structure = la.structure.name + (f", damping {damping!r}" if damping else "")
    structure += ", reduce" if sharing == "reduce" else ""
    for key in ("rank", "tol"):
        value = getattr(la.structure, key, None)
        structure += "" if value is None else f", {key} {value!r}"
    return {
        "likelihood": la.likelihood.name,
        "structure": structure,
        "curvature": la.curvature,
        "subset_of_weights": la.subset_of_weights,
    }
