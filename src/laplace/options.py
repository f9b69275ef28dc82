"""What users call things: option names, laplace-torch's included, turned into the parts that they stand for."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final

import torch

from laplace.curvature import CURVATURES
from laplace.errors import OptionError, UnsupportedError, choice, shown
from laplace.structures import STRUCTURES, Structure

_DEFAULTS: Final[dict[str, Any]] = {"damping": False, "weight_sharing": "expand"}  # structures' options: not given
_TO_COME: Final = {
    "subnetwork_indices": "subset_of_weights='subnetwork'",
    "n_subset": "hessian_structure='gp'",
    "independent_outputs": "hessian_structure='gp'",
    "seed": "hessian_structure='gp'",
    "functional_approximation": "hessian_structure='gp'",
}
_BACKENDS: Final = {"GGN": "ggn", "EF": "ef", "Hessian": "hessian"}


def structure_named(name: str, options: Mapping[str, Any], curvature: str, subset: str) -> Structure:
    """The structure of that name with its own options; those of other structures must be left alone."""
    name = choice(name, STRUCTURES, "hessian_structure", to_come=("lowrank", "gp"))
    choice(options["weight_sharing"], ["expand", "reduce"], "weight_sharing")
    made = STRUCTURES[name]
    for key, value in options.items():
        if key not in made.options and value != _DEFAULTS.get(key):
            owners = " or ".join(repr(other) for other, s in STRUCTURES.items() if key in s.options)
            raise OptionError(
                f"{key}={shown(value)} belongs to hessian_structure={owners}; {name!r} has no such option."
            )
    structure = made(**{key: options[key] for key in made.options})
    if curvature == "hessian" and subset != "last_layer":  # there it is the GGN
        if not made.exact_hessian:
            able = " or ".join(repr(other) for other, s in STRUCTURES.items() if s.exact_hessian)
            raise UnsupportedError(f"the exact Hessian has no form as {name!r}. Take hessian_structure={able}.")
        structure.semidefinite = False
    return structure


def curvature_named(name: str | None, backend: Any, backend_kwargs: Mapping[str, Any] | None) -> str:
    """The kind of curvature by name, or what a backend class of laplace-torch stands for."""
    if backend is not None:
        label = backend if isinstance(backend, str) else getattr(backend, "__name__", str(backend))
        meant = next((kind for end, kind in _BACKENDS.items() if label.endswith(end)), None)
        if meant == "ggn" and (backend_kwargs or {}).get("stochastic"):
            meant = "mc"
        if meant is None or (name is not None and str(name) != meant):
            kinds = ", ".join(map(repr, CURVATURES))
            raise OptionError(f"backend={label} does not say which curvature. Write curvature= one of {kinds}.")
        name = meant
    elif backend_kwargs:
        raise OptionError("backend_kwargs goes with backend; here curvature= and curvature_samples= say it.")
    return choice("ggn" if name is None else name, CURVATURES, "curvature")


def samples_of(kind: str, samples: object) -> int:
    """How many vectors an estimated curvature takes per example."""
    number = whole_number(samples, "curvature_samples")
    if number != 1 and kind not in ("mc", "sketch"):
        raise OptionError(f"curvature_samples={number} is for curvature='mc' and 'sketch'; {kind!r} draws nothing.")
    return number


def subset_named(name: str) -> str:
    """Which weights are uncertain."""
    return choice(name, ["last_layer", "all"], "subset_of_weights", to_come=("subnetwork",))


def pred_type_named(name: str) -> str:
    """'glm', the linearised network, or 'nn', the network itself."""
    if str(getattr(name, "value", name)) == "gp":
        raise UnsupportedError(
            "pred_type='gp' is for a posterior over functions; this one is over weights: 'glm' or 'nn'."
        )
    return choice(name, ["glm", "nn"], "pred_type")


def method_named(name: str) -> str:
    """'marglik' or 'gridsearch'; the paper's 'CV' is the latter."""
    return choice("gridsearch" if name == "CV" else name, ["marglik", "gridsearch"], "method")


def whole_number(value: object, what: str, least: int = 1) -> int:
    """A whole number that is large enough."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise OptionError(f"{what}={shown(value)} must be a whole number of at least {least}.")
    return number


def generator_or_none(generator: Any) -> torch.Generator | None:
    """The generator, or None for torch's own."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(f"generator is a {type(generator).__name__}; write torch.Generator().manual_seed(0).")
    return generator


def refuse_others(options: Mapping[str, Any]) -> None:
    """Keywords of laplace-torch that belong to what is still to come, and keywords that nobody knows."""
    for name in options:
        if name in _TO_COME:
            raise UnsupportedError(f"{name}= belongs to {_TO_COME[name]}, which is not built yet.")
        raise OptionError(f"Laplace has no option {name!r}. See help(Laplace).")
