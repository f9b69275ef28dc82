"""Save and load a posterior: the options of its `Laplace`, digests of its network, and its state."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from torch import nn

from laplace.checkpoints import container
from laplace.checkpoints.names import Rename, renamed_state, renaming
from laplace.checkpoints.points import digest_of, inputs_at
from laplace.checkpoints.state import (
    INPUTS,
    NUMBERS,
    OWNERS,
    PRIOR,
    VECTORS,
    Kept,
    kind_of,
    state_dict,
    state_without_inputs,
)
from laplace.checks import flag, options_of, path_of, shown
from laplace.curvature import CURVATURES, Estimator
from laplace.distributed import OWN, Group, Reduce, alone, reduce_over
from laplace.distributed.groups import Unsaid, global_rank
from laplace.distributed.together import joined, jointly
from laplace.errors import CheckpointError, LaplaceError, OptionError, UnsupportedError
from laplace.inference.runner import Runner
from laplace.inference.settings import require_same_settings
from laplace.inference.source import Fitted
from laplace.keywords import refuse_unknown_keywords
from laplace.likelihoods import LIKELIHOODS, Likelihood, likelihood_named
from laplace.network import digests
from laplace.network.batches import device_of
from laplace.network.pytree import map_tensors
from laplace.network.wrappers import unwrapped
from laplace.posterior.posterior import Fit
from laplace.priors import PRIORS, Prior
from laplace.priors.custom import Custom
from laplace.spec import STRUCTURE_OPTIONS, structure_named
from laplace.structures import STRUCTURES, Structure
from laplace.structures.functional import FUNCTIONAL
from laplace.weights import All, Choice, LastLayer, Named, Subnetwork, Subset, Where

KIND = "posterior"
_DIGEST = "points/digest"
_YOURS = "yours"  # marks a part that the user's code makes, with its description


class Loadable(Protocol):
    """Defines what can be made from the options in a file, and take over its state."""

    @property
    def runner(self) -> Runner: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...

    def attach_data(self, train_loader: Any) -> None: ...


Kind = TypeVar("Kind", bound=Loadable)


@jointly("la.save")
@refuse_unknown_keywords
def save(la: Kept, /, path: str | os.PathLike[str], with_data: bool = False, *, group: Group = OWN) -> None:
    """Write a fitted posterior to a file of safetensors: no code, and no training data.

    Args:
        path: the file. An existing file is replaced once the new one is complete. Missing folders are created.
        with_data: for a 'gp', which keeps some training inputs: True writes these inputs to the file. False writes only
            their indices and a digest, and `load` needs the data.
        group: the process group of `fit`: its first rank writes the file, and all ranks wait until it exists. Without
            it, after a fit on several ranks, the first rank writes the file and the others do not wait. After
            `fit(shard_factors=True)` each rank writes its own part, such as `path.rank0of2`.

    Raises:
        NotFittedError: `fit` was not called yet.
        UnsupportedError: the weights of the network have changed since `fit`.
    """
    path, with_data = path_of(path, "path"), flag(with_data, "with_data")
    reduce = alone if isinstance(group, Unsaid) else reduce_over(group, None, None)
    require_same_settings(la, reduce)
    if (owners := la.posterior.fit.owners) is not None:
        with reduce.session(), joined(reduce):
            _write(la, part_of(path, owners.rank, owners.size), with_data)
        return
    many = la.runner.ranks > 1 and isinstance(group, Unsaid)  # all ranks have the same posterior: one writes it
    if not many or global_rank() == 0:
        with reduce.session(), joined(reduce):
            if reduce.rank == 0:
                _write(la, path, with_data)


def part_of(path: Path, rank: int, size: int) -> Path:
    """Return the file of one rank's part."""
    return path.with_name(f"{path.name}.rank{rank}of{size}")


