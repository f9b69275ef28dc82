"""What users call things: option names, laplace-torch's included, turned into the parts that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from laplace.checks import choice, shown, unchanged, whole_number
from laplace.curvature import CURVATURES
from laplace.errors import OptionError, UnsupportedError
from laplace.functional import FUNCTIONAL
from laplace.structures import STRUCTURES, Structure
from laplace.weights.layout import Layout

MOST_VECTORS: Final = 256  # up to which the GGN of outputs at positions is exact unasked
_DEFAULTS: Final[dict[str, Any]] = {  # structures' options: not given
    "damping": False,
    "weight_sharing": "expand",
    "rank": None,
    "tol": None,
    "n_subset": None,
    "seed": 0,
    "independent_outputs": False,
}
_BACKENDS: Final = {"GGN": "ggn", "EF": "ef", "Hessian": "hessian"}


def structure_named(
    name: str, approximation: str, options: Mapping[str, Any], curvature: str, subset: str
) -> Structure:
    """The structure of that name with its own options; those of other structures must be left alone."""
    name = choice(name, [*STRUCTURES, "gp"], "hessian_structure")
    choice(options["weight_sharing"], ["expand", "reduce"], "weight_sharing")
    made = _functional_named(approximation) if name == "gp" else STRUCTURES[name]
    if name != "gp" and not unchanged(approximation, "sod"):
        raise OptionError(f"functional_approximation={shown(approximation)} belongs to hessian_structure='gp'.")
    for key, value in options.items():
        if key not in made.options and not unchanged(value, _DEFAULTS.get(key)):
            owners = [repr(other) for other, s in STRUCTURES.items() if key in s.options]
            owners += [_of_gp(kind) for kind, s in FUNCTIONAL.items() if key in s.options]
            this = next((_of_gp(kind) for kind, s in FUNCTIONAL.items() if s is made), repr(made.name))
            raise OptionError(
                f"{key}={shown(value)} belongs to hessian_structure={' or '.join(owners)}; {this} has no such option."
            )
    structure = made(**{key: options[key] for key in made.options})
    if curvature == "hessian" and subset != "last_layer":  # there it is the GGN
        if not made.exact_hessian:
            able = " or ".join(repr(other) for other, s in STRUCTURES.items() if s.exact_hessian)
            raise UnsupportedError(f"the exact Hessian has no form as {name!r}. Take hessian_structure={able}.")
        structure.semidefinite = False
    return structure


def _of_gp(approximation: str) -> str:
    return f"'gp' with functional_approximation={approximation!r}"


def require_served(structure: Structure, layout: Layout) -> None:
    """Refuse a structure that needs whole tensors for weights that are scattered over some."""
    if structure.scattered or not layout.scattered:
        return
    parts = [name for name, part in zip(layout.names, layout.parts, strict=True) if part is not None]
    able = ", ".join(repr(other) for other, s in STRUCTURES.items() if s.scattered)
    raise UnsupportedError(
        f"hessian_structure={structure.name!r} needs whole tensors, and subnetwork_indices take only some weights of "
        f"{len(parts)} of them ({', '.join(parts[:3])}{', ...' if len(parts) > 3 else ''}). Take hessian_structure= "
        f"one of {able}, or all weights of each tensor."
    )


def _functional_named(approximation: str) -> type[Structure]:
    """How a posterior over functions is approximated."""
    if str(getattr(approximation, "value", approximation)) == "variational":
        raise UnsupportedError(
            "functional_approximation='variational' trains inducing points; these approximations are read off a "
            "trained network. Take 'sod' (a subset of the data) or 'nystrom' (all data in a few directions)."
        )
    return FUNCTIONAL[choice(approximation, FUNCTIONAL, "functional_approximation")]


def curvature_named(name: str | None, backend: Any, backend_kwargs: Mapping[str, Any] | None) -> str:
    """The kind of curvature by name, or what a backend class of laplace-torch stands for."""
    if backend is not None:
        label = backend if isinstance(backend, str) else getattr(backend, "__name__", str(backend))
        meant = next((kind for end, kind in _BACKENDS.items() if label.endswith(end)), None)
        if meant == "ggn" and isinstance(backend_kwargs, Mapping) and backend_kwargs.get("stochastic"):
            meant = "mc"
        if meant is None or (name is not None and str(name) != meant):
            kinds = ", ".join(map(repr, CURVATURES))
            raise OptionError(f"backend={label} does not say which curvature. Write curvature= one of {kinds}.")
        name = meant
    elif backend_kwargs is not None and (not isinstance(backend_kwargs, Mapping) or backend_kwargs):
        raise OptionError("backend_kwargs goes with backend; here curvature= and curvature_samples= say it.")
    return choice("ggn" if name is None else name, CURVATURES, "curvature")


def samples_of(kind: str, samples: object) -> int:
    """How many vectors an estimated curvature takes per example."""
    number = whole_number(samples, "curvature_samples")
    if number != 1 and kind not in ("mc", "sketch"):
        raise OptionError(f"curvature_samples={number} is for curvature='mc' and 'sketch'; {kind!r} draws nothing.")
    return number


def pred_type_named(name: str, functional: bool) -> str:
    """'glm', the linearised network, or 'nn', the network itself; of a posterior over functions 'gp', too, is 'glm'."""
    word = str(getattr(name, "value", name))
    if word == "gp" and not functional:
        raise UnsupportedError(
            "pred_type='gp' is for a posterior over functions; this one is over weights: 'glm' or 'nn'."
        )
    if word == "nn" and functional:
        raise UnsupportedError(
            "pred_type='nn' draws weights; this is a posterior over functions: pred_type='glm' (or 'gp', the same), or "
            "hessian_structure='full', 'kron' or 'diag'."
        )
    return "glm" if word == "gp" else choice(name, ["glm", "nn"], "pred_type")


def method_named(name: str) -> str:
    """'marglik' or 'gridsearch'; the paper's 'CV' is the latter."""
    return choice("gridsearch" if name == "CV" else name, ["marglik", "gridsearch"], "method")


def refuse_others(options: Mapping[str, Any]) -> None:
    """Keywords that nobody knows."""
    for name in options:
        raise OptionError(f"Laplace has no option {name!r}. See help(Laplace).")
