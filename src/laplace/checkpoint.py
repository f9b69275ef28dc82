"""A fitted posterior as a flat dict of tensors, numbers and strings, loadable with `torch.load(weights_only=True)`.

It holds sums over the data, never the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.curved_prior import CurvedPrior, Earlier
from laplace.errors import InputError
from laplace.posterior import Fit
from laplace.prior import Prior
from laplace.replica import plain_name, unwrap
from laplace.structures import Sums
from laplace.weights import AllWeights, LastLayer, Layout

if TYPE_CHECKING:
    from laplace.laplace import Laplace

_OPTIONS = ("likelihood", "structure", "curvature", "subset_of_weights")
_NEEDED = ("names", "shapes", "mean", "n_data", "n_outputs", "linear", "last_layer", "feature_reduction",
           "prior_precision", "prior_mean", "sigma_noise", "temperature")  # fmt: skip
_SUMS, _DATA, _EARLIER = "sums/", "data/", "earlier/"


def state_dict(la: Laplace) -> dict[str, Any]:
    """Everything that prediction, evidence and further fitting need."""
    fit, weights = la.posterior.fit, la._weights
    assert weights is not None
    state: dict[str, Any] = options_of(la) | {
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
    if not fit.structure.semidefinite:
        state["semidefinite"] = False
    if isinstance(la.prior, CurvedPrior):
        state["n_earlier"] = la.prior.n_data
        state.update({_EARLIER + key: value.clone() for key, value in la.prior.earlier.fit.sums.items()})
    return state


def load_state_dict(la: Laplace, state: Mapping[str, Any]) -> None:
    """Put a saved posterior onto `la`; nothing changes where it does not fit."""
    if not isinstance(state, Mapping):
        raise InputError(f"a state is a mapping, as state_dict() gives it; this is a {type(state).__name__}.")
    missing = [key for key in (*_NEEDED, *_OPTIONS) if key not in state]
    if missing:
        raise InputError(f"this is no state of a Laplace posterior: {', '.join(missing)} missing.")
    for key, here in options_of(la).items():
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
    sums, data, earlier = (_sums(state, prefix) for prefix in (_SUMS, _DATA, _EARLIER))
    mean: Tensor = state["mean"].clone()
    dtypes = {torch.promote_types(parameters[name].dtype, torch.float32) for name in layout.names}
    if dtypes != {mean.dtype}:
        raise InputError(f"the state is of a network in {mean.dtype}; this one's posterior would be in {dtypes.pop()}.")
    counts = (state["n_data"], state["n_outputs"], state["linear"])
    structure = la.structure if state.get("semidefinite", True) else la.structure.indefinite()
    fit = Fit(structure, la.likelihood, la.curvature, layout, mean, sums, data, *counts)
    try:
        _ = fit.curvature, layout.split(mean)
    except (KeyError, RuntimeError) as error:
        raise InputError(f"the state is damaged: its sums or its mean do not fit its parameters ({error}).") from error
    prior = Prior.of(state["prior_precision"], state["prior_mean"])
    if earlier:
        before = replace(fit, mean=prior.mean, sums=earlier, data={}, n_data=state["n_earlier"])
        prior = CurvedPrior(prior.precision, prior.mean, Earlier(before))
    prior.check(layout, la.structure.prior_structures)
    last = state["last_layer"]
    la._restore(
        fit,
        AllWeights(layout) if last is None else LastLayer(last, layout, state["feature_reduction"]),
        prior,
        state["sigma_noise"],
        state["temperature"],
    )


def _sums(state: Mapping[str, Any], prefix: str) -> Sums:
    return {key.removeprefix(prefix): value.clone() for key, value in state.items() if key.startswith(prefix)}


def options_of(la: Laplace) -> dict[str, Any]:
    """What must be equal for two posteriors to be of one kind."""
    return {
        "likelihood": la.likelihood.name,
        "structure": la.structure.described,
        "curvature": la.curvature,
        "subset_of_weights": la.subset_of_weights,
    }
