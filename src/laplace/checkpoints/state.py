"""Turn a fitted posterior into a flat dict of tensors, numbers and strings, and back.

`torch.load(weights_only=True)` can load it. It holds sums over the data, never the data. The only exception is a
posterior made of data points, if the user asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from laplace.checks import choice, flag, positive
from laplace.errors import InputError, LaplaceError, NumericalError, UnsupportedError
from laplace.inference.runner import Runner
from laplace.inference.source import Fitted
from laplace.inference.values import Holder, Values
from laplace.keywords import refuse_unknown_keywords
from laplace.network.batches import Batch
from laplace.network.inputs import Inputs
from laplace.network.replica import plain_name, unwrap
from laplace.posterior import schema
from laplace.posterior.posterior import Fit, Posterior
from laplace.posterior.task_prior import CurvedPrior, Earlier
from laplace.priors import PRIORS, Prior
from laplace.priors.custom import Custom
from laplace.priors.gaussian import GaussianPrior
from laplace.spec import Spec
from laplace.structures import Sums
from laplace.structures.functional.points import Points
from laplace.structures.owners import Owners
from laplace.structures.spread import SpreadGaussian
from laplace.weights import FoundLastLayer, LastLayer, Layout, Selection, Subnetwork
from laplace.weights.last_layer import REDUCTIONS

_OPTIONS = ("likelihood", "structure", "curvature", "subset_of_weights")
_NEEDED = ("names", "shapes", "mean", "n_data", "n_outputs", "linear", "last_layer", "feature_reduction",
           "sigma_noise", "temperature")  # fmt: skip
_DATA = "data/"
PRIOR = "prior"
OWNERS = "owners"  # of a posterior whose factors stay on their ranks
SUMS, INDEX, EARLIER = "sums/", "index/", "earlier/"  # followed by a parameter's name, or by a key that begins with one
INPUTS, VECTORS, NUMBERS = "points/inputs", "points/vectors", "points/numbers"


class Kept(Fitted, Protocol):
    """Defines a posterior with its network and all that predictions depend on."""

    @property
    def softmax_temperature(self) -> float: ...


@refuse_unknown_keywords
def state_dict(la: Kept, /, with_data: bool = False) -> dict[str, Any]:
    """Return everything of a fitted posterior as tensors, numbers and strings: no code, and no training data.

    Args:
        with_data: must be True for a 'gp', whose state holds some training inputs.

    Raises:
        NotFittedError: `fit` was not called yet.
        UnsupportedError: the structure is 'gp', and `with_data` is False.
    """
    with_data, points = flag(with_data, "with_data"), la.posterior.fit.points
    if points is None:
        return state_without_inputs(la)
    if not with_data:
        raise UnsupportedError(
            f"hessian_structure='gp' predicts from {len(points)} inputs of the training data, and its state would hold "
            "them. To allow that, write state_dict(with_data=True). To keep them out, write la.save(path) and load the "
            "file with the data, or take functional_approximation='nystrom', which keeps no inputs."
        )
    return state_without_inputs(la) | {INPUTS: [_plain(part.inputs.x) for part in points.parts]}


def load_state_dict(la: Holder, state_dict: Mapping[str, Any]) -> None:
    """Take over what `state_dict` gave, on the same network with the same options.

    Args:
        state_dict: the state, directly or through `torch.save` and `torch.load(path, weights_only=True)`.

    Raises:
        InputError: the state was made with other options, or for other parameters.
    """
    found = restored(la.runner, state_dict, la.values.prior)
    numbers = found.sigma_noise, found.temperature, found.softmax_temperature
    la.values = replace(Values.of(la.runner, found.prior, *numbers, before=la.values), fit=found.fit)
    la.runner.adopt(found.weights)


def state_without_inputs(la: Kept) -> dict[str, Any]:
    """Return the state without the inputs of kept points. Their numbers in the data are included."""
    posterior, weights, spec = la.posterior, la.runner.weights, la.runner.spec
    fit, prior = posterior.fit, posterior.prior
    assert weights is not None
    state: dict[str, Any] = spec.described(fit.kind) | {
        "names": list(fit.layout.names),
        "shapes": [list(shape) for shape in fit.layout.tensor_shapes],
        "last_layer": weights.module,
        "feature_reduction": weights.reduction,
        "mean": fit.mean.clone(),
        "n_data": fit.n_data,
        "n_outputs": fit.n_outputs,
        "linear": fit.linear,
        **_prior_state(prior, fit.layout),
        "sigma_noise": fit.likelihood.noise_at(posterior.sigma).detach().clone(),
        "temperature": posterior.temperature,
        "softmax_temperature": la.softmax_temperature,
    }
    if isinstance(spec.weights, Subnetwork):
        state["subnetwork_indices"] = spec.weights.indices.clone()
    named = zip(fit.layout.names, fit.layout.parts, strict=True)
    state.update({INDEX + name: part.index.clone() for name, part in named if part is not None})
    state.update({SUMS + key: value.clone() for key, value in fit.sums.items()})
    if fit.owners is not None:
        state[OWNERS] = fit.owners.state()
    state.update({_DATA + key: value.clone() for key, value in fit.data.items()})
    if fit.points is not None:
        state[VECTORS] = [part.y.clone() for part in fit.points.parts]
        state[NUMBERS] = fit.points.numbers.clone()
    if not fit.structure.semidefinite:
        state["semidefinite"] = False
    if fit.flat:
        state["flat"] = True
    if isinstance(prior, CurvedPrior):
        state["n_earlier"] = prior.n_data
        state.update({EARLIER + key: value.clone() for key, value in prior.earlier.fit.sums.items()})
    return state


def _prior_state(prior: Prior, layout: Layout) -> dict[str, Any]:
    if isinstance(prior, GaussianPrior):
        return {"prior_precision": prior.precision.detach().clone(), "prior_mean": prior.mean.detach().clone()}
    return {PRIOR: prior.state(layout) | {"kind": kind_of(prior)}}


@dataclass(frozen=True)
class Restored:
    """Holds the contents of a state, checked against the network: a posterior and its uncertain weights.

    Attributes:
        fit: The sums over the data.
        weights: Where the uncertain weights are in the network.
        prior: The prior over the weights, with the curvature of earlier tasks.
        sigma_noise: One number, or one per output.
        temperature: The temperature of the likelihood.
        softmax_temperature: What predictions divide the logits by. States from before it was there have none: 1.
    """

    fit: Fit
    weights: FoundLastLayer | Selection
    prior: Prior
    sigma_noise: Tensor
    temperature: float
    softmax_temperature: float


def restored(runner: Runner, state: Mapping[str, Any], given: Prior) -> Restored:
    """Return the posterior that a state holds, for the network and options of `runner`.

    The prior `given` has the function of a state with a prior of `from_log_density`.
    """
    try:
        return _restored(runner, state, given)
    except LaplaceError:
        raise
    except Exception as error:  # a state that was made by hand
        raise InputError(f"the state is damaged: its contents do not fit together ({error!r}).") from error


def _restored(runner: Runner, state: Mapping[str, Any], given: Prior) -> Restored:
    spec = runner.spec
    _require_options(spec, state)
    schema.require_words(state)
    layout = _layout(state)
    schema.require_indices(layout)
    _require_network(runner, state, layout)
    sums, data, earlier = (_sums(state, prefix) for prefix in (SUMS, _DATA, EARLIER))
    mean: Tensor = state["mean"].clone()
    _require_dtype(runner, layout, mean.dtype)
    counts = (state["n_data"], state["n_outputs"], state["linear"])
    structure, points = (
        spec.structure if state.get("semidefinite", True) else spec.structure.indefinite(),
        _points(spec, state),
    )
    owners = Owners.from_state(state[OWNERS], len(layout.names)) if OWNERS in state else None
    parts = (structure, spec.likelihood, state["curvature"], layout, mean, sums, data)
    more = {"points": points, "owners": owners, "empirical": spec.estimator.empirical}
    fit = Fit(*parts, *counts, flat=state.get("flat", False), **more)
    if mean.shape != (layout.n_params,):
        raise InputError(
            f"the state is damaged: its mean has shape {tuple(mean.shape)}; its parameters are {layout.n_params} "
            "weights."
        )
    schema.require_sums(fit, sums)
    prior = _prior(state, layout, given)
    if earlier:
        prior = _after_earlier_tasks(prior, fit, earlier, state)
    prior.check(layout, spec.structure.takes)
    weights = _weights(runner, layout, state)
    level = spec.likelihood.with_noise(positive(state["sigma_noise"], "sigma_noise"))[1]
    kept = replace(fit, structure=fit.structure.stored)  # what can be computed without the training data
    _require_usable(Posterior(kept, prior, level, float(state["temperature"])))
    temperatures = state["temperature"], state.get("softmax_temperature", 1.0)
    return Restored(fit, weights, prior, state["sigma_noise"], *temperatures)


def _require_options(spec: Spec, state: Mapping[str, Any]) -> None:
    """Refuse a state that lacks keys, or that was made with other options."""
    if not isinstance(state, Mapping):
        raise InputError(f"the state is a {type(state).__name__}; a mapping is needed, as state_dict() returns it.")
    of_prior = (PRIOR,) if PRIOR in state else ("prior_precision", "prior_mean")
    missing = [key for key in (*_NEEDED, *of_prior, *_OPTIONS) if key not in state]
    if missing:
        raise InputError(f"this is not the state of a Laplace posterior: {', '.join(missing)} missing.")
    chosen = spec.curvature is None and state["curvature"] in ("ggn", "sketch")  # a fit may choose either by itself
    for key, here in spec.described(state["curvature"] if chosen else spec.estimator.name).items():
        told = state.get(key, here)
        if told != here and not (key == "likelihood" and spec.likelihood.answers_to(told)):
            raise InputError(f"the state has {key}={told!r}, this object has {here!r}. Make it with the same options.")


def _require_network(runner: Runner, state: Mapping[str, Any], layout: Layout) -> None:
    """Refuse a state whose parameters, or whose subnetwork, are not those of the network."""
    parameters = {plain_name(name): p for name, p in unwrap(runner.model).named_parameters()}
    for name, shape in zip(layout.names, layout.tensor_shapes, strict=True):
        found = tuple(parameters[name].shape) if name in parameters else None
        if found != shape:
            raise InputError(f"the state has a parameter {name!r} of shape {shape}; the network's is {found}.")
    weights, saved = runner.spec.weights, state.get("subnetwork_indices")
    here = weights.indices if isinstance(weights, Subnetwork) else None
    if here is not None and (saved is None or not torch.equal(here, saved.to(here))):
        raise InputError(
            "the state belongs to another subnetwork: its subnetwork_indices are not those of this object."
        )


def _require_dtype(runner: Runner, layout: Layout, dtype: torch.dtype) -> None:
    """Refuse a state of another dtype than the network's posterior would have."""
    parameters = {plain_name(name): p for name, p in unwrap(runner.model).named_parameters()}
    dtypes = {torch.promote_types(parameters[name].dtype, torch.float32) for name in layout.names}
    if dtypes != {dtype}:
        raise InputError(
            f"the state belongs to a network in {dtype}; this network is in {dtypes.pop()}. Write model.to({dtype}) "
            "first."
        )


