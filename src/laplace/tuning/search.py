"""The lowest score of a grid, and finer around it; of several hyperparameters one after the other.

A whole grid is one round: the data is read once for it. A coordinate's best grid value is refined between its
neighbours. Where there are several coordinates, the precisions of all tensors first move together; then sweeps move
one coordinate at a time, over its grid and ever closer around where it is, until a sweep gains nothing.
"""

from __future__ import annotations

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
        self.value, self.rounds = math.inf, 0
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
        for index in self.tied:
            self._refined(index, refinements)
        for sweep in range(_SWEEPS if len(self.grids) > 1 else 0):
            before = self.value
            for i, grid in enumerate(self.grids):
                self.move([i], torch.cat([grid, self._around(i, _spacing(grid) / 2**sweep)]))
            if before - self.value < _LEAST_GAIN * max(1.0, abs(before)):
                return

    def _refined(self, index: Sequence[int], times: int) -> None:
        """The grid of some coordinates together, then `times` between the neighbours of the best value."""
        grid = self.grids[index[0]]
        self.move(index, grid)
        step = _spacing(grid)
        for _ in range(times):
            self.move(index, self._around(index[0], step))
            step = step / _PARTS

    def found(self, method: str) -> Tuned:
        """The best point; values at the edge of their grid are warned of."""
        notes = self._edges()
        for note in notes:
            warn(note, BoundaryWarning)
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
