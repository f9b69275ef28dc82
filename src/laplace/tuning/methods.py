"""Ways of tuning: each is a class with its own options, and gets a `Problem` to solve.

`la.tune(method=...)` takes one of the names here, or an object of a class of your own:

    class Halving(Method):
        def tune(self, problem):
            for x in problem.start + torch.linspace(3, -3, 9)[:, None]:
                problem.losses([x])
            return problem.tuned("halving")

    la.tune(method=Halving(), val_loader=val_loader)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import torch

from laplace.checks import LARGEST, choice, shown, unchanged, whole_number
from laplace.errors import OptionError
from laplace.priors.gaussian import GaussianPrior
from laplace.tuning.auto import auto
from laplace.tuning.bayesian import bayesian_search
from laplace.tuning.evidence import maximise_evidence
from laplace.tuning.problem import SCORING, Problem
from laplace.tuning.result import Tuned
from laplace.tuning.space import Space, groups_of


class Method(ABC):
    """Tunes hyperparameters. Its options are its constructor's arguments.

    Attributes:
        options: the keywords of `la.tune` that are passed to the constructor when the method is chosen by name.
        scored: whether it scores validation data, and so accepts val_loader=, loss=, bounds= and the like.
        scoring: which of these keywords it accepts if it scores other data.
        prior_structure: the prior structure that is tuned by default.
    """

    options: ClassVar[tuple[str, ...]] = ()
    scored: ClassVar[bool] = True
    scoring: ClassVar[tuple[str, ...]] = ()
    prior_structure: ClassVar[str] = "scalar"

    @abstractmethod
    def tune(self, problem: Problem) -> Tuned:
        """Return the result; `la.tune` sets it. Runs without gradients."""


class Given(Method):
    """Wraps a function of the problem as a method."""

    def __init__(self, function: Callable[[Problem], Tuned]) -> None:
        self.function = function

    def tune(self, problem: Problem) -> Tuned:
        return self.function(problem)


class ByEvidence(Method):
    """Maximises the log evidence by damped Newton. A prior precision that is not tuned stays fixed."""

    options = ("n_steps",)
    scored = False
    scoring = ("train_loader",)

    def __init__(self, n_steps: int = 100, start: float = 1.0, verbose: bool = False) -> None:
        self.n_steps, self.start, self.verbose = n_steps, start, verbose

    def tune(self, problem: Problem) -> Tuned:
        posterior, kinds = problem.la.posterior.detached(), problem.kinds
        steps = whole_number(self.n_steps, "n_steps")
        if not isinstance(posterior.prior, GaussianPrior):  # whose hyperparameters have names of their own
            return maximise_evidence(problem.space, problem.start, steps, verbose=self.verbose)
        moves = "prior_precision" in kinds
        groups = problem.groups if moves else groups_of(posterior)
        space = Space(posterior, groups, "sigma_noise" in kinds, "temperature" in kinds)
        x = space.start(self.start)
        held = torch.zeros_like(x, dtype=torch.bool)
        if not moves:
            held[: len(space.sizes)] = True
            x[held] = posterior.prior.precision.to(x).log()
        return maximise_evidence(space, x, steps, held, self.verbose)


class ByValidation(Method):
    """Minimises the score on validation data: a grid over all hyperparameters, then descents from its best basins."""

    options = ("grid_size",)

    def __init__(self, grid_size: int = 21) -> None:
        self.grid_size = grid_size

    def tune(self, problem: Problem) -> Tuned:
        search = problem.search(self.grid_size)
        search.descend()
        return search.found("validation")


class ByLeaveOneOut(Method):
    """Searches like 'validation', but scores leave-one-out predictions of the training data."""

    options = ("grid_size",)
    scored = False
    scoring = ("train_loader", "seed", "loss", "link_approx", "n_samples", "bounds")

    def __init__(self, grid_size: int = 21) -> None:
        self.grid_size = grid_size

    def tune(self, problem: Problem) -> Tuned:
        search = problem.search(self.grid_size, left_out=True)
        search.descend()
        found = search.found("loo")
        return replace(found, notes=(*problem.notes, *found.notes))


class ByAuto(Method):
    """Maximises the evidence (in regression with noise from the residuals), then checks it on training data."""

    options = ("n_steps",)
    scored = False
    scoring = ("train_loader", "seed")

    def __init__(self, n_steps: int = 100) -> None:
        self.n_steps = n_steps

    def tune(self, problem: Problem) -> Tuned:
        if "temperature" in problem.kinds and problem.training_data is not None:
            why = "leave-one-out was taken: the evidence has no optimum in the temperature."
            return replace(found := ByLeaveOneOut().tune(problem), notes=(*found.notes, why))
        return auto(problem, ByEvidence(self.n_steps).tune)


class ByBayesian(Method):
    """Minimises the score on validation data by Bayesian optimisation, with BoTorch."""

    options = ("grid_size", "evaluations", "seed")
    prior_structure = "layerwise"

    def __init__(self, grid_size: int = 21, evaluations: int = 30, seed: int = 0) -> None:
        self.grid_size, self.evaluations, self.seed = grid_size, evaluations, seed

    def tune(self, problem: Problem) -> Tuned:
        search = problem.search(self.grid_size)
        seed = whole_number(self.seed, "seed", 0, LARGEST)
        bayesian_search(search, whole_number(self.evaluations, "evaluations"), seed)
        return search.found("bayesian")


METHODS: Final[dict[str, type[Method]]] = {
    "auto": ByAuto,
    "evidence": ByEvidence,
    "loo": ByLeaveOneOut,
    "validation": ByValidation,
    "bayesian": ByBayesian,
}
_OURS: Final = tuple(METHODS)
_OTHER_NAMES: Final = {"marglik": "evidence", "gridsearch": "validation", "CV": "validation"}  # laplace-torch's


def register_method(name: str, method: type[Method]) -> type[Method]:
    """Give a method a name, so that `la.tune(method=name)` finds it.

    Args:
        name: the new name.
        method: the class. It is constructed with the keywords of `la.tune` in its `options`, and no other arguments.

    Returns:
        The class, unchanged.

    Raises:
        OptionError: a built-in method has this name, or `method` is not a subclass of `Method`.
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise OptionError(f"register_method({name!r}, {shown(method)}): give a class that inherits tuning.Method.")
    if not isinstance(name, str) or not name or name in _OTHER_NAMES or name in _OURS:
        raise OptionError(f"register_method({shown(name)}, ...): the name must be a new word, as in 'random'.")
    METHODS[name] = method
    return method


