"""A fitted posterior as a flat dict of tensors, numbers and strings, loadable with `torch.load(weights_only=True)`.

It holds sums over the data, never the data, unless the posterior is made of points of it and the user asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.batches import Batch, Inputs
from laplace.curved_prior import CurvedPrior, Earlier
from laplace.errors import InputError, LaplaceError, UnsupportedError
from laplace.functional.points import Points
from laplace.posterior import Fit
from laplace.prior import Prior
from laplace.replica import plain_name, unwrap
from laplace.structures import Sums
from laplace.weights import LastLayer, Layout, Selection

if TYPE_CHECKING:
    from laplace.laplace import Laplace

_OPTIONS = ("likelihood", "structure", "curvature", "subset_of_weights")
_NEEDED = ("names", "shapes", "mean", "n_data", "n_outputs", "linear", "last_layer", "feature_reduction",
           "prior_precision", "prior_mean", "sigma_noise", "temperature")  # fmt: skip
_DATA = "data/"
SUMS, INDEX, EARLIER = "sums/", "index/", "earlier/"  # what follows begins with a parameter's name, or is one
INPUTS, VECTORS, NUMBERS = "points/inputs", "points/vectors", "points/numbers"


def state_dict(la: Laplace, with_data: bool = False) -> dict[str, Any]:
    """Everything that prediction, evidence and further fitting need."""
    points = la.posterior.fit.points
    if points is None:
        return state_without_inputs(la)
    if not with_data:
        raise UnsupportedError(
            f"hessian_structure='gp' predicts from {len(points)} inputs of the training data, and its state holds "
            "them. Write state_dict(with_data=True) if it may, la.save(path), whose file is loaded with the data, or "
            "functional_approximation='nystrom', which keeps none."
        )
    return state_without_inputs(la) | {INPUTS: [_plain(part.inputs.x) for part in points.parts]}


def state_without_inputs(la: Laplace) -> dict[str, Any]:
    """The same without the inputs of the kept points, where there are any; their numbers in the data are there."""
    fit, weights = la.posterior.fit, la._weights
    assert weights is not None
    state: dict[str, Any] = options_of(la) | {
        "names": list(fit.layout.names),
        "shapes": [list(shape) for shape in fit.layout.tensor_shapes],
        "last_layer": weights.module,
        "feature_reduction": weights.reduction,
        "mean": fit.mean.clone(),
        "n_data": fit.n_data,
        "n_outputs": fit.n_outputs,
        "linear": fit.linear,
        "prior_precision": la.prior_precision.detach().clone(),
        "prior_mean": la.prior_mean.detach().clone(),
        "sigma_noise": la.sigma_noise.detach().clone(),
        "temperature": la.temperature,
    }
    if la.subnetwork_indices is not None:
        state["subnetwork_indices"] = la.subnetwork_indices
    named = zip(fit.layout.names, fit.layout.parts, strict=True)
    state.update({INDEX + name: part.index.clone() for name, part in named if part is not None})
    state.update({SUMS + key: value.clone() for key, value in fit.sums.items()})
    state.update({_DATA + key: value.clone() for key, value in fit.data.items()})
    if fit.points is not None:
        state[VECTORS] = [part.y.clone() for part in fit.points.parts]
        state[NUMBERS] = fit.points.numbers.clone()
    if not fit.structure.semidefinite:
        state["semidefinite"] = False
    if isinstance(la.prior, CurvedPrior):
        state["n_earlier"] = la.prior.n_data
        state.update({EARLIER + key: value.clone() for key, value in la.prior.earlier.fit.sums.items()})
    return state


def load_state_dict(la: Laplace, state: Mapping[str, Any]) -> None:
    """Put a saved posterior onto `la`; nothing changes where it does not fit."""
    try:
        _load(la, state)
    except LaplaceError:
        raise
    except Exception as error:  # a state that was made by hand
        raise InputError(f"the state is damaged: what it says fits nowhere ({error!r}).") from error


def _load(la: Laplace, state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise InputError(f"a state is a mapping, as state_dict() gives it; this is a {type(state).__name__}.")
    missing = [key for key in (*_NEEDED, *_OPTIONS) if key not in state]
    if missing:
        raise InputError(f"this is no state of a Laplace posterior: {', '.join(missing)} missing.")
    for key, here in options_of(la).items():
        if state.get(key, here) != here and not (key == "curvature" and la._may_have_chosen(state[key])):
            raise InputError(
                f"the state has {key}={state[key]!r}, this object {here!r}. Make it with the same options."
            )
    layout = _layout(state)
    parameters = {plain_name(name): p for name, p in unwrap(la.model).named_parameters()}
    for name, shape, part in zip(layout.names, layout.tensor_shapes, layout.parts, strict=True):
        found = tuple(parameters[name].shape) if name in parameters else None
        if found != shape:
            raise InputError(f"the state has a parameter {name!r} of shape {shape}; the network's is {found}.")
        if part is not None and not 0 <= int(part.index.min()) <= int(part.index.max()) < math.prod(shape):
            raise InputError(f"the state is damaged: it has indices outside the parameter {name!r} of shape {shape}.")
    here, saved = la.subnetwork_indices, state.get("subnetwork_indices")
    if here is not None and (saved is None or not torch.equal(here, saved.to(here))):
        raise InputError("the state is of another subnetwork: its subnetwork_indices are not those of this object.")
    sums, data, earlier = (_sums(state, prefix) for prefix in (SUMS, _DATA, EARLIER))
    mean: Tensor = state["mean"].clone()
    dtypes = {torch.promote_types(parameters[name].dtype, torch.float32) for name in layout.names}
    if dtypes != {mean.dtype}:
        raise InputError(f"the state is of a network in {mean.dtype}; this one's posterior would be in {dtypes.pop()}.")
    counts = (state["n_data"], state["n_outputs"], state["linear"])
    structure, points = (
        la.structure if state.get("semidefinite", True) else la.structure.indefinite(),
        _points(la, state),
    )
    fit = Fit(structure, la.likelihood, state["curvature"], layout, mean, sums, data, *counts, points=points)
    _require_numbers(fit)
    try:
        _ = fit.curvature, layout.split(mean)
    except (KeyError, RuntimeError) as error:
        raise InputError(f"the state is damaged: its sums or its mean do not fit its parameters ({error}).") from error
    prior = Prior.of(state["prior_precision"], state["prior_mean"])
    if earlier:
        before = replace(fit, mean=prior.mean, sums=earlier, data={}, n_data=state["n_earlier"])
        prior = CurvedPrior(prior.precision, prior.mean, Earlier(before))
    prior.check(layout, la.structure.prior_structures)
    _require_whole(fit)
    last = state["last_layer"]
    la._restore(
        fit,
        Selection(layout) if last is None else LastLayer(last, layout, state["feature_reduction"]),
        prior,
        state["sigma_noise"],
        state["temperature"],
    )


def _require_numbers(fit: Fit) -> None:
    """Refuse sums and counts that are no numbers."""
    bad = [key for key, value in (fit.sums | fit.data).items() if not value.isfinite().all()]
    if bad:
        raise InputError(f"the state is damaged: {bad[0]} holds NaN or infinite values.")
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in (fit.n_data, fit.n_outputs)):
        raise InputError(f"the state is damaged: {fit.n_data!r} examples of {fit.n_outputs!r} outputs.")


def _require_whole(fit: Fit) -> None:
    """Refuse sums that are not those of these weights."""
    if fit.structure.semidefinite and not fit.structure.functional:
        one = torch.ones((), dtype=fit.mean.dtype, device=fit.mean.device)
        blocks = Prior.of(1.0, 0.0).blocks(fit.layout, fit.mean)
        if fit.curvature.gaussian(one, blocks).marginal_variances().shape != fit.mean.shape:
            raise InputError("the state is damaged: its sums are of other weights.")


def _layout(state: Mapping[str, Any]) -> Layout:
    names, shapes = list(state["names"]), [tuple(shape) for shape in state["shapes"]]
    indices = [state.get(INDEX + name) for name in names]
    return Layout.of_parts(names, shapes, [None if index is None else index.clone() for index in indices])


def _points(la: Laplace, state: Mapping[str, Any]) -> Points | None:
    """The kept points, where there are some."""
    if not la.structure.keeps_points:
        return None
    missing = [key for key in (INPUTS, VECTORS, NUMBERS) if key not in state]
    if missing:
        raise InputError(f"the state is damaged: a 'gp' predicts from points of the data, and {missing[0]} is missing.")
    pairs = enumerate(zip(state[INPUTS], state[VECTORS], strict=True))
    keys = la._keys
    parts = [Batch(i, Inputs(_plain(x), keys=keys, pairs=keys.pairs), y.clone()) for i, (x, y) in pairs]
    return Points(parts, state[NUMBERS].clone())


def _plain(x: Any) -> Any:
    """Inputs in containers that `torch.load(weights_only=True)` knows, their tensors copied."""
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(map(_plain, x)) if type(x) is list else tuple(map(_plain, x))
    return x.clone() if isinstance(x, Tensor) else x


def _sums(state: Mapping[str, Any], prefix: str) -> Sums:
    return {key.removeprefix(prefix): value.clone() for key, value in state.items() if key.startswith(prefix)}


def options_of(la: Laplace) -> dict[str, Any]:
    """What must be equal for two posteriors to be of one kind."""
    return {
        "likelihood": la.likelihood.described,
        "structure": la.structure.described,
        "curvature": la.curvature,
        "subset_of_weights": la._subset.label,
        "class_dim": la.class_dim,
    }
