"""Turn the user's strings and objects into parts, once. Nothing inside the library sees a string.

    Laplace(model, "classification", "last_layer", "kron", damping="balanced")
    Laplace(model, Categorical(), LastLayer(), Kron(damping="balanced"))

Both calls mean the same. laplace-torch's names are accepted, too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, ParamSpec, TypedDict, TypeVar

from torch import Tensor, nn

from laplace.budget import Budget
from laplace.checks import choice, did_you_mean, shown, unchanged, whole_number
from laplace.curvature import CURVATURES, GGN, Drawn, Estimator
from laplace.errors import ArgumentError, ModelError, OptionError, UnsupportedError
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
_NEAR: Final = 0.75  # how like one of our keywords a keyword of the network may be, if no forward names it
_ELSEWHERE: Final = {  # keywords that are looked for where they are not, and what to write
    "collate_fn": "DataLoader(dataset, batch_size=32, collate_fn=...), and give that",
    "outputs": (
        "Laplace(AnswerTokens(model, token_ids), ...), from laplace.integrations.huggingface, if the logits of some "
        "tokens alone are meant"
    ),
}
_BACKENDS: Final = {"GGN": "ggn", "EF": "ef", "Hessian": "hessian"}

P = ParamSpec("P")
R = TypeVar("R")


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


def refuse_unknown_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Turn a call with a wrong keyword, or without a needed argument, into an error that says what to write.

    Type checkers see the function's own signature, so that they find the typo, too. If it ends with
    `**options: Unpack[...]`, the keys of that TypedDict are allowed. If it ends with `**model_kwargs`, these go to the
    network, and are refused once the network does not take them.
    """
    return _checked(function, _Call(function))


def refuse_unknown_keywords_of(owner: str, instead: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return the same decorator for a function that users call by the name `owner`, not on a `Laplace`.

    Args:
        owner: The function as users write it.
        instead: What to write for some unknown keywords.
    """
    return lambda function: _checked(function, _Call(function, owner, instead))


def _checked(function: Callable[P, R], call: _Call) -> Callable[P, R]:
    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        strange = call.strange(kwargs) if kwargs else []
        if strange:
            call.refuse_near(strange, args)
        try:
            return function(*args, **kwargs)
        except (ModelError, TypeError) as error:
            if isinstance(error, TypeError):
                call.check(args, kwargs)
            for name in strange:
                if f"unexpected keyword argument {name!r}" in str(error):
                    raise call.refused(name, ", and the network takes no such keyword") from error
            raise

    return checked


def checked_before(function: Callable[..., None], owner: str = "") -> Callable[..., Any]:
    """Return a `__new__` that refuses the same for `__init__`, which stays the function that was written.

    So libraries that read the names of its arguments find them. Copies and pickles, which call it without arguments,
    are made without a check. `owner` is the class in messages, where that of the function is a base class.
    """
    call = _Call(function)
    call.owner = owner or call.owner

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        if (args or kwargs) and cls.__init__ is function:
            call.check((cls, *args), kwargs)
        return object.__new__(cls)

    vars(__new__)["__signature__"] = inspect.signature(function)
    return __new__


class _Call:
    """Knows the arguments of a function, and words the error about wrong ones."""

    def __init__(
        self, function: Callable[..., Any], owner: str | None = None, instead: Mapping[str, str] | None = None
    ) -> None:
        self.instead = _ELSEWHERE | dict(instead or {})
        self.signature = inspect.signature(function)
        parameters = list(self.signature.parameters.values())
        self.known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        further = [str(p.annotation) for p in parameters if p.kind is p.VAR_KEYWORD]
        self.passed_on = "Any" in further
        self.known |= {key for annotation in further if annotation != "Any" for key in _unpacked(annotation)}
        needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        self.needed = [name for name in needed if name not in ("self", "cls")]
        self.owner = function.__qualname__.removesuffix(".__init__")
        if owner is not None:
            self.owner, self.needed = owner, [p.name for p in parameters if p.default is p.empty]
        elif parameters[0].kind is inspect.Parameter.POSITIONAL_ONLY:  # a function that is bound to the class
            self.owner = f"Laplace.{self.owner}" if self.owner != "call" else "Laplace.__call__"

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a call with wrong arguments."""
        self.strange(kwargs)
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            write = f"Write {self.owner}({', '.join(self.needed)}); see help({self.owner})."
            if "too many positional" in str(error) and self.needed[:1] == ["val_loader"]:
                write = f"For inputs and labels write la.{self.owner.rpartition('.')[2]}((x, y)). {write}"
            raise ArgumentError(f"{self.owner}: {error}. {write}") from None

    def strange(self, kwargs: Mapping[str, Any]) -> list[str]:
        """Return the keywords that go to the network. Refuse others that are not known."""
        strange = [name for name in kwargs if name not in self.known]
        if strange and not self.passed_on:
            raise self.refused(strange[0])
        return strange

    def refuse_near(self, strange: Sequence[str], args: tuple[Any, ...]) -> None:
        """Refuse keywords that look like ours, if a network would swallow them in the `**kwargs` of its forward."""
        network = getattr(args[0], "model", None) if args else None
        near = [name for name in strange if did_you_mean(name, sorted(self.known), _NEAR)]
        if not near or not isinstance(network, nn.Module) or not _swallows(network):
            return
        named = set[str]().union(*(_arguments(module) for module in network.modules()))
        for name in near:
            if name not in named:
                inside = f" (If the network takes it, give it in the mapping: la({{**batch, {name!r}: ...}}).)"
                error = self.refused(name, ", and no forward of the network names such a keyword")
                raise ArgumentError(f"{error}{inside}")

    def refused(self, name: str, where: str = "") -> ArgumentError:
        """Return the error about an unknown keyword."""
        near = did_you_mean(name, sorted(self.known - {"self"})) or f" See help({self.owner})."
        hint = f" Write {self.instead[name]}." if name in self.instead else near
        return ArgumentError(f"{self.owner} has no option {name!r}{where}.{hint}")


def _arguments(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a forward that is no function of Python
        return {}


def _swallows(network: nn.Module) -> bool:
    """Return whether a network's forward takes any keyword."""
    return any(p.kind is p.VAR_KEYWORD for p in _arguments(network).values())


def _unpacked(annotation: str) -> Iterable[str]:
    """Return the keys of the TypedDict in `Unpack[...]`."""
    kinds = {made.__name__: made for made in (TrainingOptions, PlanOptions)}
    return kinds[annotation.removeprefix("Unpack[").removesuffix("]")].__annotations__
