"""Write and read the parts of a `Laplace` in files: their names and options, or that their code is the user's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from laplace.checkpoints.state import PRIOR, kind_of
from laplace.checks import options_of, shown
from laplace.curvature import CURVATURES, Estimator
from laplace.errors import CheckpointError, OptionError
from laplace.inference.source import Fitted
from laplace.likelihoods import LIKELIHOODS, Likelihood, likelihood_named
from laplace.posterior.posterior import Fit
from laplace.priors import PRIORS, Prior
from laplace.priors.custom import Custom
from laplace.spec import STRUCTURE_OPTIONS, structure_named
from laplace.structures import STRUCTURES, Structure
from laplace.structures.functional import FUNCTIONAL
from laplace.weights import All, LastLayer, Named, Subnetwork, Subset, Where

_YOURS = "yours"  # marks a part that the user's code makes, with its description


def words_of(la: Fitted) -> dict[str, Any]:
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


def likelihood_of(told: Mapping[str, Any], given: Likelihood | str | None, path: Any) -> Likelihood:
    """Return the likelihood of a file, or the given one, which must be the one that was saved."""
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


def _made(kind: str, options: Mapping[str, Any], path: Any) -> Likelihood:
    """Return one of our likelihoods with the options in the file."""
    try:
        return LIKELIHOODS[kind](**options)
    except Exception as error:
        raise CheckpointError(f"{str(path)!r} is damaged: its likelihood {kind!r} cannot be made ({error}).") from error


def structure_of(options: dict[str, Any], given: Structure | None, path: Any) -> Structure | str:
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


def subset_of(options: dict[str, Any], given: Subset | None, path: Any) -> Any:
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


def curvature_of(options: dict[str, Any], given: Estimator | None, path: Any) -> Estimator | str:
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


def own_prior(state: Mapping[str, Any], given: Prior, path: Any) -> Prior:
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


def _missing(path: Any, what: str, name: str, argument: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} needs your own {what}, {name!r}, because files hold no code. Write "
        f"Laplace.load(..., {argument}) with the same object."
    )
