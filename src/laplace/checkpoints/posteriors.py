"""Save and load a posterior: the options of its `Laplace`, digests of its network, and its state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from torch import nn

from laplace.checkpoints import container
from laplace.checkpoints.names import Rename, renamed_state, renaming
from laplace.checkpoints.parts import curvature_of, likelihood_of, own_prior, structure_of, subset_of, words_of
from laplace.checkpoints.points import digest_of, inputs_at
from laplace.checkpoints.state import (
    INPUTS,
    NUMBERS,
    OWNERS,
    VECTORS,
    Kept,
    state_dict,
    state_without_inputs,
)
from laplace.checks import flag, path_of, shown
from laplace.curvature import Estimator
from laplace.distributed import OWN, Group, Reduce, alone, reduce_over
from laplace.distributed.groups import Unsaid, global_rank
from laplace.distributed.together import joined, jointly
from laplace.errors import CheckpointError, LaplaceError, OptionError, UnsupportedError
from laplace.inference.runner import Runner
from laplace.inference.settings import require_same_settings
from laplace.keywords import refuse_unknown_keywords
from laplace.likelihoods import Likelihood
from laplace.network import digests
from laplace.network.batches import device_of
from laplace.network.pytree import map_tensors
from laplace.network.wrappers import unwrapped
from laplace.priors import Prior
from laplace.structures import Structure
from laplace.weights import All, Choice, Named, Subnetwork, Subset, Where

KIND = "posterior"
_DIGEST = "points/digest"


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
    contents = {"options": words_of(la), "network": digests.of_network(la.runner.model), "state": state}
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
        own = likelihood_of(options.pop("likelihood"), likelihood, path)
        noise = {"sigma_noise": state["sigma_noise"]} if state["sigma_noise"].numel() > 1 and likelihood is None else {}
        given = {} if prior is None else {"prior": own_prior(state, prior, path)}
        options["hessian_structure"] = structure_of(options, hessian_structure, path)
        options["subset_of_weights"] = subset_of(options, subset_of_weights, path)
        options["curvature"] = curvature_of(options, curvature, path)
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
