"""The calls that tune: `la.tune(...)`, laplace-torch's `optimize_prior_precision`, and the evidence itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace.backprop.gradients import Forward
from laplace.batches import Inputs, Keys, prediction_batches, training_batches
from laplace.budget import Budget
from laplace.counting import counted
from laplace.errors import InputError, OptionError, UnsupportedError, choice, shown, whole_number
from laplace.likelihoods import Likelihood, Targets
from laplace.options import method_named, pred_type_named
from laplace.posterior import Posterior
from laplace.precision import plainly
from laplace.prior import positive
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

        method 'evidence'    damped Newton on the log evidence, at most `n_steps` steps: no data needed, no temperature
        method 'validation'  the lowest score on `val_loader`: a grid of `grid_size` values within `bounds`, then finer
                             around the best; several hyperparameters one after the other
        method 'bayesian'    the same score by Bayesian optimisation with BoTorch, `evaluations` points one by one

        `prior_structure` is 'scalar', one precision for all weights; 'layerwise', one per tensor (if left out, for
        'bayesian'); or 'diag', one per weight, by evidence only.

        The score is the predictive negative log-likelihood, or `loss`: a callable of (probabilities, y) or (mean,
        variance, y), or a metric object. With `ood_loader`, inputs from outside the distribution, it is minus
        `ood_weight` times the mean entropy of the predictive there.
        """
        method, kinds = result.method_named(method), result.names_of(names)
        usual = "layerwise" if method == "bayesian" else "scalar"
        groups = choice(usual if prior_structure is None else prior_structure, PRIOR_STRUCTURES, "prior_structure")
        if method == "evidence":
            for name, value in {"val_loader": val_loader, "ood_loader": ood_loader, "loss": loss}.items():
                if value is not None:
                    raise OptionError(f"{name}= goes with method='validation'; the evidence needs no further data.")
            return self._take(kinds, self._by_evidence(kinds, groups, 1.0, n_steps))
        how = self._how(pred_type, link_approx, n_samples, loss, ood_weight)
        limits, size = _checked_bounds(bounds), whole_number(grid_size, "grid_size", 2)
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

        'marglik' needs no validation data. Newton's method finds its one optimum in a few of at most `n_steps` steps
        from `init_prior_prec`; `lr` is accepted and not needed. `tune_sigma_noise` finds the noise of regression too.
        'gridsearch' (or 'CV') scores a grid on `val_loader`, by the predictive negative log-likelihood or by `loss`: a
        callable of (probabilities, y) or (mean, variance, y), or a metric object of torchmetrics. `la.tune` does more.
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
                "'layerwise', or the evidence: method='marglik'."
            )
        moved = groups if "prior_precision" in kinds else None
        space = Space(self.posterior.detached(), moved, "sigma_noise" in kinds, "temperature" in kinds)
        return Search(space, validation.scores, space.start(1.0), [grids[kind] for kind in space.kinds], widen)

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
            start, n = 0, len(batch.y)
            for whole in self._uncut(batch.inputs):
                stop = start + whole.positions.n
                try:
                    part = batch if n <= stop - start else batch.labels(start, stop)
                    run, targets = counted(whole, part, self.likelihood)
                except InputError as error:
                    raise InputError(f"validation batch {batch.index}: {error}") from None
                start = stop
                yield from ((part, targets.part(rows)) for part, rows in run.cut() if len(run.outputs))
            if start != n:
                raise InputError(f"validation batch {batch.index}: {n} labels for {start} inputs.")

    def _outside_runs(self, loader: Iterable[Any], progress_bar: bool) -> Labelled:
        for inputs in prediction_batches(loader, self._keys, {}, progress_bar):
            for forward in self._runs(inputs):
                yield forward, Targets(forward.outputs)


def _laplace_torch_option(kind: str, side: str) -> str:
    """How a wider grid is asked for in `optimize_prior_precision`."""
    if kind != "prior_precision":
        return f"la.tune({kind!r}, method='validation', bounds=...)"
    return "log_prior_prec_min=" if side == "lower" else "log_prior_prec_max="


def _checked_bounds(bounds: Any) -> dict[str, tuple[float, float]]:
    """Logarithms of the lowest and highest value of each hyperparameter."""
    given = {} if bounds is None else bounds
    if not isinstance(given, Mapping):
        raise OptionError(f"bounds={shown(bounds)}: a mapping such as {{'prior_precision': (1e-4, 1e4)}} is needed.")
    limits = {}
    for kind, pair in {**_BOUNDS, **{choice(key, KINDS, "bounds for"): value for key, value in given.items()}}.items():
        numbers = isinstance(pair, (tuple, list)) and all(isinstance(end, (int, float)) for end in pair)
        if not numbers or len(pair) != 2 or not 0 < pair[0] < pair[1] < math.inf:
            raise OptionError(f"bounds of {kind} are {shown(pair)}; needed: (low, high) with 0 < low < high.")
        limits[kind] = (math.log(pair[0]), math.log(pair[1]))
    return limits