def _write(la: Kept, path: Path, with_data: bool) -> None:
    fit = la.posterior.fit
    if changed := la.runner.changed(fit.mean, thoroughly=True):
        raise UnsupportedError(
            f"{changed} since fit, and a posterior is saved with a digest of the weights that it belongs to. Call "
            "la.fit again, or put the old weights back."
        )
    state = state_dict(la, with_data) if with_data else state_without_inputs(la)
    if fit.points is not None and not with_data:
        state[_DIGEST] = digest_of(fit.points.parts)
    contents = {"options": _options(la), "network": digests.of_network(la.runner.model), "state": state}
    container.write(path, KIND, contents)


@jointly("Laplace.load")
@refuse_unknown_keywords
def load(
    cls: type[Kind],
    /,
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    likelihood: Likelihood | str | None = None,
    prior: Prior | None = None,
    hessian_structure: Structure | None = None,
    subset_of_weights: Subset | None = None,
    curvature: Estimator | None = None,
    names: Mapping[str, str] | None = None,
    data: Iterable[Any] | None = None,
    group: Group = OWN,
) -> Kind:
    """Return the posterior that `save` wrote, on the same network with the same weights; all options are in the file.

    Args:
        path: the file.
        model: the network, with the weights at which the posterior was fitted.
        likelihood: your own likelihood, if the posterior was fitted with one.
        prior: your own prior, a class or `from_log_density`, if the posterior was fitted with one. Its hyperparameters
            come from the file.
        hessian_structure: your own structure, if the posterior was fitted with one.
        subset_of_weights: your own choice of weights, if the posterior was fitted with one.
        curvature: your own curvature, if the posterior was fitted with one.
        names: {old: new}, if parameters or modules have new names.
        data: for a 'gp' that was saved without its data: the batches of `fit`, in the same order. For
            'matrix_free', the training data, which it reads again for every answer.
        group: of a posterior that was fitted with `shard_factors=True`, a process group with as many ranks: each reads
            its own part. Also for a network that `fully_shard` has sharded.

    Raises:
        CheckpointError: the file is damaged or not ours, or network or data differ; the message says how.
    """
    path = path_of(path, "path")
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is a {type(model).__name__}; a torch.nn.Module is needed.")
    if names is not None and not (
        isinstance(names, Mapping) and all(isinstance(word, str) for pair in names.items() for word in pair)
    ):
        raise OptionError(f"names={shown(names)} must be a mapping from old to new names: {{'old': 'new'}}.")
    reduce = alone if isinstance(group, Unsaid) else reduce_over(group, None, None)
    given = (likelihood, prior, hessian_structure, subset_of_weights, curvature, names, data)
    with reduce.session(), joined(reduce):
        return _loaded(cls, _own_part(path, reduce), model, *given)


def _loaded(
    cls: type[Kind],
    path: Path,
    model: nn.Module,
    likelihood: Likelihood | str | None,
    prior: Prior | None,
    hessian_structure: Structure | None,
    subset_of_weights: Subset | None,
    curvature: Estimator | None,
    names: Mapping[str, str] | None,
    data: Iterable[Any] | None,
) -> Kind:
    contents = container.read(path, KIND)
    try:
        options, network, state = (contents[key] for key in ("options", "network", "state"))
        rename = renaming(names or {}, network)
        _require_network({rename(name): told for name, told in network.items()}, unwrapped(model)[0], path)
        state = renamed_state(map_tensors(state, lambda t: t.to(device_of(model))), rename)
        own = _likelihood(options.pop("likelihood"), likelihood, path)
        noise = {"sigma_noise": state["sigma_noise"]} if state["sigma_noise"].numel() > 1 and likelihood is None else {}
        given = {} if prior is None else {"prior": _own_prior(state, prior, path)}
        options["hessian_structure"] = _structure(options, hessian_structure, path)
        options["subset_of_weights"] = _subset_of(options, subset_of_weights, path)
        options["curvature"] = _curvature_of(options, curvature, path)
        make = cast("Callable[..., Kind]", cls)
        la = make(model, own, **given, **noise, **_renamed_options(options, state, bool(names), rename))
        state["subset_of_weights"] = la.runner.spec.weights.label
        _require_same_weights(la.runner, state, path)
        if VECTORS in state and INPUTS not in state:
            state[INPUTS] = _inputs(la.runner, state, data, path)
        la.load_state_dict(state)
        if OWNERS in state:
            la.runner.ranks = state[OWNERS]["size"]
        if data is not None and la.runner.spec.structure.rereads:
            la.attach_data(data)
        return la
    except LaplaceError:
        raise
    except Exception as error:  # a header that was made by hand
        raise CheckpointError(f"{str(path)!r} is damaged: its contents do not fit together ({error!r}).") from error


