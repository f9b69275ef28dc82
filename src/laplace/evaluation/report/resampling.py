"""Bootstrap intervals: every score is computed again on resampled examples, all methods on the same ones.

A resample is a weight per row: how often its example was drawn. A score is a function of these weights, so differences
between methods are paired. If an example has several rows (positions), they are drawn together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weighted = Callable[[Array], float]
Key = TypeVar("Key", bound=Hashable)

LEVEL: Final = 0.95  # of the intervals
_WORK: Final = 2**25  # rows times resamples: with more rows, fewer resamples are drawn


@dataclass(frozen=True)
class Estimate:
    """Holds a score on all examples, and its 95 % bootstrap interval.

    Attributes:
        value: The score.
        low: The lower end.
        high: The upper end.
    """

    value: float
    low: float
    high: float

    def excludes(self, number: float) -> bool:
        """Return whether the interval lies on one side of a number."""
        return self.low > number or self.high < number

    def __sub__(self, number: float) -> Estimate:
        return Estimate(self.value - number, self.low - number, self.high - number)


@dataclass(frozen=True)
class Resamples:
    """Draws examples with replacement.

    Attributes:
        examples: The number of the example of each row, (N,).
        n: How many resamples are wanted; fewer are drawn of very many rows.
        seed: What they are drawn by.
    """

    examples: NDArray[np.int64]
    n: int
    seed: int

    def __iter__(self) -> Iterator[Array]:
        """Yield the weights of the rows, (N,)."""
        rng = np.random.default_rng(self.seed)
        count = int(self.examples.max()) + 1
        for _ in range(max(50, min(self.n, _WORK // len(self.examples)))):
            drawn = np.bincount(rng.integers(count, size=count), minlength=count)
            yield drawn[self.examples].astype(np.float64)


def bootstrap(scores: Mapping[Key, Weighted], resamples: Resamples) -> dict[Key, tuple[float, Array]]:
    """Return for each score its value on all rows, and its values on the resamples."""
    whole = np.ones(len(resamples.examples))
    values = {key: score(whole) for key, score in scores.items()}
    drawn = np.array([[score(w) for score in scores.values()] for w in resamples if w.any()])
    return {key: (values[key], drawn[:, i]) for i, key in enumerate(scores)}


def interval(
    value: float, drawn: Array, biased: bool = False, least: float = -np.inf, most: float = np.inf
) -> Estimate:
    """Return the estimate with its interval: quantiles of the resampled values.

    A calibration error is `biased`: a resample has more of it than the data, because noise adds to it. Its interval is
    mirrored at the value, which takes that bias out twice: once of the resamples, once of the data.
    """
    tail = (1 - LEVEL) / 2
    finite = drawn[np.isfinite(drawn)]
    if not len(finite) or not np.isfinite(value):
        return Estimate(float(value), float("nan"), float("nan"))
    low, high = np.quantile(finite, [tail, 1 - tail])
    if biased:
        low, high = 2 * value - high, 2 * value - low
    low, high = np.clip([low, high], least, most)
    return Estimate(float(value), float(min(low, value)), float(max(high, value)))
