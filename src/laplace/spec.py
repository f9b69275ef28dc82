"""Turn the user's strings and objects into parts, once. Nothing inside the library sees a string.

    Laplace(model, "classification", "last_layer", "kron", damping="balanced")
    Laplace(model, Categorical(), LastLayer(), Kron(damping="balanced"))

Both calls mean the same. laplace-torch's names are accepted, too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from torch import Tensor, nn

from laplace.budget import Budget
from laplace.checks import choice, shown, unchanged, whole_number
from laplace.curvature import CURVATURES, GGN, Drawn, Estimator
from laplace.errors import OptionError, UnsupportedError
from laplace.likelihoods import Likelihood, likelihood_named
from laplace.network.inputs import Keys
from laplace.predictive.positions import class_dim_of
from laplace.priors.gaussian import Prior
from laplace.structures import STRUCTURES, Structure
from laplace.structures.functional import FUNCTIONAL
from laplace.structures.kron import SHARINGS
from laplace.weights import Choice, Layout, Subset, subset_named

STRUCTURE_OPTIONS: Final[dict[str, Any]] = {  # the defaults
    "damping": False,
    "weight_sharing": "expand",
    "rank": None,
    "tol": None,
    "n_subset": None,
    "seed": 0,
    "independent_outputs": False,
    "functional_approximation": "sod",
    "inducing": "random",
    "inducing_steps": 0,
}
_BACKENDS: Final = {"GGN": "ggn", "EF": "ef", "Hessian": "hessian"}


class TrainingOptions(TypedDict, total=False):
    """Lists further keywords of `Laplace` that `marglik_training` passes on. `Laplace` describes them."""

    curvature_samples: int
    prior_mean: float | Tensor | None
    softmax_temperature: float
    last_layer_name: str | None
    feature_reduction: str | None
    subnetwork_indices: Tensor | None
    damping: bool | str
    weight_sharing: str
    rank: int | float | None
    tol: float | None
    n_subset: int | None
    seed: int
    independent_outputs: bool
    functional_approximation: str
    inducing: Any
    inducing_steps: int
    memory_budget: int | None
    class_dim: int | None
    backend_kwargs: Mapping[str, Any] | None


class PlanOptions(TrainingOptions, total=False):
    """Lists further keywords of `Laplace` that `laplace.plan` accepts, so that both take the same ones."""

    sigma_noise: float | Tensor
    prior_precision: float | Tensor | None
    prior: Prior | None
    temperature: float
    enable_backprop: bool
    dict_key_x: str
    dict_key_y: str
    backend: Any


@dataclass(frozen=True)
class Spec:
    """Holds the parts of a Laplace approximation.

    Attributes:
        likelihood: p(y given f).
        weights: chooses the uncertain weights.
        structure: the form in which the curvature is kept.
        curvature: the curvature estimator. None leaves the choice to `fit`.
        keys: the keys of inputs and labels in batches that are mappings.
        class_dim: the dimension of the outputs that has the classes.
        budget: the memory that may be taken.
    """

    likelihood: Likelihood
    weights: Subset
    structure: Structure
    curvature: Estimator | None
    keys: Keys
    class_dim: int | None
    budget: Budget

    @classmethod
    def of(
        cls,
        model: nn.Module,
        likelihood: Likelihood | str,
        subset_of_weights: Any,
        hessian_structure: Structure | str,
        *,
        curvature: Estimator | str | None,
        curvature_samples: int,
        last_layer_name: str | None,
        feature_reduction: str | None,
        subnetwork_indices: Any,
        structure_options: Mapping[str, Any],
        dict_key_x: str,
        dict_key_y: str,
        class_dim: int | None,
        memory_budget: int | None,
        backend: Any,
        backend_kwargs: Mapping[str, Any] | None,
    ) -> Spec:
        """Make the parts from the user's options. Refuse unknown options and wrong combinations."""
        own = likelihood_named(likelihood)
        weights = subset_named(subset_of_weights, subnetwork_indices, last_layer_name, feature_reduction, model)
        estimator = estimator_named(curvature, curvature_samples, backend, backend_kwargs)
        dimension = class_dim_of(class_dim)
        exact = estimator is not None and estimator.exact_hessian
        structure = structure_named(hessian_structure, structure_options, exact and weights.label != "last_layer")
        if exact and weights.label == "last_layer" and not own.hessian_is_fisher:
            raise UnsupportedError(
                f"the exact Hessian of a last layer with {own.name!r} depends on the labels and may be "
                "indefinite. Take curvature='ggn', or subset_of_weights=[name of the last layer], which supports it."
            )
        if isinstance(weights, Choice):
            require_served(structure, weights.selected(model).layout)
        structure.budget = Budget(memory_budget)
        keys = Keys(dict_key_x, dict_key_y, own.further, own.pairs)
        return cls(own, weights, structure, estimator, keys, dimension, structure.budget)

    @property
    def estimator(self) -> Estimator:
        """Return the curvature that the user chose, by default the exact GGN."""
        return GGN() if self.curvature is None else self.curvature

    def described(self, curvature: str) -> dict[str, Any]:
        """Return the options that two posteriors must share to be merged, given the curvature that was used."""
        return {
            "likelihood": self.likelihood.described,
            "structure": self.structure.described,
            "curvature": curvature,
            "subset_of_weights": self.weights.label,
            "class_dim": self.class_dim,
        }