def _after_earlier_tasks(prior: Prior, fit: Fit, earlier: Sums, state: Mapping[str, Any]) -> CurvedPrior:
    """Return the prior with the curvature of earlier tasks."""
    if not isinstance(prior, GaussianPrior):
        raise InputError("the state is damaged: it has sums of earlier tasks, but its prior is not Gaussian.")
    if "n_earlier" not in state:
        raise InputError("the state is damaged: it has sums of earlier tasks, but n_earlier is missing.")
    schema.require_same_form(fit.sums, earlier)
    schema.require_sums(fit, earlier)
    before = replace(fit, mean=prior.mean, sums=earlier, data={}, n_data=state["n_earlier"])
    return CurvedPrior(prior.precision, prior.mean, Earlier(before))


def _prior(state: Mapping[str, Any], layout: Layout, given: Prior) -> Prior:
    """Return the prior of a state. If the state lacks its log-density, take the function of the prior `given`."""
    if PRIOR not in state:
        return GaussianPrior.of(state["prior_precision"], state["prior_mean"])
    told = state[PRIOR]
    if not isinstance(told, Mapping) or not isinstance(kind := told.get("kind"), str):
        raise InputError("the state is damaged: its prior has no kind.")
    if kind in PRIORS:
        return PRIORS[kind].from_state(told, layout)
    if kind != Custom.name:
        if kind_of(given) != kind:
            raise InputError(
                f"the state has your own prior {kind!r}, and states hold no code. Give one of its class: "
                f"Laplace(..., prior=), or Laplace.load(..., prior=). Known are {', '.join(map(repr, PRIORS))}."
            )
        return given.restored(told, layout)
    if not isinstance(given, Custom) or given.called != told["called"]:
        raise InputError(
            f"the state has your own prior, from_log_density({told['called']}), and states hold no code. Give the "
            "same prior: Laplace(..., prior=), or Laplace.load(..., prior=)."
        )
    return given.with_hyperparameters(**told["hyperparameters"])


