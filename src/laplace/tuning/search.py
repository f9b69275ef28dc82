"""The lowest score of a grid, and finer around it; of several hyperparameters one after the other.

A whole grid is one round: the data is read once for it. A coordinate's best grid value is refined between its
neighbours. Several kinds of hyperparameters trade off against each other, so the search begins with a coarse grid of
all of them together, the precisions of all tensors as one; then sweeps move one coordinate at a time, over its grid and
ever closer around where it is, and all kinds by a step, until a sweep gains nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from laplace.checks import whole_number
from laplace.errors import BoundaryWarning, NumericalError, OptionError, warn
from laplace.posterior import Posterior
from laplace.tuning.result import Point, Tuned
from laplace.tuning.space import Space

_PARTS = 5  # into which the space between neighbours of a grid is cut
_SWEEPS = 4  # over all coordinates, at most
_FEW, _MORE_SWEEPS = 3, 12  # coordinates up to which there may be more sweeps
_COARSE = 9  # values of each kind, all with all
_LEAST_GAIN = 1e-5  # of a sweep over all coordinates, relative to a score of 1 or more
_ROUNDING = 1e-10


def log_grid(low: float, high: float, size: int, base: float) -> Tensor:  # (size,)
    """Natural logarithms of `size` values from base^low to base^high, evenly spaced."""
    size = whole_number(size, "grid_size")
    try:
        runs = -math.inf < float(low) < float(high) < math.inf and 1 < float(base) < math.inf
    except (TypeError, ValueError, RuntimeError):
        runs = False
    if not runs:
        raise OptionError(
            f"the grid runs from {base}**{low} to {base}**{high}; needed: log_prior_prec_min < log_prior_prec_max and "
            "log_prior_prec_base > 1."
        )
    return torch.linspace(low, high, size, dtype=torch.float64) * math.log(base)


class Search:
    """Looks at points of a space and keeps the best."""

    def __init__(
        self,
        space: Space,
        scores: Callable[[Sequence[Posterior]], Tensor],
        start: Tensor,  # (K,)
        grids: Sequence[Tensor],  # a grid of logarithms for each coordinate
        widen: Callable[[str, str], str],  # (kind, 'lower' or 'upper') -> what to write for a wider grid
    ) -> None:
        self.space, self.scores, self.x, self.widen = space, scores, start, widen
        self.grids = [grid.to(start) for grid in grids]
        self.value, self.rounds, self.unfinished = math.inf, 0, False
        self.seen: list[tuple[Tensor, float]] = []

    @property
    def tied(self) -> list[list[int]]:
        """The coordinates by kind: the precisions of all tensors are one set."""
        kinds = self.space.kinds
        return [[i for i, kind in enumerate(kinds) if kind == each] for each in dict.fromkeys(kinds)]

    def look(self, candidates: Sequence[Tensor]) -> None:
        """Score points in one round and move to the best of them, if it is better than where we are."""
        values = self.scores([self.space.at(x) for x in candidates])
        self.rounds += 1
        self.seen += zip(candidates, values.tolist(), strict=True)
        if not values.isfinite().all():
            bad = (~values.isfinite()).nonzero().flatten().tolist()
            kinds = [f"{self.space.described(set_)} {self._shown(candidates[bad[0]][set_])}" for set_ in self.tied]
            raise NumericalError(
                f"the validation score is NaN or infinite at {', '.join(kinds)} ({len(bad)} of {len(values)} points); "
                "nothing changed."
            )
        best = int(values.argmin())
        if float(values[best]) < self.value - _ROUNDING * abs(float(values[best])) * math.isfinite(self.value):
            self.x, self.value = candidates[best], float(values[best])

    def move(self, index: Sequence[int], values: Tensor) -> None:
        """Look at the present point with some coordinates set to each of the values."""
        candidates = self.x.repeat(len(values), 1)
        candidates[:, index] = values.to(self.x).unsqueeze(1)
        self.look(list(candidates))

    def coordinatewise(self, refinements: int) -> None:
        """Grids of all kinds, each refined so many times; then one coordinate after the other where there are more."""
        if len(self.grids) > 1 and all(grid[0] <= x <= grid[-1] for x, grid in zip(self.x, self.grids, strict=True)):
            self.look([self.x])  # what is found is at least as good
        if len(self.tied) > 1:
            self._together([_some(self.grids[index[0]], _COARSE) for index in self.tied])
        for index in self.tied:
            self._refined(index, refinements)
        if len(self.grids) == 1:
            return
        for sweep in range(_MORE_SWEEPS if len(self.grids) <= _FEW else _SWEEPS):
            before, closer = self.value, 2 ** min(sweep, 5)
            for i, grid in enumerate(self.grids):
                self.move([i], torch.cat([grid, self._around(i, _spacing(grid) / closer)]))
            self._step(closer)
            if before - self.value < _LEAST_GAIN * max(1.0, abs(before)):
                return
        self.unfinished = True

    def _together(self, values: Sequence[Tensor]) -> None:
        """Look at the values of all kinds, each with each."""
        candidates = []
        for point in torch.cartesian_prod(*values):
            candidates.append(self.x.clone())
            for index, value in zip(self.tied, point, strict=True):
                candidates[-1][index] = value
        self.look(candidates)

    def _step(self, closer: int) -> None:
        """Look at a step of each kind up, down or not at all, all with all; precisions keep their ratios."""
        if len(self.tied) == 1:
            return
        candidates = []
        for signs in itertools.product((-1, 0, 1), repeat=len(self.tied)):
            candidates.append(self.x.clone())
            for index, sign in zip(self.tied, signs, strict=True):
                grid = self.grids[index[0]]
                candidates[-1][index] += sign * _spacing(grid) / closer
                candidates[-1][index] = candidates[-1][index].clamp(grid[0], grid[-1])
        self.look(candidates)

    def _refined(self, index: Sequence[int], times: int) -> None:
        """The grid of some coordinates together, then `times` between the neighbours of the best value."""
        grid = self.grids[index[0]]
        self.move(index, grid)
        self._require_any_difference(index, len(grid))
        step = _spacing(grid)
        for _ in range(times):
            self.move(index, self._around(index[0], step))
            step = step / _PARTS

    def _require_any_difference(self, index: Sequence[int], count: int) -> None:
        """Refuse a score that is the same at all values of the grid just looked at."""
        scores = [value for _, value in self.seen[-count:]]
        if count > 1 and max(scores) - min(scores) <= _ROUNDING * abs(max(scores)):
            raise NumericalError(
                f"the validation score is {scores[0]:.6g} at all {count} values of {self.space.described([*index])}. "
                "It does not depend on it; nothing changed. Take a loss= that looks at variances or probabilities, or "
                "leave it out."
            )

    def found(self, method: str) -> Tuned:
        """The best point; values at the edge of their grid are warned of."""
        notes = self._edges()
        for note in notes:
            warn(note, BoundaryWarning)
        if self.unfinished:
            notes.append("the score was still getting better: call tune again, which starts where this one ended.")
            warn(notes[-1])
        best = Point.of(self.space.at(self.x), self.value)
        points = tuple(Point.of(self.space.at(x), value) for x, value in self.seen)
        return Tuned(method, best, points, self.rounds, len(points), tuple(notes))

    def _around(self, i: int, step: float) -> Tensor:
        """Values between the two at distance `step` from where coordinate i is, without these and the middle."""
        low, high = self.grids[i][0], self.grids[i][-1]
        parts = torch.arange(1, _PARTS).to(self.x) / _PARTS
        values = self.x[i] + step * torch.cat([-parts.flip(0), parts])
        return values[(values >= low) & (values <= high)]

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


def _spacing(grid: Tensor) -> float:
    return float(grid[1] - grid[0]) if len(grid) > 1 else 0.0


def _some(grid: Tensor, count: int) -> Tensor:
    """So many values of a grid, evenly spread, with both ends."""
    return grid[torch.linspace(0, len(grid) - 1, min(count, len(grid))).round().long()]