def method_of(value: Any, given: Mapping[str, Any], usual: Mapping[str, Any]) -> tuple[str, Method]:
    """Return a method and its name. Refuse options of other methods.

    Args:
        value: a name, a method, or a function of the problem.
        given: the options of `la.tune` that methods may have.
        usual: the default values of these options.
    """
    if isinstance(value, type):
        raise OptionError(f"method={value.__name__} is a class; give an object: {value.__name__}().")
    if isinstance(value, Method) or (callable(value) and not hasattr(value, "value")):
        name = type(value).__name__ if isinstance(value, Method) else getattr(value, "__name__", "method")
        own = value if isinstance(value, Method) else Given(value)  # type: ignore[arg-type]
        _refuse(name, SCORING if own.scored else own.scoring, given, usual)
        return name, own
    word = str(getattr(value, "value", value))
    name = choice(_OTHER_NAMES.get(word, value), METHODS, "method")
    kind = METHODS[name]
    _refuse(name, _options(kind), given, usual)
    return name, kind(**{key: given[key] for key in kind.options})


def _options(kind: type[Method]) -> tuple[str, ...]:
    return kind.options + (SCORING if kind.scored else kind.scoring)


def _refuse(name: str, able: Sequence[str], given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Refuse options of other methods whose values differ from the defaults."""
    for key, value in given.items():
        if key not in able and not unchanged(value, usual[key]):
            owners = [repr(other) for other in _OURS if key in _options(METHODS[other])]
            instead = " Write la.calibrate(val_loader), or la.tune(method='validation', val_loader=val_loader)."
            raise OptionError(
                f"{key}= goes with method={' or '.join(owners)}; {name!r} has no use for it."
                + (instead if key == "val_loader" else "")
            )