def kind_of(prior: Prior) -> str:
    """Return the kind of a prior in files: its name. A subclass of one of our priors goes by the name of its class."""
    ours = PRIORS.get(prior.name)
    return prior.name if ours in (None, type(prior)) else type(prior).__qualname__


def _weights(runner: Runner, layout: Layout, state: Mapping[str, Any]) -> FoundLastLayer | Selection:
    """Return the weights that the state is over. Refuse other weights than this object's."""
    last, reduction = state["last_layer"], state["feature_reduction"]
    subset = runner.spec.weights
    whole = runner.spec.estimator.empirical  # with several positions, its scores are taken through the whole network
    if isinstance(subset, LastLayer) != (last is not None) and not (last is None and whole):
        needed = "the name of a layer" if last is None else "None"
        raise InputError(
            f"the state is damaged: last_layer is {last!r} with subset_of_weights={subset.label!r}; needed: {needed}."
        )
    if last is None:
        return Selection(layout)
    if reduction is not None:
        choice(reduction, REDUCTIONS, "feature_reduction of the state")
    weights = FoundLastLayer(last, layout, reduction)
    there = {id(p) for p in unwrap(runner.model).get_submodule(last).parameters(recurse=False)}
    parameters = {plain_name(name): p for name, p in unwrap(runner.model).named_parameters()}
    if any(id(parameters[name]) not in there for name in layout.names):
        raise InputError(f"the state is damaged: {', '.join(layout.names)} are not in its last layer {last!r}.")
    weights.tensors(runner.model)
    return weights