def _own_part(path: Path, reduce: Reduce) -> Path:
    """Return the file that this process reads: its own part, if each rank wrote one."""
    parts = [] if path.exists() else sorted(path.parent.glob(f"{path.name}.rank*of*"))
    if not parts:
        return path
    own = part_of(path, reduce.rank, reduce.size)
    if own not in parts or reduce.size == 1:
        raise CheckpointError(
            f"{str(path)!r} is the posterior of several ranks that kept their own factors (shard_factors=True), in "
            f"{parts[0].name!r} and {len(parts) - 1} more. Load it on as many ranks, all of them with "
            "group=torch.distributed.group.WORLD" + (f"; this group has {reduce.size}." if reduce.size > 1 else ".")
        )
    return own


def _options(la: Fitted) -> dict[str, Any]:
    """Return the arguments of `Laplace`, without model, prior and noise. These are in the state."""
    runner = la.runner
    spec, fit = runner.spec, la.posterior.fit
    subset, structure, likelihood = spec.weights, spec.structure, spec.likelihood
    kinds = [kind for kind, functional in FUNCTIONAL.items() if type(structure) is functional]
    known = bool(kinds) or type(structure) is STRUCTURES.get(structure.name)
    options: dict[str, Any] = options_of(structure) if known else {}
    options |= {"functional_approximation": kinds[0]} if kinds else {}
    options |= (
        {"last_layer_name": subset.name, "feature_reduction": subset.reduction} if isinstance(subset, LastLayer) else {}
    )
    ours = type(likelihood) is LIKELIHOODS.get(likelihood.name)
    words = {"name": likelihood.described, "kind": likelihood.name, "ours": ours}
    return options | {
        "likelihood": words | ({"options": options_of(likelihood)} if ours else {}),
        "hessian_structure": "gp" if kinds else structure.name if known else {_YOURS: structure.described},
        "subset_of_weights": _subset(subset, fit),
        "subnetwork_indices": subset.indices.clone() if isinstance(subset, Subnetwork) else None,
        "curvature": fit.kind,
        "curvature_samples": spec.estimator.vectors,
        "class_dim": spec.class_dim,
        "enable_backprop": runner.enable_backprop,
        "dict_key_x": spec.keys.x,
        "dict_key_y": spec.keys.y,
    }


def _subset(subset: Subset, fit: Fit) -> str | list[str] | dict[str, str]:
    """Return the subset for the file: as the user wrote it, the names of a predicate, or the label of an own class."""
    if type(subset) is Named:
        return subset.patterns
    if type(subset) is Where:
        return list(fit.layout.names)
    return subset.label if type(subset) in (All, LastLayer, Subnetwork) else {_YOURS: subset.label}


