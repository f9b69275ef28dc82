"""Find the lowest score over several hyperparameters: a coarse grid over all, then descents from its best basins.

Kinds of hyperparameters trade off against each other and may have several optima. The search begins with a grid over
all kinds together, with one precision for all tensors. From each of its best local minima it descends in all
coordinates (`descent.py`). Then it scores every coordinate over its whole grid, alone and together with its kind, and
descends again from anything better, until nothing is. A whole grid, or a step of all descents, is one round, which
reads the data once.

Where scores can be guessed from a few posteriors (`interpolated.py`), all of this happens among guesses. Only the
posteriors behind the guesses, and what the guesses say is best, are scored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from laplace.checks import whole_number
from laplace.errors import BoundaryWarning, NumericalError, OptionError, warn
from laplace.posterior.posterior import Posterior
from laplace.tuning.descent import Descent
from laplace.tuning.interpolated import Interpolated
from laplace.tuning.result import Point, Tuned
from laplace.tuning.space import Space

_COARSE = {1: 21, 2: 13, 3: 7}  # number of kinds: values of each kind in the product grid
_STARTS = 6  # how many basins to descend into
_ITERATIONS = 25  # the most in a descent
_SWEEPS = 8  # the most over all coordinates' grids
_LEAST_GAIN = 1e-5  # of an iteration or a sweep, relative to a score of 1 or more
_HOPEFUL = 0.1  # the share of its distance to the best that a descent must gain per iteration
_AS_GOOD = 1e-3  # relative to a score of 1 or more: such optima count as equally good
_BETWEEN = 7  # points scored between two optima
_DIAGONAL = 41  # posteriors that are scored before any guess
_GUESSES = 5  # the most searches among guesses
_RESTARTS = 10  # the most descents from one best guess to the next
_GUESS_ERROR = 1e-6  # of a guess at the best point, relative to a score of 1 or more
_ROUNDING = 1e-10
_LARGEST = 700  # exp of this still fits into float64
LARGEST_GRID = 100_000  # values; each needs a posterior


def log_grid(low: float, high: float, size: int, base: float) -> Tensor:  # (size,)
    """Return natural logarithms of `size` values from base^low to base^high, evenly spaced."""
    size = whole_number(size, "grid_size", 1, LARGEST_GRID)
    try:
        low, high, base = float(low), float(high), float(base)
        runs = low < high and 1 < base < math.inf and max(abs(low), abs(high)) * math.log(base) < _LARGEST
    except (TypeError, ValueError, RuntimeError, OverflowError):
        runs = False
    if not runs:
        raise OptionError(
            f"the grid runs from {base}**{low} to {base}**{high}; needed: log_prior_prec_min < log_prior_prec_max and "
            "log_prior_prec_base > 1."
        )
    return torch.linspace(low, high, size, dtype=torch.float64) * math.log(base)


class Search:
    """Scores points of a space and keeps the best."""

    least_gain = _LEAST_GAIN

    def __init__(
        self,
        space: Space,
        scores: Callable[[Sequence[Posterior]], Tensor],
        start: Tensor,  # (K,)
        grids: Sequence[Tensor],  # a grid of logarithms for each coordinate
        widen: Callable[[str, str], str],  # (kind, 'lower' or 'upper') -> the option that widens the grid
        interpolated: Interpolated | None = None,  # guesses scores, where that can be done
    ) -> None:
        self.space, self.scores, self.x, self.widen, self.interpolated = space, scores, start, widen, interpolated
        self.grids = [grid.to(start) for grid in grids]
        self.low, self.high = (torch.stack([grid[end] for grid in self.grids]) for end in (0, -1))
        self.value, self.rounds, self.unfinished, self.closed_in = math.inf, 0, False, False
        self.rival: Point | None = None  # another optimum that is equally good
        self.other: Tensor | None = None  # and where it is, (K,)
        self.seen: list[tuple[Tensor, float]] = []
        self._known: dict[tuple[float, ...], float] = {}

    @property
    def tied(self) -> list[list[int]]:
        """Return the coordinates by kind. The precisions of all tensors are one kind."""
        kinds = self.space.kinds
        return [[i for i, kind in enumerate(kinds) if kind == each] for each in dict.fromkeys(kinds)]

    @property
    def converged(self) -> bool | None:
        """Return whether nothing better was found around the best point; None if the search does not descend."""
        return not self.unfinished if self.closed_in else None

    def look(self, candidates: Sequence[Tensor]) -> list[float]:
        """Score points in one round, and move to the best of them if it is better than the current point."""
        keys = [tuple(x.tolist()) for x in candidates]
        new = {key: x for key, x in zip(keys, candidates, strict=True) if key not in self._known}
        if new:
            values = self._scored([*new.values()])
            self.rounds += 1
            self._require_finite([*new.values()], values)
            self._known.update(zip(new, values.tolist(), strict=True))
            self.seen += zip(new.values(), values.tolist(), strict=True)
        scores = [self._known[key] for key in keys]
        best = min(range(len(scores)), key=scores.__getitem__)
        if scores[best] < self.value - _ROUNDING * abs(scores[best]) * math.isfinite(self.value):
            self.x, self.value = candidates[best], scores[best]
        return scores

    def _scored(self, points: Sequence[Tensor]) -> Tensor:  # (G,)
        return self.scores([self.space.at(x) for x in points])

    def _require_finite(self, candidates: Sequence[Tensor], values: Tensor) -> None:
        if not values.isfinite().all():
            bad = (~values.isfinite()).nonzero().flatten().tolist()
            kinds = [f"{self.space.described(set_)} {self._shown(candidates[bad[0]][set_])}" for set_ in self.tied]
            raise NumericalError(
                f"the validation score is NaN or infinite at {', '.join(kinds)} ({len(bad)} of {len(values)} points); "
                "nothing changed. Look for infinite outputs or labels in val_loader."
            )

    def move(self, index: Sequence[int], values: Tensor) -> list[float]:
        """Score the current point with some coordinates set to each of the values."""
        candidates = self.x.repeat(len(values), 1)
        candidates[:, index] = values.to(self.x).unsqueeze(1)
        return self.look(list(candidates))

    def each_kind(self) -> None:
        """Score each kind over its whole grid, at the best point so far."""
        for index in self.tied:
            self._require_any_difference(index, self.move(index, self.grids[index[0]]))

    def descend(self) -> None:
        """Descend from the best basins of a coarse grid over all kinds, until no coordinate's grid is better."""
        if len(self.grids) > 1 and ((self.low <= self.x) & (self.x <= self.high)).all():
            self.look([self.x])  # so that the result is at least as good as the start
        if self.interpolated is not None and self._descend_by_guesses(self.interpolated):
            return
        starts = self._basins()
        self.each_kind()
        starts = _distinct([(self.x, self.value), *starts], self._reach)
        ended: list[Descent] = []
        for _ in range(_SWEEPS):
            ended += self._down(starts)
            if not self._sweep():
                break
            starts = [(self.x, self.value)]
        else:
            self.unfinished = True
        self.closed_in = True
        self._compare(ended)

    def _descend_by_guesses(self, interpolated: Interpolated) -> bool:
        """Search among guesses, score what they say is best, and repeat until guess and score agree there.

        Returns whether they did.
        """
        scores, self.scores = self.scores, interpolated.scores
        try:
            along = torch.linspace(0, 1, _DIAGONAL).to(self.x).unsqueeze(1)
            self.look(list(torch.lerp(self.low, self.high, along)))  # all ratios of prior and data, from end to end
            if not interpolated.fits:
                return False
            start = self.x
            for _ in range(_GUESSES):
                among = Guessed(self, interpolated, start)
                among.descend()
                guessed = [among.x] + ([] if among.other is None else [among.other])
                self.look([point for x in guessed for point in self._around(x)])
                start = among.x
                error = abs(self._known[tuple(among.x.tolist())] - among.value)
                if error <= _GUESS_ERROR * max(1.0, abs(self.value)):
                    self.closed_in, self.unfinished = True, among.unfinished
                    if among.other is not None:
                        score = self._known[tuple(among.other.tolist())]
                        self.rival = Point.of(self.space.at(among.other), score)
                    return True
            return False
        finally:
            self.scores = scores

    def _around(self, x: Tensor) -> list[Tensor]:
        """Return a point and its neighbours along the diagonal of the space."""
        step = (self.high - self.low) / (3 * (_DIAGONAL - 1))
        return [
            x,
            *(point for sign in (-1, 1) if not torch.equal(point := (x + sign * step).clamp(self.low, self.high), x)),
        ]

    @property
    def _reach(self) -> Tensor:  # (K,)
        """Return the extent of a descent's first stencil: half the distance between values of the coarse grid."""
        return torch.stack([_spacing(_some(grid, _coarse(self.tied))) for grid in self.grids]) / 2

    def _tolerance(self) -> float:
        return self.least_gain * max(1.0, abs(self.value))

    def _basins(self) -> list[tuple[Tensor, float]]:
        """Return the lowest local minima of a coarse grid over all kinds, each value with each."""
        values = [_some(self.grids[index[0]], _coarse(self.tied)) for index in self.tied]
        candidates = []
        for point in itertools.product(*values):
            candidates.append(self.x.clone())
            for index, value in zip(self.tied, point, strict=True):
                candidates[-1][index] = value
        scores = torch.tensor(self.look(candidates), dtype=torch.float64)
        lowest = _local_minima(scores.reshape([len(each) for each in values]))
        return [(candidates[i], float(scores[i])) for i in lowest[:_STARTS]]

    def _down(self, starts: Sequence[tuple[Tensor, float]]) -> list[Descent]:
        """Descend from all points together. Drop descents that meet another, or fall behind without hope."""
        descents = [Descent(x, value, self._reach, self.low, self.high) for x, value in starts]
        for _ in range(_ITERATIONS):
            going = [descent for descent in descents if not descent.done]
            if not going:
                break
            for points_of in (Descent.stencil, Descent.lower):
                self._take(going, [points_of(descent) for descent in going])
            for descent in going:
                descent.end_iteration(self._tolerance())
            descents = self._worth_it(descents)
        self.unfinished = any(not descent.done for descent in descents)
        return descents

    def _take(self, descents: Sequence[Descent], points: Sequence[list[Tensor]]) -> None:
        """Score the points of all descents in one round."""
        together = [point for each in points for point in each]
        if not together:
            return
        values = iter(self.look(together))
        for descent, each in zip(descents, points, strict=True):
            descent.take(each, [next(values) for _ in each])

    def _worth_it(self, descents: Sequence[Descent]) -> list[Descent]:
        """Return the descents that are at different points, and are good or improve fast enough."""
        kept: list[Descent] = []
        for descent in sorted(descents, key=lambda each: each.value):
            behind = descent.value - self.value
            hopeless = behind > _AS_GOOD * max(1.0, abs(self.value)) and descent.gain < _HOPEFUL * behind
            if not hopeless and not any(descent.is_at(other) for other in kept):
                kept.append(descent)
        return kept

    def _sweep(self) -> bool:
        """Score every coordinate, and every kind, over its whole grid. Return whether anything was better."""
        before, sets = self.value, [[i] for i in range(len(self.grids))] if len(self.grids) > 1 else []
        candidates = []
        for index in [*sets, *(each for each in self.tied if len(each) > 1)]:
            rows = self.x.repeat(len(self.grids[index[0]]), 1)
            rows[:, index] = self.grids[index[0]].unsqueeze(1)
            candidates += list(rows)
        if candidates:
            self.look(candidates)
        return before - self.value > self._tolerance()

    def _compare(self, ended: Sequence[Descent]) -> None:
        """Remember another optimum that is equally good, if a ridge lies between it and the best."""
        margin = _AS_GOOD * max(1.0, abs(self.value))
        for descent in sorted(ended, key=lambda each: each.value):
            if descent.value - self.value > margin or ((descent.x - self.x).abs() <= self._reach).all():
                continue
            parts = torch.arange(1, _BETWEEN + 1).to(self.x) / (_BETWEEN + 1)
            if max(self.look([torch.lerp(self.x, descent.x, part) for part in parts])) - descent.value > margin:
                self.rival, self.other = Point.of(self.space.at(descent.x), descent.value), descent.x
                return

    def _require_any_difference(self, index: Sequence[int], scores: Sequence[float]) -> None:
        """Refuse a score that is the same at all values of a grid."""
        if len(scores) > 1 and max(scores) - min(scores) <= _ROUNDING * abs(max(scores)):
            raise NumericalError(
                f"the validation score is {scores[0]:.6g} at all {len(scores)} values of "
                f"{self.space.described([*index])}. The score does not depend on it; nothing changed. Take a loss= "
                "that uses variances or probabilities, or leave loss= out."
            )

    def found(self, method: str) -> Tuned:
        """Return the best point. Warn if a value is at the edge of its grid."""
        notes = self._edges()
        for note in notes:
            warn(note, BoundaryWarning)
        if self.unfinished:
            notes.append("the score was still improving: call tune again, which starts where this call ended.")
            warn(notes[-1])
        if self.rival is not None:
            notes.append(
                f"another optimum is as good: score {self.rival.score:.6g} at {self.rival}; taken was {self.value:.6g}."
                " More validation data, or narrower bounds=, would tell them apart."
            )
            warn(notes[-1])
        best = Point.of(self.space.at(self.x), self.value)
        points = tuple(Point.of(self.space.at(x), value) for x, value in self.seen)
        return Tuned(method, best, points, self.rounds, len(points), tuple(notes), self.converged)

    def _edges(self) -> list[str]:
        notes = []
        for index in self.tied:
            grid = self.grids[index[0]]
            for side, at in (("lower", self.x[index] <= grid[0]), ("upper", self.x[index] >= grid[-1])):
                here = [i for i, yes in zip(index, at.tolist(), strict=True) if yes and len(grid) > 1]
                if here:
                    kind = self.space.kinds[here[0]]
                    notes.append(
                        f"the best {self.space.described(here)} {float(self.x[here[0]].exp()):g} is the {side} edge of "
                        f"the grid; widen it with {self.widen(kind, side)}."
                    )
        return notes

    def _shown(self, x: Tensor) -> str:
        values = [f"{v:g}" for v in x.exp().unique(sorted=False).tolist()[:3]]
        return values[0] if len(values) == 1 else f"[{', '.join(values)}{', ...' if len(x) > 3 else ''}]"