def _require_usable(posterior: Posterior) -> None:
    """Refuse a posterior without evidence, variances or draws, by computing them."""
    fit, structure = posterior.fit, posterior.fit.structure
    if isinstance(posterior.gaussian, SpreadGaussian):  # the rest is on other ranks, which may be elsewhere now
        return
    try:
        evidence, p = posterior.log_evidence, fit.layout.n_params
        whole = evidence.shape == ()
        if not structure.functional:
            gaussian = posterior.gaussian
            noise = torch.zeros(1, p, dtype=fit.mean.dtype, device=fit.mean.device)
            whole = whole and gaussian.marginal_variances().shape == (p,) and gaussian.color(noise).shape == (1, p)
    except NumericalError as error:
        if not structure.semidefinite:
            return  # after subtracting data, it may take another prior to be positive definite
        raise InputError(f"the state is damaged: it has no posterior ({error}).") from error
    except LaplaceError:
        raise
    except Exception as error:
        raise InputError(
            f"the state is damaged: its sums or its mean do not fit its parameters ({error!r})."
        ) from error
    if not whole:
        raise InputError("the state is damaged: its sums belong to other weights.")


def _layout(state: Mapping[str, Any]) -> Layout:
    names, shapes = list(state["names"]), [tuple(shape) for shape in state["shapes"]]
    indices = [state.get(INDEX + name) for name in names]
    return Layout.of_parts(names, shapes, [None if index is None else index.clone() for index in indices])


def _points(spec: Spec, state: Mapping[str, Any]) -> Points | None:
    """Return the kept points, if the structure keeps any."""
    if not spec.structure.keeps_points:
        return None
    missing = [key for key in (INPUTS, VECTORS, NUMBERS) if key not in state]
    if missing:
        raise InputError(f"the state is damaged: a 'gp' predicts from points of the data, and {missing[0]} is missing.")
    schema.require_points(state[VECTORS], state[INPUTS], state[NUMBERS], state["n_outputs"])
    pairs = enumerate(zip(state[INPUTS], state[VECTORS], strict=True))
    keys = spec.keys
    parts = [Batch(i, Inputs(_plain(x), keys=keys, pairs=keys.pairs), y.clone()) for i, (x, y) in pairs]
    if any(part.inputs.size != len(part.y) for part in parts):
        raise InputError("the state is damaged: points/inputs and points/vectors have different lengths.")
    return Points(parts, state[NUMBERS].clone())


def _plain(x: Any) -> Any:
    """Return inputs in containers that `torch.load(weights_only=True)` accepts, with copied tensors."""
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(map(_plain, x)) if type(x) is list else tuple(map(_plain, x))
    return x.clone() if isinstance(x, Tensor) else x


def _sums(state: Mapping[str, Any], prefix: str) -> Sums:
    found = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    for key, value in found.items():
        if not isinstance(value, Tensor):
            raise InputError(f"the state is damaged: {prefix}{key} is a {type(value).__name__}; needed: a tensor.")
    return {key: value.clone() for key, value in found.items()}