def structure_named(value: Structure | str, options: Mapping[str, Any], exact_hessian: bool = False) -> Structure:
    """Return the structure itself, or the one of that name with its own options.

    Args:
        value: a structure, or its name.
        options: values for `STRUCTURE_OPTIONS`. Options of other structures must have their defaults.
        exact_hessian: whether the structure has to hold an exact Hessian, which may be indefinite.

    Raises:
        OptionError: the name is unknown, or an option belongs to another structure.
        UnsupportedError: the structure cannot hold an exact Hessian.
    """
    structure = copy.copy(value) if isinstance(value, Structure) else _made(value, options)
    if isinstance(value, Structure):
        _require_said_by(value, options)
    if exact_hessian:
        if not structure.exact_hessian:
            able = " or ".join(repr(other) for other, s in STRUCTURES.items() if s.exact_hessian)
            raise UnsupportedError(f"{structure.name!r} cannot hold an exact Hessian. Take hessian_structure={able}.")
        structure.semidefinite = False
    return structure


def _require_said_by(structure: Structure, options: Mapping[str, Any]) -> None:
    """Refuse keywords that contradict the object given as `hessian_structure`."""
    kind, own = type(structure).__name__, structure.options
    for key, given in options.items():
        if unchanged(given, STRUCTURE_OPTIONS[key]) or (key in own and given == getattr(structure, key)):
            continue
        write = f"Write hessian_structure={kind}({key}={shown(given)})."
        if key not in own:
            write = f"{kind} has no such option; " + (f"it has: {', '.join(own)}." if own else "it has none.")
        raise OptionError(f"{key}={shown(given)} contradicts the object hessian_structure={shown(structure)}. {write}")


def _made(value: Any, options: Mapping[str, Any]) -> Structure:
    if isinstance(value, type) and issubclass(value, Structure):
        raise OptionError(f"hessian_structure={value.__name__} is a class; give an object: {value.__name__}().")
    name = choice(value, [*STRUCTURES, "gp"], "hessian_structure")
    choice(options["weight_sharing"], SHARINGS, "weight_sharing")
    approximation = options["functional_approximation"]
    made = _functional_named(approximation) if name == "gp" else STRUCTURES[name]
    if name != "gp" and not unchanged(approximation, "sod"):
        raise OptionError(f"functional_approximation={shown(approximation)} belongs to hessian_structure='gp'.")
    for key, given in options.items():
        if key == "functional_approximation" or key in made.options or unchanged(given, STRUCTURE_OPTIONS[key]):
            continue
        owners = [repr(other) for other, s in STRUCTURES.items() if key in s.options]
        functional = [_of_gp(kind) for kind, s in FUNCTIONAL.items() if key in s.options]
        owners += ["'gp'"] if len(functional) == len(FUNCTIONAL) else functional
        this = next((_of_gp(kind) for kind, s in FUNCTIONAL.items() if s is made), repr(made.name))
        raise OptionError(
            f"{key}={shown(given)} belongs to hessian_structure={' or '.join(owners)}; {this} has no such option."
        )
    return made(**{key: options[key] for key in made.options if key in options})


