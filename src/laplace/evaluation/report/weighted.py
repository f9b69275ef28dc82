"""Scores as functions of row weights, in numpy: sorted and binned once, so that a resample costs one pass.

With all weights 1 each equals its namesake in `laplace.evaluation`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from laplace.evaluation.report.resampling import Array, Weighted

BINS: Final = 15
Index = NDArray[np.int64]


def mean_of(column: Array) -> Weighted:  # (N,)
    """Return the weighted mean of one number per row."""
    return lambda w: float(w @ column / w.sum())


def root_mean_of(column: Array) -> Weighted:  # (N,)
    """Return the root of the weighted mean."""
    return lambda w: float(np.sqrt(w @ column / w.sum()))


def calibration_error(confidence: Array, correct: Array, largest: bool = False) -> Weighted:  # (N,), (N,)
    """Return the expected calibration error over equal-width bins, or the `largest` gap of a bin."""
    index = equal_width(confidence)
    gap = correct - confidence

    def score(w: Array) -> float:
        sums = np.bincount(index, w * gap, minlength=BINS)
        if not largest:
            return float(np.abs(sums).sum() / w.sum())
        count = np.bincount(index, w, minlength=BINS)
        return float(np.abs(sums[count > 0] / count[count > 0]).max())

    return score


def adaptive_error(confidence: Array, correct: Array) -> Weighted:  # (N,), (N,)
    """Return the expected calibration error over bins between quantiles of the confidence."""
    order = np.argsort(confidence, kind="stable")
    ranked, gap = confidence[order], (correct - confidence)[order]

    def score(w: Array) -> float:
        w = w[order]
        upto = np.cumsum(w)  # rows up to here, each as often as it was drawn
        place = np.linspace(0, 1, BINS + 1)[1:-1] * (upto[-1] - 1)
        below, above = (ranked[np.searchsorted(upto, k, side="right")] for k in (np.floor(place), np.ceil(place)))
        edges = below + (above - below) * (place - np.floor(place))  # as np.quantile interpolates
        index = np.searchsorted(edges, ranked, side="left")
        return float(np.abs(np.bincount(index, w * gap, minlength=BINS)).sum() / upto[-1])

    return score


def classwise_error(p: Array, y: Index) -> Weighted:  # (N, C), (N,)
    """Return the mean over classes of the calibration error of that class's probability, over equal-width bins."""
    n, c = p.shape
    index = (equal_width(p) + BINS * np.arange(c)).ravel()
    gap = -p
    gap[np.arange(n), y] += 1
    flat = gap.ravel()

    def score(w: Array) -> float:
        sums = np.bincount(index, np.repeat(w, c) * flat, minlength=BINS * c)
        return float(np.abs(sums).sum() / w.sum() / c)

    return score


def area_under_risk(uncertainty: Array, loss: Array) -> Weighted:  # (N,), (N,)
    """Return the area under the risk-coverage curve: the mean over k of the mean loss of the k most certain rows.

    Rows of equal uncertainty share their mean loss, as if their order were drawn.
    """
    _, group = np.unique(uncertainty, return_inverse=True)
    order = np.argsort(group, kind="stable")
    sorted_group, sorted_loss = group[order], loss[order]

    def score(w: Array) -> float:
        w = w[order]
        total = np.bincount(sorted_group, w)
        shared = np.bincount(sorted_group, w * sorted_loss) / np.maximum(total, 1e-300)
        losses = np.repeat(shared, total.astype(np.int64))
        return float((np.cumsum(losses) / np.arange(1, len(losses) + 1)).mean())

    return score


def equal_width(values: Array) -> Index:
    """Return the equal-width bin of each value in [0, 1]; a bin holds its upper edge."""
    return np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], values, side="left")


class Detector:
    """Scores how well outside is separated from inside, as functions of the weights of both. Higher means outside."""

    def __init__(self, inside: Array, outside: Array) -> None:  # (N,), (M,)
        values, group = np.unique(np.concatenate([inside, outside]), return_inverse=True)
        self.inside, self.outside, self.count = group[: len(inside)], group[len(inside) :], len(values)

    def scores(self, w_in: Array, w_out: Array) -> tuple[float, float, float]:
        """Return AUROC, AUPR (outside is the positive class), and the false positives at 95 % of outside caught."""
        n = np.bincount(self.inside, w_in, minlength=self.count)[::-1]
        m = np.bincount(self.outside, w_out, minlength=self.count)[::-1]
        false, caught = np.cumsum(n), np.cumsum(m)  # flagged by each threshold, from the highest score down
        area = float(m @ (false[-1] - false + n / 2) / (false[-1] * caught[-1]))
        flagged = false + caught
        precision = np.divide(caught, flagged, out=np.zeros_like(caught), where=flagged > 0)
        at = int(np.searchsorted(caught, 0.95 * caught[-1] - 1e-9))
        return area, float(m @ precision / caught[-1]), float(false[min(at, self.count - 1)] / false[-1])
