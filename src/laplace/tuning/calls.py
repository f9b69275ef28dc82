"""The calls that tune: `la.tune(...)`, laplace-torch's `optimize_prior_precision`, and the evidence itself."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace.backprop.gradients import Forward
from laplace.batches import Batch, Inputs, Keys, prediction_batches, training_batches
from laplace.budget import Budget
from laplace.checks import choice, positive, shown, unchanged, whole_number
from laplace.counting import counted
from laplace.errors import InputError, ModelError, OptionError, UnsupportedError, numbered
from laplace.likelihoods import Likelihood, Targets
from laplace.options import method_named, pred_type_named
from laplace.posterior import Posterior
from laplace.precision import plainly
from laplace.structures import Structure
from laplace.tuning import result
from laplace.tuning.bayesian import bayesian_search
from laplace.tuning.evidence import maximise_evidence
from laplace.tuning.result import KINDS, Tuned
from laplace.tuning.scores import How, Tally
from laplace.tuning.search import Search, log_grid
from laplace.tuning.space import Space, groups_of
from laplace.tuning.validation import Labelled, Validation

_BOUNDS = {"prior_precision": (1e-4, 1e4), "sigma_noise": (1e-3, 1e3), "temperature": (1e-3, 1e3)}
PRIOR_STRUCTURES = ("scalar", "layerwise", "diag")
_METHODS = {"n_steps": ("evidence",), "evaluations": ("bayesian",), "seed": ("bayesian",)}


class Tunable(ABC):
    """The tuning side of `Laplace`."""

    model: nn.Module
    likelihood: Likelihood
    structure: Structure
    prior_precision: Any
    sigma_noise: Any
    temperature: Any
    _keys: Keys
    _budget: Budget

    @property
    @abstractmethod
    def posterior(self) -> Posterior:
        """The posterior at the current prior, noise and temperature."""

    @abstractmethod
    def _uncut(self, inputs: Inputs) -> Iterator[Forward]:
        """Runs of the network on consecutive parts of the inputs, each with all positions of its examples."""

    @abstractmethod
    def _runs(self, inputs: Inputs, whole: bool = False) -> Iterator[Forward]:
        """Runs of the network on consecutive parts of the inputs."""

    @plainly
    def tune(
        self,
        *names: str,
        method: str = "evidence",
        prior_structure: str | None = None,
        val_loader: Iterable[Any] | None = None,
        loss: Any = None,
        ood_loader: Any = None,
        ood_weight: float = 0.5,
        pred_type: str = "glm",
        link_approx: str | None = None,
        n_samples: int = 100,
        bounds: Mapping[str, tuple[float, float]] | None = None,
        grid_size: int = 21,
        evaluations: int = 30,
        seed: int = 0,
        n_steps: int = 100,
        progress_bar: bool = False,
    ) -> Tuned:
        """Set some of 'prior_precision' (the default), 'sigma_noise' and 'temperature', and return what was found.

        Three methods. 'evidence': damped Newton on the log evidence; no data is needed, and there is no temperature.
        'validation': the lowest score on `val_loader` over a grid within `bounds`, then finer around the best, several
        hyperparameters one after the other. 'bayesian': the same score by Bayesian optimisation with BoTorch.

        The score is the predictive negative log-likelihood or `loss`; with `ood_loader`, minus `ood_weight` times the
        mean entropy of the predictive there.

        Args:
            *names: which to tune.
            method: 'evidence', 'validation' or 'bayesian'.
            prior_structure: 'scalar', one precision for all weights; 'layerwise', one per tensor (if left out, for
                'bayesian'); or 'diag', one per weight, by evidence only.
            val_loader: of validation, batches (x, y) that were not trained on.
            loss: a callable of (probabilities, y) or (mean, variance, y) that returns a mean, lower being better, or a
                metric object, which may say `higher_is_better`.
            ood_loader: inputs from outside the distribution.
            ood_weight: how much these count, in (0, 1].
            pred_type: of the predictions that are scored.
            link_approx: of the predictions that are scored.
            n_samples: of the predictions that are scored; drawn numbers are the same at every point.
            bounds: (low, high) for each of the three, where other than the usual ones are wanted.
            grid_size: of 'validation' and 'bayesian', values in the first grid.
            evaluations: of 'bayesian', points looked at after a grid of common values.
            seed: of 'bayesian', what it draws from.
            n_steps: of 'evidence', steps at most.
            progress_bar: whether runs over the loaders show one.

        Returns:
            The best point, all points that were looked at, and the warnings.

        Raises:
            NotFittedError: before `fit`.
            OptionError: a name, a method or bounds that there are not, or options of another method.
            UnsupportedError: 'temperature' by evidence, a precision per weight by validation.
            InputError: a loader that can be read once only, or whose batches do not fit.
            NumericalError: scores or evidences that are not finite.
            ImportError: 'bayesian' without BoTorch.
        """
        method, kinds = result.method_named(method), result.names_of(names)
        usual = "layerwise" if method == "bayesian" else "scalar"
        groups = choice(usual if prior_structure is None else prior_structure, PRIOR_STRUCTURES, "prior_structure")
        _require_of(
            method, val_loader=val_loader, loss=loss, ood_loader=ood_loader, ood_weight=ood_weight, bounds=bounds,
            pred_type=pred_type, link_approx=link_approx, n_samples=n_samples, grid_size=grid_size,
            evaluations=evaluations, seed=seed, n_steps=n_steps,
        )  # fmt: skip
        if method == "evidence":
            return self._take(kinds, self._by_evidence(kinds, groups, 1.0, n_steps))
        how = self._how(pred_type, link_approx, n_samples, loss, ood_weight)
        if ood_loader is None and not unchanged(ood_weight, 0.5):
            raise OptionError(f"ood_weight={shown(ood_weight)} goes with ood_loader=, which is not given.")
        limits, size = _checked_bounds(bounds, kinds), whole_number(grid_size, "grid_size", 2)
        grids = {kind: torch.linspace(*limits[kind], size, dtype=torch.float64) for kind in KINDS}
        validation = self._validation(how, val_loader, ood_loader, progress_bar, again=True)
        search = self._search(kinds, groups, validation, grids, lambda kind, _: f"bounds={{{kind!r}: (low, high)}}")
        with torch.no_grad():
            if method == "bayesian":
                bayesian_search(search, whole_number(evaluations, "evaluations"), whole_number(seed, "seed", 0))
            else:
                search.coordinatewise(refinements=2 if self.posterior.fit.linear else 1)
            return self._take(kinds, search.found(method))

    @plainly
    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        n_steps: int = 100,
        lr: float = 0.1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: Iterable[Any] | None = None,
        loss: Any = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str | None = None,
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
        tune_sigma_noise: bool = False,
    ) -> None:
        """Set the prior precision to the one of maximal evidence, or of the lowest score on validation data.

        laplace-torch's call; `la.tune` does the same and more, and returns what it found.

        Args:
            pred_type: of the predictions that are scored.
            method: 'marglik', which needs no validation data, or 'gridsearch' (or 'CV'), which scores a grid on
                `val_loader`.
            n_steps: of 'marglik', steps at most; Newton's method takes a few.
            lr: accepted and not needed.
            init_prior_prec: of 'marglik', where it starts.
            prior_structure: 'scalar', 'layerwise' or 'diag'.
            val_loader: of 'gridsearch', batches (x, y) that were not trained on.
            loss: of 'gridsearch', a callable of (probabilities, y) or (mean, variance, y), or a metric object of
                torchmetrics; the predictive negative log-likelihood if left out.
            log_prior_prec_min: the grid's lower end, as a power of `log_prior_prec_base`.
            log_prior_prec_max: the grid's upper end.
            grid_size: how many values it has.
            link_approx: of the predictions that are scored.
            n_samples: of the predictions that are scored.
            verbose: whether steps and result are printed.
            progress_bar: whether runs over the loader show one.
            log_prior_prec_base: the base of the two ends.
            tune_sigma_noise: find the noise of a regression, too.

        Raises:
            NotFittedError: before `fit`.
            OptionError: a method or a prior structure that there is not; 'gridsearch' without `val_loader`.
            UnsupportedError: a precision per weight by validation.
            NumericalError: scores or evidences that are not finite.
        """
        kinds = ["prior_precision"] + ["sigma_noise"] * bool(tune_sigma_noise)
        groups = choice(prior_structure, PRIOR_STRUCTURES, "prior_structure")
        if method_named(method) == "marglik":
            start = float(positive(init_prior_prec, "init_prior_prec").double().log().mean().exp())
            tuned = self._by_evidence(kinds, groups, start, n_steps, verbose)
        else:
            how = self._how(pred_type, link_approx, n_samples, loss)
            grid = log_grid(log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base)
            grids = {"prior_precision": grid, "sigma_noise": log_grid(-3, 3, grid_size, 10.0)}
            again = groups != "scalar" or tune_sigma_noise
            validation = self._validation(how, val_loader, None, progress_bar, again)
            search = self._search(kinds, groups, validation, grids, _laplace_torch_option)
            with torch.no_grad():
                search.coordinatewise(refinements=0)
                tuned = search.found("validation")
        self._take(kinds, tuned)
        if verbose:
            print(f"prior precision {tuned.prior_precision.tolist()}, noise {tuned.sigma_noise:.4g}")

    def _by_evidence(
        self, kinds: Sequence[str], groups: str, start: float, n_steps: int, verbose: bool = False
    ) -> Tuned:
        """The named hyperparameters of maximal evidence; a prior precision that is not named is held."""
        posterior, moves = self.posterior.detached(), "prior_precision" in kinds
        space = Space(
            posterior, groups if moves else groups_of(posterior), "sigma_noise" in kinds, "temperature" in kinds
        )
        x = space.start(start)
        held = torch.zeros_like(x, dtype=torch.bool)
        if not moves:
            held[: len(space.sizes)] = True
            x[held] = posterior.prior.precision.to(x).log()
        with torch.no_grad():
            return maximise_evidence(space, x, whole_number(n_steps, "n_steps"), held, verbose)

    def _search(
        self,
        kinds: Sequence[str],
        groups: str,
        validation: Validation,
        grids: Mapping[str, Tensor],
        widen: Callable[[str, str], str],
    ) -> Search:
        if groups == "diag":
            raise UnsupportedError(
                "a precision per weight is too many to search by validation. Take prior_structure='scalar' or "
                "'layerwise', or the evidence: method='evidence' (or 'marglik')."
            )
        moved = groups if "prior_precision" in kinds else None
        space = Space(self.posterior.detached(), moved, "sigma_noise" in kinds, "temperature" in kinds)
        start = space.start(self.posterior.prior.precision.detach())
        return Search(space, validation.scores, start, [grids[kind] for kind in space.kinds], widen)

    def _take(self, kinds: Sequence[str], tuned: Tuned) -> Tuned:
        """Set what was found."""
        for kind in kinds:
            setattr(self, kind, getattr(tuned, kind))
        return tuned

    def _how(self, pred_type: str, link_approx: str | None, n_samples: int, loss: Any, ood_weight: float = 0.5) -> How:
        """How predictions are made and scored, checked before the network runs."""
        link = self.likelihood.link_named(link_approx)
        kind = pred_type_named(pred_type, self.structure.functional)
        how = How(kind, link, whole_number(n_samples, "n_samples", 2), loss, ood_weight)
        Tally(how, self.likelihood)
        return how

    def _validation(self, how: How, loader: Any, ood_loader: Any, progress_bar: bool, again: bool) -> Validation:
        if loader is None:
            raise OptionError("tuning by validation needs val_loader=, batches (x, y) that were not trained on.")
        for name, given in {"val_loader": loader, "ood_loader": ood_loader}.items():
            if again and isinstance(given, Iterator):
                raise InputError(
                    f"{name} is a {type(given).__name__}, which can be read once, and the search reads it more than "
                    "once. Give a DataLoader or a list of batches."
                )
        if ood_loader is not None and not isinstance(ood_loader, Iterable):
            raise InputError(
                f"ood_loader is a {type(ood_loader).__name__}; a DataLoader, a list of batches or a tensor is needed."
            )
        if ood_loader is not None and self.likelihood.pairs:
            raise UnsupportedError("ood_loader= is for single inputs; preferences between pairs are scored without it.")
        outside = None if ood_loader is None else lambda: self._outside_runs(ood_loader, progress_bar)
        return Validation(how, lambda: self._labelled_runs(loader, progress_bar), outside, self._budget)

    def _labelled_runs(self, loader: Iterable[Any], progress_bar: bool) -> Labelled:
        for batch in training_batches(loader, self.model, self._keys, progress_bar, "validation"):
            try:
                yield from self._labelled(batch)
            except (InputError, ModelError) as error:
                raise numbered(error, f"validation batch {batch.index}") from error.__cause__

    def _labelled(self, batch: Batch) -> Labelled:
        start, n = 0, len(batch.y)
        for whole in self._uncut(batch.inputs):
            stop = start + whole.positions.n
            part = batch if n <= stop - start else batch.labels(start, stop)
            run, targets = counted(whole, part, self.likelihood)
            start = stop
            yield from ((part, targets.part(rows)) for part, rows in run.cut() if len(run.outputs))
        if start != n:
            raise InputError(f"{n} labels for {start} inputs.")

    def _outside_runs(self, loader: Iterable[Any], progress_bar: bool) -> Labelled:
        for index, inputs in enumerate(prediction_batches(loader, self._keys, {}, progress_bar)):
            try:
                for forward in self._runs(inputs):
                    yield forward, Targets(forward.outputs)
            except (InputError, ModelError) as error:
                raise numbered(error, f"out-of-distribution batch {index}") from error.__cause__


def _require_of(method: str, **given: Any) -> None:
    """Refuse options of other methods, where they were changed."""
    usual = inspect.signature(Tunable.tune).parameters
    for name, value in given.items():
        methods, default = _METHODS.get(name, ("validation", "bayesian")), usual[name].default
        if method not in methods and not unchanged(value, default):
            raise OptionError(
                f"{name}= goes with method={' or '.join(map(repr, methods))}; {method!r} has no use for it."
            )


def _laplace_torch_option(kind: str, side: str) -> str:
    """How a wider grid is asked for in `optimize_prior_precision`."""
    if kind != "prior_precision":
        return f"la.tune({kind!r}, method='validation', bounds=...)"
    return "log_prior_prec_min=" if side == "lower" else "log_prior_prec_max="


def _checked_bounds(bounds: Any, kinds: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Logarithms of the lowest and highest value of each hyperparameter."""
    given = {} if bounds is None else bounds
    if not isinstance(given, Mapping):
        raise OptionError(f"bounds={shown(bounds)}: a mapping such as {{'prior_precision': (1e-4, 1e4)}} is needed.")
    given = {choice(key, KINDS, "a key of bounds"): value for key, value in given.items()}
    if idle := [key for key in given if key not in kinds]:
        wanted = ", ".join(map(repr, [*kinds, idle[0]]))
        raise OptionError(f"bounds of {idle[0]}, which is not tuned: write la.tune({wanted}, ...), or leave them out.")
    limits = {}
    for kind, pair in {
        **_BOUNDS,
        **{choice(key, KINDS, "a key of bounds"): value for key, value in given.items()},
    }.items():
        numbers = isinstance(pair, (tuple, list)) and all(isinstance(end, (int, float)) for end in pair)
        if not numbers or len(pair) != 2 or not 0 < pair[0] < pair[1] < math.inf:
            raise OptionError(f"bounds of {kind} are {shown(pair)}; needed: (low, high) with 0 < low < high.")
        limits[kind] = (math.log(pair[0]), math.log(pair[1]))
    return limits
