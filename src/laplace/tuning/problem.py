"""Describe a tuning problem to its method: hyperparameters as points, and the score of each point."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from laplace.checks import LARGEST, choice, shown, unchanged, whole_number
from laplace.distributed import Reduce, alone
from laplace.distributed.shards import divided_by
from laplace.errors import InputError, OptionError, UnsupportedError, within
from laplace.inference.arguments import pred_type_named
from laplace.inference.runner import Runner
from laplace.inference.shared import divided
from laplace.likelihoods import Targets
from laplace.network.batches import prediction_batches
from laplace.network.loaders import held_out_batches
from laplace.posterior.posterior import Posterior
from laplace.priors.gaussian import GaussianPrior
from laplace.tuning import loo
from laplace.tuning.interpolated import Interpolated
from laplace.tuning.loo import LeaveOneOut, sample_size
from laplace.tuning.result import KINDS, Point, Tuned
from laplace.tuning.scores import How, Tally
from laplace.tuning.search import LARGEST_GRID, Search
from laplace.tuning.space import Space
from laplace.tuning.training_data import Sample, labelled, of_all_ranks
from laplace.tuning.validation import Labelled, Validation

_BOUNDS = {"prior_precision": (1e-4, 1e4), "sigma_noise": (1e-3, 1e3), "temperature": (1e-3, 1e3)}


class Posteriors(Protocol):
    """Has a posterior, its network, and the softmax temperature of predictions."""

    @property
    def posterior(self) -> Posterior: ...

    @property
    def runner(self) -> Runner: ...

    @property
    def softmax_temperature(self) -> float: ...


@dataclass(frozen=True)
class Scoring:
    """Holds how predictions are scored: the options of `la.tune` that all methods by validation share."""

    val_loader: Iterable[Any] | None = None
    loss: Any = None
    ood_loader: Any = None
    ood_weight: float = 0.5
    pred_type: str = "glm"
    link_approx: Any = None
    n_samples: int = 100
    bounds: Mapping[str, tuple[float, float]] | None = None
    train_loader: Iterable[Any] | None = None
    seed: int = 0
    progress_bar: bool | None = None
    reduce: Reduce = alone


SCORING: Final = (
    "val_loader", "loss", "ood_loader", "ood_weight", "pred_type", "link_approx", "n_samples", "bounds",
)  # fmt: skip


@dataclass
class Problem:
    """Says what is tuned, and scores points. A point x, (K,) in float64, holds logarithms of hyperparameters.

    The coordinates are, in this order: one or more prior precisions (by `groups`), sigma_noise, the temperature, as
    far as they are tuned.

    Attributes:
        la: the posterior, and the network.
        kinds: what is tuned: some of 'prior_precision', 'sigma_noise' and 'temperature'.
        groups: 'scalar', 'layerwise' or 'diag'.
        scoring: how predictions are scored.
        notes: what the result should say.
    """

    la: Posteriors
    kinds: Sequence[str]
    groups: str
    scoring: Scoring = field(default_factory=Scoring)
    notes: list[str] = field(default_factory=list, init=False)
    _seen: list[tuple[Tensor, float]] = field(default_factory=list, init=False)

    @cached_property
    def space(self) -> Space:
        """Return what is tuned: `space.kinds` names each coordinate, `space.at(x)` is the posterior at a point."""
        own = tuple(kind for kind in self.kinds if kind not in KINDS)  # of a prior without precisions
        moved = self.groups if own or "prior_precision" in self.kinds else None
        posterior = self.la.posterior.detached()
        return Space(posterior, moved, "sigma_noise" in self.kinds, "temperature" in self.kinds, own)

    @property
    def start(self) -> Tensor:  # (K,)
        """Return the current hyperparameters."""
        prior = self.la.posterior.prior
        return self.space.start(prior.precision.detach() if isinstance(prior, GaussianPrior) else 1.0)

    @property
    def box(self) -> tuple[Tensor, Tensor]:  # (K,), (K,)
        """Return the lowest and the highest point, from `bounds`."""
        limits = bounds_of(self.scoring.bounds, self.kinds)
        ends = torch.tensor([limits[kind] for kind in self.space.kinds], dtype=torch.float64)
        low, high = ends.to(self.start.device).unbind(1)
        return low, high

    @cached_property
    def how(self) -> How:
        """Return how predictions are made and scored."""
        s = self.scoring
        how = how_scored(self.la, s.pred_type, s.link_approx, s.n_samples, s.loss, s.ood_weight)
        if s.ood_loader is None and not unchanged(s.ood_weight, 0.5):
            raise OptionError(f"ood_weight={shown(s.ood_weight)} goes with ood_loader=, which is not given.")
        return how

    @cached_property
    def validation(self) -> Validation:
        """Return the object that scores posteriors on `val_loader`."""
        s = self.scoring
        return validation_of(self.la, self.how, s.val_loader, s.ood_loader, s.progress_bar, True, s.reduce)

    @property
    def training_data(self) -> Iterable[Any] | None:
        """Return the training data: `train_loader`, or what `fit` was given; None if neither is available."""
        given = self.scoring.train_loader
        return getattr(self.la, "training_data", None) if given is None else given

    @cached_property
    def leave_one_out(self) -> LeaveOneOut:
        """Return the object that scores posteriors by leave-one-out predictions of (a sample of) the training data."""
        loader, runner = self.training_data, self.la.runner
        if loader is None:
            raise OptionError(
                "leave-one-out tuning reads the training data again, and there is none available: fit was given an "
                "iterator or added to earlier data, or the posterior comes from a file or a copy. Give train_loader=."
            )
        fit, count = self.la.posterior.fit, len(self.space.kinds)
        most = sample_size(fit.n_outputs, _expected_posteriors(len(set(self.space.kinds)), count))
        seed = whole_number(self.scoring.seed, "seed", 0, LARGEST)
        sample = Sample(of_all_ranks(loader, most, self.scoring.reduce, runner, seed), most, seed)
        if fit.n_data > most:
            self.notes.append(
                f"scored on {most:,} of {fit.n_data:,} training examples, drawn with seed {self.scoring.seed}."
            )
            if most < loo.MOST_EXAMPLES:
                runner.warn_once(
                    "loo sample",
                    f"leave-one-out is {self.notes[-1]} With {fit.n_outputs} outputs an example costs "
                    f"{fit.n_outputs}^3 multiplications for each posterior; another seed= shows how much the sample "
                    "matters.",
                )
        progress = self.scoring.progress_bar
        runs = partial(sample.runs, runner, self.la.posterior, "training", progress)
        return LeaveOneOut(self.how, runs, runner.spec.budget)

    def evidence(self, x: Tensor) -> float:
        """Return the log evidence at a point; larger is better. Needs no data."""
        return float(self.space.at(x).log_evidence)

    def scores(self, points: Sequence[Tensor]) -> list[float]:
        """Return the score of each point on `val_loader`; smaller is better. One run over the data serves all."""
        return self.validation.scores([self.space.at(x) for x in points]).tolist()

    def losses(self, points: Sequence[Tensor]) -> list[float]:
        """Return and remember the loss of each point: its score, or minus its log evidence without `val_loader`."""
        if isinstance(points, Tensor) and points.dim() < 2:
            raise OptionError("problem.losses takes a list of points. Write problem.losses([x]) for one point x.")
        size = self.start.shape
        for x in points:
            if not isinstance(x, Tensor) or x.shape != size or not x.isfinite().all():
                raise OptionError(
                    f"problem.losses got the point {shown(x)}; a tensor of shape {tuple(size)} with finite logarithms "
                    f"of {', '.join(self.space.kinds)} is needed."
                )
        if self.scoring.val_loader is None:
            if "temperature" in self.kinds:
                raise UnsupportedError("the evidence has no optimum in the temperature. Give val_loader=.")
            found = [-self.evidence(x) for x in points]
        else:
            found = self.scores(points)
        self._seen += zip([x.clone() for x in points], found, strict=True)
        return found

    def tuned(self, method: str, steps: int | None = None, converged: bool | None = None) -> Tuned:
        """Return the best of all points that `losses` has seen, with their log evidence where that was maximised."""
        finite = [pair for pair in self._seen if math.isfinite(pair[1])]
        if not finite:
            raise OptionError(f"method {method!r} has seen no point with a finite score: call problem.losses([x]).")
        by_evidence = self.scoring.val_loader is None
        sign = -1 if by_evidence else 1
        points = tuple(Point.of(self.space.at(x), sign * loss) for x, loss in self._seen)
        best = points[min(range(len(points)), key=lambda i: (not math.isfinite(self._seen[i][1]), self._seen[i][1]))]
        steps = len(points) if steps is None else steps
        return Tuned(method, best, points, steps, len(points), converged=converged, by_evidence=by_evidence)

    def search(self, grid_size: int, left_out: bool = False) -> Search:
        """Return a search over grids of `grid_size` values within `bounds`, by validation or leave-one-out scores."""
        _ = self.how  # refused before the network runs
        limits = bounds_of(self.scoring.bounds, self.kinds)
        size = whole_number(grid_size, "grid_size", 2, LARGEST_GRID)
        grids = {kind: torch.linspace(*limits[kind], size, dtype=torch.float64) for kind in KINDS}
        scorer = self.leave_one_out if left_out else self.validation
        return search_of(self, scorer, grids, lambda kind, _: f"bounds={{{kind!r}: (low, high)}}")


def search_of(
    problem: Problem, scorer: Validation | LeaveOneOut, grids: Mapping[str, Tensor], widen: Callable[[str, str], str]
) -> Search:
    """Return a search over these grids of logarithms, by kind."""
    if problem.groups == "diag":
        raise UnsupportedError(
            "a precision per weight is too many to search by validation. Take prior_structure='scalar' or "
            "'layerwise', or the evidence: method='evidence' (or 'marglik')."
        )
    if own := [kind for kind in problem.kinds if kind not in KINDS]:
        raise UnsupportedError(
            f"{own[0]!r} of {problem.la.posterior.prior} is not searched by validation. Tune it by the evidence: "
            f"la.tune({own[0]!r}, method='evidence')."
        )
    space = problem.space
    guesses = Interpolated.of(scorer, space) if isinstance(scorer, Validation) else None
    return Search(space, scorer.scores, problem.start, [grids[kind] for kind in space.kinds], widen, guesses)


def _expected_posteriors(kinds: int, coordinates: int) -> int:
    """Return about how many posteriors a search scores."""
    return {1: 21, 2: 169}.get(kinds, 343) + 30 * coordinates


def how_scored(
    la: Posteriors,
    pred_type: str,
    link_approx: Any,
    n_samples: int,
    loss: Any,
    ood_weight: float = 0.5,
    as_in_paper: bool = False,
) -> How:
    """Return how predictions are made and scored, checked before the network runs.

    If no link is given, predictions are those of `la.predict`, or of `la(x)` if `as_in_paper`.
    """
    link, own = la.runner.spec.likelihood.link_of(link_approx, as_in_paper)
    kind = pred_type_named(pred_type, la.runner.spec.structure.functional)
    draws = whole_number(n_samples, "n_samples", 2)
    how = How(kind, link, draws, loss, ood_weight, own, la.softmax_temperature)
    Tally(how, la.runner.spec.likelihood)
    return how


def validation_of(
    la: Posteriors,
    how: How,
    loader: Any,
    ood_loader: Any,
    progress_bar: bool | None,
    again: bool,
    reduce: Reduce = alone,
) -> Validation:
    """Return an object that scores posteriors on a loader, and on inputs from outside the distribution."""
    loader = held_out_batches(loader)
    places = None
    if la.posterior.fit.owners is not None:
        _require_undivided(loader, ood_loader)
        reduce = alone  # all ranks read the same data, and add the variances of their own layers
    if reduce.size > 1 and loader is not None:
        shard = divided(loader, reduce, la.runner)
        loader, places = shard.loader, shard.places
        ood_loader = None if ood_loader is None else divided(ood_loader, reduce, la.runner).loader
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
    if ood_loader is not None and la.runner.spec.likelihood.pairs:
        raise UnsupportedError("ood_loader= is for single inputs; preferences between pairs are scored without it.")
    outside = None if ood_loader is None else lambda: _outside_runs(la, ood_loader, progress_bar)
    inside = partial(_labelled_runs, la, loader, progress_bar)
    return Validation(how, inside, outside, la.runner.spec.budget, reduce, places)


def _require_undivided(*loaders: Any) -> None:
    """Refuse data of which each rank has a part, for a posterior whose factors stay on several ranks."""
    for loader in loaders:
        if (what := divided_by(loader)) is not None:
            raise InputError(
                f"{what} gives each rank a part of the data, and the factors of this posterior stay on several ranks "
                "(shard_factors=True): each adds the variances of its own layers, for the same inputs. Give all ranks "
                "all of it: DataLoader(dataset, batch_size)."
            )


def _labelled_runs(la: Posteriors, loader: Iterable[Any], progress_bar: bool | None) -> Labelled:
    for batch in la.runner.batches(loader, progress_bar, "validation"):
        with within(f"validation batch {batch.index}"):
            yield from labelled(la.runner, la.posterior, batch)


def _outside_runs(la: Posteriors, loader: Iterable[Any], progress_bar: bool | None) -> Labelled:
    for where, inputs in prediction_batches(loader, la.runner.spec.keys, {}, progress_bar, "out-of-distribution batch"):
        with within(where or "ood_loader"):
            for forward in la.runner.runs(la.posterior.fit, inputs):
                yield forward, Targets(forward.outputs)


def bounds_of(bounds: Any, kinds: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the logarithms of the lowest and highest value of each hyperparameter."""
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