def _of_gp(approximation: str) -> str:
    return f"'gp' with functional_approximation={approximation!r}"


def _functional_named(approximation: Any) -> type[Structure]:
    """Return the structure for an approximation of a posterior over functions."""
    return FUNCTIONAL[choice(approximation, FUNCTIONAL, "functional_approximation")]


def require_served(structure: Structure, layout: Layout) -> None:
    """Refuse a structure that needs whole tensors if only some weights of a tensor are uncertain."""
    if structure.scattered or not layout.scattered:
        return
    parts = [name for name, part in zip(layout.names, layout.parts, strict=True) if part is not None]
    count = "1 tensor" if len(parts) == 1 else f"{len(parts)} tensors"
    able = ", ".join(repr(other) for other, s in STRUCTURES.items() if s.scattered)
    ours = type(structure).__module__.startswith("laplace.")
    own = "" if ours else f" If {structure.name} can keep blocks of shape (k,), say so: scattered = True."
    raise UnsupportedError(
        f"hessian_structure={structure.name!r} needs whole tensors, and subnetwork_indices choose only some weights of "
        f"{count} ({', '.join(parts[:3])}{', ...' if len(parts) > 3 else ''}). Take hessian_structure= "
        f"one of {able}, or all weights of each tensor.{own}"
    )


def estimator_named(
    curvature: Estimator | str | None, samples: int, backend: Any, backend_kwargs: Mapping[str, Any] | None
) -> Estimator | None:
    """Return the estimator for a name or for a backend class of laplace-torch, or None if neither is given.

    Raises:
        OptionError: the name is unknown, or the number of samples belongs to another curvature.
    """
    if isinstance(curvature, type) and issubclass(curvature, Estimator):
        raise OptionError(f"curvature={curvature.__name__} is a class; give an object: {curvature.__name__}().")
    number = whole_number(samples, "curvature_samples")
    if isinstance(curvature, Estimator):
        if number not in (1, curvature.vectors) or name_of_backend(backend) is not None:
            raise OptionError(
                f"curvature={curvature!r} is complete: leave out curvature_samples= and backend=, or write "
                "Sketch(samples=...)."
            )
        return curvature
    name = _of_backend(curvature, name_of_backend(backend), backend_kwargs)
    if name is None:
        if number != 1:
            raise OptionError(f"curvature_samples={number} is for curvature='mc' and 'sketch'; 'ggn' draws nothing.")
        return None
    made = CURVATURES[choice(name, CURVATURES, "curvature")]
    if issubclass(made, Drawn):
        return made(number)
    if number != 1:
        raise OptionError(
            f"curvature_samples={number} is for curvature='mc' and 'sketch'; {made.name!r} draws nothing."
        )
    return made()


def name_of_backend(backend: Any) -> str | None:
    """Return the name of a backend that is given by name, as a class, or as an object of that class.

    An object that was read from a posterior (`la.backend`) knows in `_asked_for` which one was asked for there, if any.
    """
    if backend is None or isinstance(backend, str):
        return backend
    if hasattr(backend, "_asked_for"):
        return backend._asked_for
    return getattr(backend, "__name__", type(backend).__name__)


def _of_backend(name: Any, backend: str | None, backend_kwargs: Mapping[str, Any] | None) -> Any:
    """Return the curvature for the name of a backend class of laplace-torch, or `name` if no backend is given."""
    if backend is None:
        if backend_kwargs is not None and (not isinstance(backend_kwargs, Mapping) or backend_kwargs):
            raise OptionError("backend_kwargs= goes with backend=. Write curvature= and curvature_samples= instead.")
        return name
    meant = next((kind for part, kind in _BACKENDS.items() if part in backend), None)
    if meant == "ggn" and isinstance(backend_kwargs, Mapping) and backend_kwargs.get("stochastic"):
        meant = "mc"
    if meant is None or (name is not None and str(name) != meant):
        kinds = ", ".join(map(repr, CURVATURES))
        raise OptionError(f"backend={backend} does not say which curvature. Write curvature= one of {kinds}.")
    return meant
