"""Minimise a score without derivatives, by fitting a quadratic around the current point and going to its minimum.

An iteration scores a stencil around the current point, fits a quadratic to the scores, and scores the minima of that
quadratic within several distances. If neither is better by more than the tolerance, the stencil shrinks; the descent
ends once it is small. All descents run together, so an iteration reads the data twice, however many there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_ALL = 3  # up to this many coordinates, the stencil has all corners
_PAIRS = 8  # up to this many, it has a corner for each pair, which is enough for a full quadratic
_SMALLEST = 1 / 24  # the smallest stencil, relative to the first
_SHRINK, _GROW = 4.0, 2.0  # of the stencil
_REACH = 4.0  # the longest step, in stencils
_DAMPINGS = (2.0**-8, 2.0**-4, 2.0**-2, 1.0, 4.0)  # of Newton's step, relative to the gradient


class Descent:
    """Holds one descent: its point, its score, and the size of its stencil."""

    def __init__(self, x: Tensor, value: float, spacing: Tensor, low: Tensor, high: Tensor) -> None:  # (K,) each
        self.x, self.value, self.first, self.low, self.high = x, value, spacing, low, high
        self.size, self.gain, self.done = 1.0, 0.0, False
        self._before, self._start = value, x
        self._seen: list[tuple[Tensor, float]] = []

    @property
    def step(self) -> Tensor:  # (K,)
        """Return the stencil's extent in each coordinate."""
        return self.first * self.size

    def stencil(self) -> list[Tensor]:
        """Return points one step away. For a coordinate at its bound, both are on the same side."""
        self._before, self._start, self._seen = self.value, self.x, [(self.x, self.value)]
        step = self.step
        up = torch.where(self.x + step <= self.high, 1.0, -2.0)
        down = torch.where(self.x - step >= self.low, -1.0, 2.0)
        sides = torch.stack([torch.zeros_like(up), up, down])
        points = [self.x + step * sides[list(choice), range(len(step))] for choice in _choices(len(step))]
        return [point.clamp(self.low, self.high) for point in points]

    def lower(self) -> list[Tensor]:
        """Return the minima of a quadratic through the stencil, within several distances."""
        moves = torch.stack([(x - self._start) / self.step.clamp(min=1e-300) for x, _ in self._seen])
        values = torch.tensor([value for _, value in self._seen]).to(moves)
        slope, bend = _quadratic(moves, values - values[0])
        outward = ((self._start <= self.low) & (slope > 0)) | ((self._start >= self.high) & (slope < 0))
        slope, free = slope.masked_fill(outward, 0.0), (~outward).to(slope)
        bend = bend * free * free.unsqueeze(1)
        size = float(slope.norm())
        if not size > 0:
            return []
        curvatures, axes = torch.linalg.eigh(bend)
        shift = float((-curvatures.min()).clamp(min=0))
        points = []
        for damping in (0.0, *_DAMPINGS):
            move = -axes @ ((axes.T @ slope) / (curvatures + shift + damping * size).clamp(min=1e-12 * size))
            move = move * min(1.0, _REACH / float(move.norm()))
            points.append((self._start + self.step * move).clamp(self.low, self.high))
        moved = self.x - self._start  # try going on in the direction of the stencil's best point
        if self.value < self._before:
            points.append((self._start + 2 * moved).clamp(self.low, self.high))
        return points

    def take(self, points: Sequence[Tensor], values: Sequence[float]) -> None:
        """Record the scores of points, and move to the best."""
        self._seen += zip(points, values, strict=True)
        for point, value in zip(points, values, strict=True):
            if value < self.value:
                self.x, self.value = point, value

    def end_iteration(self, tolerance: float) -> None:
        """Shrink the stencil if little was gained, or if the optimum is well inside it."""
        self.gain = self._before - self.value
        far = float(((self.x - self._start).abs() / self.step.clamp(min=1e-300)).max())
        if self.gain > tolerance and far >= 0.5:
            self.size = min(1.0, self.size * (_GROW if far > _GROW else 1.0))
            return
        self.done = self.gain <= tolerance and self.size <= _SMALLEST
        self.size = self.size / _SHRINK

    def is_at(self, other: Descent) -> bool:
        """Return whether both descents are practically at the same point."""
        return bool(((self.x - other.x).abs() <= torch.maximum(self.step, other.step)).all())


def _choices(k: int) -> list[tuple[int, ...]]:
    """Return the side (0: none, 1, 2) of each coordinate on which each stencil point is."""
    if k <= _ALL:
        return [choice for choice in itertools.product((0, 1, 2), repeat=k) if any(choice)]
    single = [tuple(side if i == j else 0 for i in range(k)) for j in range(k) for side in (1, 2)]
    if k > _PAIRS:
        return single
    return single + [tuple(1 if i in pair else 0 for i in range(k)) for pair in itertools.combinations(range(k), 2)]


def _quadratic(moves: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:  # (M, K), (M,) -> (K,), (K, K)
    """Return slope and second derivatives of the best fitting quadratic through 0; separable if points are few."""
    k = moves.shape[1]
    pairs = [(i, i) for i in range(k)] + (list(itertools.combinations(range(k), 2)) if k <= _PAIRS else [])
    i, j = (torch.tensor(side, device=moves.device) for side in zip(*pairs, strict=True))
    scale = torch.where(i == j, 0.5, 1.0).to(moves)
    columns = torch.cat([moves, moves[:, i] * moves[:, j] * scale], 1)
    found = torch.linalg.pinv(columns) @ values  # least norm if a coordinate cannot move
    bend = moves.new_zeros(k, k)
    bend[i, j] = bend[j, i] = found[k:]
    return found[:k], bend
