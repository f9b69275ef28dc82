"""Find the lowest point of a function of one number, a few values at a time, so that many searches share each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_STEPS = 4  # how many points are added beyond an end of the grid
_FLANK = 0.05  # distance of the points beside a parabola's lowest point, relative to the interval
_INWARDS = (0.02, 0.1, 0.5)  # where the points are that are added inside an end that may not be passed
_ROUNDS = 40


@dataclass
class Line:
    """Searches one number x: a grid, steps beyond its ends while they are lower, then parabolas.

    The function should have one minimum between neighbouring points of the grid. The result is within `tolerance` of
    it.

    Attributes:
        grid: The first points, ascending.
        low: The smallest x.
        high: The largest x.
        tolerance: How near to the minimum the search ends.
        smooth: Whether to trust a parabola: the search ends once its lowest point was already evaluated. Otherwise it
            ends once points on both sides are within `tolerance`.
        seen: The value at every point that was asked for.
    """

    grid: Sequence[float]
    low: float
    high: float
    tolerance: float = 1e-3
    smooth: bool = False
    seen: dict[float, float] = field(default_factory=dict)
    rounds: int = 0

    @property
    def best(self) -> float:
        """Return the lowest point so far."""
        return min(self.seen, key=lambda x: self.seen[x])

    @property
    def value(self) -> float:
        """Return the value at the lowest point so far."""
        return self.seen[self.best]

    @property
    def at_edge(self) -> bool:
        """Return whether the lowest point is the smallest or the largest x that is allowed."""
        return self.best <= self.low or self.best >= self.high

    def take(self, points: Sequence[float], values: Sequence[float]) -> None:
        """Take in the values at the points of `ask`."""
        self.seen.update(zip(points, values, strict=True))
        self.rounds += 1

    def ask(self) -> list[float]:
        """Return the points whose values are needed next. None are needed where the search has ended."""
        if not self.seen:
            return list(self.grid)
        points = sorted(self.seen)
        at = points.index(self.best)
        if len(points) < 2 or self.rounds >= _ROUNDS:
            return []
        if at in (0, len(points) - 1):
            end, before = (points[0], points[1]) if at == 0 else (points[-1], points[-2])
            if self.low < end < self.high:
                beyond = [end + (i + 1) * (end - before) for i in range(_STEPS)]
                return sorted({min(max(x, self.low), self.high) for x in beyond} - {end})
            width = before - end
            return [] if abs(width) <= self.tolerance else sorted(end + width * part for part in _INWARDS)
        a, b, c = points[at - 1 : at + 2]
        if c - a <= 2 * self.tolerance:
            return []
        flank = max(_FLANK * (c - a), 0.9 * self.tolerance)
        middle = min(max(self._vertex(a, b, c), a + flank), c - flank)
        if self.smooth:
            return [] if abs(middle - b) <= self.tolerance else [middle]
        found = {middle - flank, middle, middle + flank} - {a, b, c}
        inside = sorted(x for x in found if a < x < c and min(abs(x - y) for y in (a, b, c)) > 0.1 * self.tolerance)
        return inside or [(a + b) / 2, (b + c) / 2]

    def _vertex(self, a: float, b: float, c: float) -> float:
        """Return the lowest point of the parabola through three points."""
        left, right = (b - a) * (self.seen[b] - self.seen[c]), (b - c) * (self.seen[b] - self.seen[a])
        if left == right:
            return b
        return b - 0.5 * ((b - a) * left - (b - c) * right) / (left - right)
