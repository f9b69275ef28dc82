"""Test whether new examples are covered as often as exchangeable ones would be.

Given the calibration examples, the coverage of new ones is a random number with the distribution Beta(k, n + 1 - k),
with k = ceil((n + 1) level) (Vovk, 2012); so the number of covered ones among m is beta-binomial. With ties in the
scores, the coverage is at least that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laplace.conformal.quantiles import rank_of


@dataclass(frozen=True)
class Cell:
    """Holds the coverage of the examples that share a threshold: of one output, of one class, or of all.

    Attributes:
        name: Which examples: 'all', 'output 2', 'class 3'.
        n_calibration: How many calibration examples made the threshold.
        n: How many examples were tested.
        covered: How many of these lie in their set.
        expected: The central 95 % range of the coverage of so many exchangeable examples.
        p_value: The probability that so few or fewer of them would be covered.
    """

    name: str
    n_calibration: int
    n: int
    covered: int
    expected: tuple[float, float]
    p_value: float

    @property
    def coverage(self) -> float:
        """Return the share of examples that lie in their set."""
        return self.covered / self.n


@dataclass(frozen=True)
class CoverageTest:
    """Holds the result of `Conformal.coverage_test` on labelled examples.

    Attributes:
        level: The level that was promised.
        coverage: The share of examples, or of their outputs, that lie in their set.
        size: The mean number of classes in a set, or the mean width of an interval.
        cells: The same for the examples that share a threshold.
    """

    level: float
    coverage: float
    size: float
    cells: tuple[Cell, ...]

    @property
    def n(self) -> int:
        """Return how many examples, or outputs of examples, were tested."""
        return sum(cell.n for cell in self.cells)

    @property
    def p_value(self) -> float:
        """Return the probability of coverage as low as this, or lower, if the examples are exchangeable.

        With several cells, the smallest of their p-values times their number (Bonferroni). A small one, below 0.01 say,
        means that these examples are not like the calibration examples, and that nothing is guaranteed for them.
        """
        return min(1.0, len(self.cells) * min(cell.p_value for cell in self.cells))

    @property
    def holds(self) -> bool:
        """Return whether the coverage is not significantly too low: a p-value of at least 0.01."""
        return self.p_value >= 0.01

    def __str__(self) -> str:
        low, high = self.cells[0].expected
        usual = f", expected {low:.3f} to {high:.3f}" if len(self.cells) == 1 else f" in {len(self.cells)} cells"
        verdict = "holds" if self.holds else "does not hold: these examples are not like the calibration examples"
        return (
            f"coverage {self.coverage:.3f} of {self.n} at level {self.level:g}{usual}; p-value {self.p_value:.2g}: "
            f"{verdict}. Mean size {self.size:.3g}."
        )


def cells_of(
    covered: Tensor,  # (N, G)
    labels: Tensor | None,  # (N, G) true classes, if thresholds go by class
    counts: Sequence[Sequence[int]],  # G of 1, or of K: how many calibration examples each threshold has
    level: float,
) -> tuple[Cell, ...]:
    """Return the coverage of the examples of each threshold. Thresholds without an example are left out."""
    found = []
    several = len(counts) > 1
    for g, by_class in enumerate(counts):
        for k, n_calibration in enumerate(by_class):
            chosen = covered[:, g] if labels is None else covered[labels[:, g] == k, g]
            words = [f"output {g}"] * several + [f"class {k}"] * (labels is not None)
            if len(chosen):
                found.append(_cell(", ".join(words) or "all", n_calibration, chosen, level))
    return tuple(found)


def _cell(name: str, n_calibration: int, covered: Tensor, level: float) -> Cell:
    m, hits = len(covered), int(covered.sum())
    k = rank_of(n_calibration, level)
    if k > n_calibration:  # an infinite threshold covers all
        return Cell(name, n_calibration, m, hits, (1.0, 1.0), 1.0)
    cdf = beta_binomial_cdf(m, k, n_calibration + 1 - k)
    low, high = np.searchsorted(cdf, [0.025, 0.975])
    return Cell(name, n_calibration, m, hits, (int(low) / m, int(high) / m), float(cdf[hits]))


def beta_binomial_cdf(m: int, a: float, b: float) -> np.ndarray:  # (m + 1,)
    """Return P(H <= h) for h = 0..m, where H is binomial with m trials and a probability drawn from Beta(a, b)."""
    h = torch.arange(m + 1, dtype=torch.float64)
    trials, first, second = (torch.tensor(float(value), dtype=torch.float64) for value in (m, a, b))

    def log_beta(x: Tensor, y: Tensor) -> Tensor:
        return x.lgamma() + y.lgamma() - (x + y).lgamma()

    ways = (trials + 1).lgamma() - (h + 1).lgamma() - (trials - h + 1).lgamma()
    log_p = ways + log_beta(h + first, trials - h + second) - log_beta(first, second)
    return log_p.exp().cumsum(0).clamp(max=1).numpy()