def _structure(options: dict[str, Any], given: Structure | None, path: Any) -> Structure | str:
    """Return the structure of a file, or the given one, which must be the one that was saved."""
    told = options["hessian_structure"]
    if given is None:
        if isinstance(told, Mapping):
            raise _missing(path, "structure", told[_YOURS], "hessian_structure=")
        return _with_own_options(told, options)
    if not isinstance(given, Structure):
        raise OptionError(f"hessian_structure={shown(given)} must be the structure itself, as in MyStructure().")
    if not isinstance(told, Mapping):  # a structure of ours: its name and options are in the file
        told = _with_own_options(told, options)
        kinds = {key: options[key] for key in STRUCTURE_OPTIONS if key in options}
        made = structure_named(told, {**STRUCTURE_OPTIONS, **kinds})
        if type(given) is type(made) and given.described == made.described:
            return told
        told = {_YOURS: made.described}
    if given.described != told[_YOURS]:
        raise CheckpointError(
            f"{str(path)!r} has the structure {told[_YOURS]!r}; hessian_structure= is {given.described!r}. Pass the "
            "structure that it was fitted with."
        )
    return given


def _with_own_options(name: str, options: dict[str, Any]) -> Structure | str:
    """Return a structure some of whose options are no keywords of `Laplace`. They are taken out of `options`."""
    made = STRUCTURES.get(name)
    if made is None:
        return name
    own = [key for key in made.options if key not in STRUCTURE_OPTIONS]
    usual = inspect.signature(made).parameters
    if all(options.get(key, usual[key].default) == usual[key].default for key in own):  # older files lack new options
        for key in own:
            options.pop(key, None)
        return name
    return made(**{key: options.pop(key) for key in made.options if key in options})


def _subset_of(options: dict[str, Any], given: Subset | None, path: Any) -> Any:
    """Return the subset of a file, or the given one, which must be the one that was saved."""
    told = options["subset_of_weights"]
    if given is None:
        if isinstance(told, Mapping):
            raise _missing(path, "subset of weights", told[_YOURS], "subset_of_weights=")
        return told
    if not isinstance(given, Subset):
        raise OptionError(f"subset_of_weights={shown(given)} must be the subset itself, as in MySubset().")
    if not isinstance(told, Mapping):
        raise CheckpointError(
            f"{str(path)!r} already says which weights are uncertain: {told!r}. Leave out subset_of_weights=."
        )
    if given.label != told[_YOURS]:
        raise CheckpointError(
            f"{str(path)!r} has the subset of weights {told[_YOURS]!r}; subset_of_weights= is {given.label!r}. Pass "
            "the subset that it was fitted with."
        )
    return given


def _curvature_of(options: dict[str, Any], given: Estimator | None, path: Any) -> Estimator | str:
    """Return the curvature of a file, or the given one, which must be the one that was saved."""
    told, samples = options["curvature"], options["curvature_samples"]
    if given is None:
        if told not in CURVATURES:
            raise _missing(path, "curvature", told, "curvature=")
        return told
    if not isinstance(given, Estimator):
        raise OptionError(f"curvature={shown(given)} must be the estimator itself, as in MyEstimator().")
    if (given.name, given.vectors) != (told, samples):
        there, here = (f"{name!r} of {n} vectors" for name, n in ((told, samples), (given.name, given.vectors)))
        raise CheckpointError(
            f"{str(path)!r} has the curvature {there}; curvature= is {here}. Pass the curvature that it was fitted "
            "with."
        )
    return given


def _missing(path: Any, what: str, name: str, argument: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} needs your own {what}, {name!r}, because files hold no code. Write "
        f"Laplace.load(..., {argument}) with the same object."
    )


def _require_same_weights(runner: Runner, state: Mapping[str, Any], path: Any) -> None:
    """Refuse a subset of the user that chooses other parameters than those in the file."""
    weights = runner.spec.weights
    if not isinstance(weights, Choice) or type(weights) in (Named, Where, All, Subnetwork):
        return
    names = list(weights.select(runner.model).layout.names)
    if names != list(state["names"]):
        raise CheckpointError(
            f"{str(path)!r} has the parameters {', '.join(state['names'])}; subset_of_weights={weights.label!r} "
            f"chooses {', '.join(names)} of this network."
        )