class Guessed(Search):
    """Searches in the same way among guesses of the scores. They cost little, so that it ends later."""

    least_gain = _LEAST_GAIN / 100

    def __init__(self, of: Search, interpolated: Interpolated, start: Tensor) -> None:
        super().__init__(of.space, of.scores, start, of.grids, of.widen)
        self._guesses = interpolated.guesses

    def _scored(self, points: Sequence[Tensor]) -> Tensor:
        return self._guesses(points)

    def _down(self, starts: Sequence[tuple[Tensor, float]]) -> list[Descent]:
        """Descend, and from the best again with a large stencil, which follows a valley further."""
        ended = super()._down(starts)
        for _ in range(_RESTARTS):
            before = self.value
            ended += super()._down([(self.x, self.value)])
            if before - self.value <= self._tolerance():
                break
        return ended


def _spacing(grid: Tensor) -> Tensor:  # ()
    return (grid[1:] - grid[:-1]).max() if len(grid) > 1 else grid.new_zeros(())


def _coarse(tied: Sequence[Sequence[int]]) -> int:
    return _COARSE[min(len(tied), max(_COARSE))]


def _some(grid: Tensor, count: int) -> Tensor:
    """Return `count` values of a grid, evenly spread, with both ends."""
    return grid[torch.linspace(0, len(grid) - 1, min(count, len(grid))).round().long()]


def _local_minima(values: Tensor) -> list[int]:
    """Return where no neighbour is lower, diagonals included: flat indices, the lowest first."""
    around = values
    for dim, n in enumerate(values.shape):
        edge = torch.full_like(around.narrow(dim, 0, 1), math.inf)
        padded = torch.cat([edge, around, edge], dim)
        around = torch.stack([padded.narrow(dim, shift, n) for shift in range(3)]).amin(0)
    found = (values <= around).flatten().nonzero().flatten()
    return found[values.flatten()[found].argsort(stable=True)].tolist()


def _distinct(points: Sequence[tuple[Tensor, float]], spacing: Tensor) -> list[tuple[Tensor, float]]:
    """Return the best of each group of neighbouring points."""
    kept: list[tuple[Tensor, float]] = []
    for x, value in sorted(points, key=lambda point: point[1]):
        if not any(((x - other).abs() <= spacing).all() for other, _ in kept):
            kept.append((x, value))
    return kept
