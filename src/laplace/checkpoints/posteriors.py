"""A fitted posterior in a file: the options that make a `Laplace` of its kind, its network's digests, and its state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from laplace.batches import device_of, training_batches
from laplace.checkpoints import container, digests
from laplace.checkpoints.names import Rename, renamed_state, renaming
from laplace.checkpoints.points import digest_of, inputs_at
from laplace.checkpoints.state import INPUTS, NUMBERS, VECTORS, load_state_dict, state_dict, state_without_inputs
from laplace.checks import shown
from laplace.errors import CheckpointError, LaplaceError, OptionError, UnsupportedError
from laplace.functional import FUNCTIONAL
from laplace.likelihoods import LIKELIHOODS, Likelihood, likelihood_named
from laplace.nested import map_tensors
from laplace.weights import Last, what_changed
from laplace.weights.named import Named
from laplace.weights.predicate import Where

if TYPE_CHECKING:
    from laplace.laplace import Laplace

KIND = "posterior"
_DIGEST = "points/digest"

Kind = TypeVar("Kind", bound="Laplace")


def save(la: Laplace, path: str | os.PathLike[str], with_data: bool = False) -> None:
    """Write a posterior; the inputs that a 'gp' is made of only `with_data`."""
    fit, weights = la.posterior.fit, la._weights
    _require_path(path)
    assert weights is not None
    if changed := what_changed(la.model, weights, fit.mean, la._snapshot, thoroughly=True):
        raise UnsupportedError(
            f"{changed} since fit, and a posterior is saved with a digest of the weights that it belongs to. Call "
            "la.fit again, or put the old weights back."
        )
    state = state_dict(la, with_data) if with_data else state_without_inputs(la)
    if fit.points is not None and not with_data:
        state[_DIGEST] = digest_of(fit.points.parts)
    contents = {"options": _options(la), "network": digests.of_network(la.model), "state": state}
    container.write(path, KIND, contents)


def load(
    cls: type[Kind],
    path: str | os.PathLike[str],
    model: nn.Module,
    likelihood: Likelihood | str | None,
    names: Mapping[str, str] | None,
    data: Iterable[Any] | None,
) -> Kind:
    """The posterior at `path`, on `model`."""
    _require_path(path)
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is a {type(model).__name__}; a torch.nn.Module is needed.")
    if names is not None and not (
        isinstance(names, Mapping) and all(isinstance(word, str) for pair in names.items() for word in pair)
    ):
        raise OptionError(f"names={shown(names)} must say which names changed: {{'old': 'new'}}.")
    contents = container.read(path, KIND)
    try:
        options, network, state = (contents[key] for key in ("options", "network", "state"))
        rename = renaming(names or {}, network)
        _require_network({rename(name): told for name, told in network.items()}, model, path)
        state = renamed_state(map_tensors(state, lambda t: t.to(device_of(model))), rename)
        own = _likelihood(options.pop("likelihood"), likelihood, path)
        noise = {"sigma_noise": state["sigma_noise"]} if state["sigma_noise"].numel() > 1 and likelihood is None else {}
        la = cls(model, own, **noise, **_renamed_options(options, state, bool(names), rename))
        state["subset_of_weights"] = la._subset.label
        if VECTORS in state and INPUTS not in state:
            state[INPUTS] = _inputs(la, state, data, path)
        load_state_dict(la, state)
        return la
    except LaplaceError:
        raise
    except Exception as error:  # a header that was made by hand
        raise CheckpointError(f"{str(path)!r} is damaged: what it says fits nowhere ({error!r}).") from error


def _require_path(path: object) -> None:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError(f"path={shown(path)} must name a file, as in 'posterior.safetensors'.")


def _options(la: Laplace) -> dict[str, Any]:
    """What `Laplace` is called with, but for model, prior and noise: these are in the state."""
    subset, structure, likelihood = la._subset, la.structure, la.likelihood
    kinds = [kind for kind, functional in FUNCTIONAL.items() if type(structure) is functional]
    options: dict[str, Any] = {key: getattr(structure, key) for key in structure.options}
    options |= {"functional_approximation": kinds[0]} if kinds else {}
    options |= (
        {"last_layer_name": subset.name, "feature_reduction": subset.reduction} if isinstance(subset, Last) else {}
    )
    known = LIKELIHOODS.get(likelihood.name)
    ours = known is not None and type(likelihood) is known and _as_made(known(), la.sigma_noise) == likelihood.described
    return options | {
        "likelihood": {"name": likelihood.described, "kind": likelihood.name, "ours": ours},
        "hessian_structure": "gp" if kinds else structure.name,
        "subset_of_weights": _subset(la),
        "subnetwork_indices": la.subnetwork_indices,
        "curvature": la.curvature,
        "curvature_samples": la.curvature_samples,
        "class_dim": la.class_dim,
        "enable_backprop": la.enable_backprop,
        "dict_key_x": la._keys.x,
        "dict_key_y": la._keys.y,
    }


def _as_made(likelihood: Likelihood, sigma: Tensor) -> str:
    """What a likelihood is called once it knows the noise: how outputs differ in it is a part of the likelihood."""
    return likelihood.with_noise(sigma.detach())[0].described


def _subset(la: Laplace) -> str | list[str]:
    """As it was written; of a predicate, the names that it chose."""
    if isinstance(la._subset, Named):
        return la._subset.patterns
    return list(la.posterior.fit.layout.names) if isinstance(la._subset, Where) else la._subset.label


def _renamed_options(
    options: dict[str, Any], state: Mapping[str, Any], renamed: bool, rename: Rename
) -> dict[str, Any]:
    if renamed and isinstance(options["subset_of_weights"], list):  # globs need not fit the new names
        options["subset_of_weights"] = list(state["names"])
    if options.get("last_layer_name") is not None:
        options["last_layer_name"] = rename(options["last_layer_name"])
    return options


def _require_network(then: Mapping[str, Mapping[str, Any]], model: nn.Module, path: Any) -> None:
    if differ := digests.differing(then, digests.of_network(model)):
        raise CheckpointError(
            f"{str(path)!r} is the posterior of another network: {differ}. Load the weights that it was fitted at; "
            "where only names changed, write names={'old': 'new'}, of parameters or modules."
        )


def _likelihood(told: Mapping[str, Any], given: Likelihood | str | None, path: Any) -> Likelihood:
    if given is None:
        if told["ours"]:
            return likelihood_named(told.get("kind", told["name"]))
        raise CheckpointError(
            f"{str(path)!r} has a likelihood with options of yours, {told['name']!r}, and files hold no code. "
            "Write Laplace.load(..., likelihood=) with the same one."
        )
    if (name := likelihood_named(given).described) != told["name"]:
        raise CheckpointError(f"{str(path)!r} has the likelihood {told['name']!r}; likelihood= is {name!r}.")
    return likelihood_named(given)


def _inputs(la: Laplace, state: Mapping[str, Any], data: Iterable[Any] | None, path: Any) -> list[Any]:
    """The inputs of the kept points, looked up in the data."""
    sizes = [len(vectors) for vectors in state[VECTORS]]
    if data is None:
        raise CheckpointError(
            f"{str(path)!r} is a 'gp' made of {sum(sizes)} inputs of the training data and does not hold them. Write "
            "Laplace.load(..., data=train_loader), with the batches in the order in which it was fitted."
        )
    batches = training_batches(data, la.model, la._keys, False, "load")
    found = inputs_at(batches, state[NUMBERS].cpu().split(sizes))
    if found is None or digest_of(found) != state[_DIGEST]:
        raise CheckpointError(
            f"data= does not hold the {sum(sizes)} inputs that {str(path)!r} was fitted on, at their places. Give the "
            "same data in the same order (shuffle=False), or save with la.save(path, with_data=True)."
        )
    return [part.inputs.x for part in found]