def _renamed_options(
    options: dict[str, Any], state: Mapping[str, Any], renamed: bool, rename: Rename
) -> dict[str, Any]:
    if renamed and isinstance(options["subset_of_weights"], list):  # globs may not match the new names
        options["subset_of_weights"] = list(state["names"])
    if options.get("last_layer_name") is not None:
        options["last_layer_name"] = rename(options["last_layer_name"])
    return options


def _require_network(then: Mapping[str, Mapping[str, Any]], model: nn.Module, path: Any) -> None:
    if differ := digests.differing(then, digests.of_network(model)):
        raise CheckpointError(
            f"{str(path)!r} is the posterior of another network: {differ}. Load the weights that it was fitted at. If "
            "only names have changed, write names={'old': 'new'} with names of parameters or modules."
        )


def _likelihood(told: Mapping[str, Any], given: Likelihood | str | None, path: Any) -> Likelihood:
    if given is None:
        if told["ours"]:
            return _made(told.get("kind", told["name"]), told.get("options", {}), path)
        raise _missing(path, "likelihood", told["name"], "likelihood=")
    made = likelihood_named(given)
    name = made.described
    if name != told["name"] and (told["ours"] or not made.answers_to(told["name"])):
        raise CheckpointError(
            f"{str(path)!r} has the likelihood {told['name']!r}; likelihood= is {name!r}. Pass the likelihood that it "
            "was fitted with."
        )
    if not told["ours"] and type(made) is LIKELIHOODS.get(made.name):
        raise CheckpointError(
            f"{str(path)!r} has a likelihood of your own class, {told['name']!r}, and likelihood={shown(given)} is one "
            "of ours. Pass an object of your class."
        )
    return made


def _own_prior(state: Mapping[str, Any], given: Prior, path: Any) -> Prior:
    """Return the given prior if the file has one of that name, whose code files do not hold."""
    if not isinstance(given, Prior):
        raise OptionError(f"prior={shown(given)} must be the prior itself, as in MyPrior(scale=1.0).")
    told = state.get(PRIOR, {})
    own = told.get("kind") == kind_of(given) and kind_of(given) not in PRIORS
    if not own or (isinstance(given, Custom) and told.get("called") != given.called):
        called = f"from_log_density({told['called']})" if "called" in told else f"{told.get('kind')!r}"
        there = "with all of its values" if told.get("kind", "gaussian") in {*PRIORS, "gaussian"} else called
        raise CheckpointError(
            f"{str(path)!r} has its prior {there}, but prior= is {given!r}. prior= is only for priors whose code is "
            "yours: from_log_density, or a class of your own. Leave it out for others, and set la.prior afterwards to "
            "change it."
        )
    return given


def _made(kind: str, options: Mapping[str, Any], path: Any) -> Likelihood:
    """Return one of our likelihoods with the options in the file."""
    try:
        return LIKELIHOODS[kind](**options)
    except Exception as error:
        raise CheckpointError(f"{str(path)!r} is damaged: its likelihood {kind!r} cannot be made ({error}).") from error


def _inputs(runner: Runner, state: Mapping[str, Any], data: Iterable[Any] | None, path: Any) -> list[Any]:
    """Return the inputs of the kept points, looked up in the data."""
    sizes = [len(vectors) for vectors in state[VECTORS]]
    if data is None:
        raise CheckpointError(
            f"{str(path)!r} is a 'gp' that needs {sum(sizes)} inputs of the training data, and does not hold them. "
            "Write Laplace.load(..., data=train_loader), with the batches in the same order as for the fit."
        )
    batches = runner.batches(data, False, "load")
    found = inputs_at(batches, state[NUMBERS].cpu().split(sizes))
    if found is None or digest_of(found) != state[_DIGEST]:
        raise CheckpointError(
            f"data= does not hold the {sum(sizes)} inputs that {str(path)!r} was fitted on, in the same places. Give "
            "the same data in the same order (shuffle=False), or save with la.save(path, with_data=True)."
        )
    return [part.inputs.x for part in found]
