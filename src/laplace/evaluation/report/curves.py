"""Compute what the figures show, as plain numbers: reliability, PIT, coverage, risk, and error against uncertainty."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from laplace.evaluation.report.answers import LEVELS, Answers
from laplace.evaluation.report.resampling import Array
from laplace.evaluation.report.scores import loss_of
from laplace.evaluation.report.weighted import BINS, equal_width

Curve = dict[str, Any]  # lists of numbers by name, and a few numbers
_POINTS: Final = 60  # of a curve
_GROUPS: Final = 10  # of examples by their uncertainty
_DOTS: Final = 250  # of a scatter plot
_HISTOGRAM: Final = 20  # bins


def reliability(answers: Answers) -> Curve:
    """Return mean confidence, share that came true and count of each bin that is not empty."""
    if answers.kind == "labels":
        confidence, correct = answers["p"].ravel(), answers["y"].ravel()
    else:
        confidence, correct = answers["confidence"], 1 - answers["error"]
    index = equal_width(confidence)
    count = np.bincount(index, minlength=BINS)
    held = count > 0
    sums = [np.bincount(index, values, minlength=BINS)[held] / count[held] for values in (confidence, correct)]
    low, high = wilson(sums[1], count[held])
    return _lists(confidence=sums[0], accuracy=sums[1], count=count[held], low=low, high=high)


def pit(answers: Answers) -> Curve:
    """Return the share of rows in ten bins of the probability integral transform, with the band of a uniform one."""
    values = answers["pit"].ravel()
    count, edges = np.histogram(values.clip(0, 1), np.linspace(0, 1, 11))
    share = count / len(values)
    spread = 1.96 * np.sqrt(0.1 * 0.9 / len(values))
    return _lists(edges=edges, share=share) | {"low": max(0.0, 0.1 - spread), "high": 0.1 + spread}


def coverage(answers: Answers) -> Curve:
    """Return which share of the labels the central intervals hold, and which share they should hold."""
    y = answers["y"][..., None]
    inside = ((answers["lower"] <= y) & (y <= answers["upper"])).reshape(-1, len(LEVELS)).mean(0)
    return _lists(level=np.array(LEVELS), held=inside, meant=answers["held"].reshape(-1, len(LEVELS)).mean(0))


def risk(answers: Answers, by: str = "total") -> Curve:
    """Return the mean loss of the most certain share of the rows, against that share."""
    order, losses = np.unique(answers[by], return_inverse=True)[1], loss_of(answers)
    total = np.bincount(order)
    shared = np.repeat(np.bincount(order, losses) / total, total)
    mean = np.cumsum(shared) / np.arange(1, len(shared) + 1)
    at = np.unique(np.linspace(max(1, len(mean) // 20), len(mean), _POINTS).round().astype(int)) - 1
    return _lists(coverage=(at + 1) / len(mean), risk=mean[at]) | {"area": float(mean.mean())}


def error_by_epistemic(answers: Answers) -> Curve:
    """Return the mean loss of groups of equally many rows, by their epistemic uncertainty, with its interval."""
    losses, epistemic = loss_of(answers), answers["epistemic"]
    edges = np.unique(np.quantile(epistemic, np.linspace(0, 1, _GROUPS + 1)))
    index = np.searchsorted(edges[1:-1], epistemic, side="right") if len(edges) > 2 else np.zeros(len(losses), int)
    found: dict[str, list[float]] = {"epistemic": [], "loss": [], "low": [], "high": [], "count": []}
    for group in np.unique(index):
        own = losses[index == group]
        mean, error = own.mean(), own.std() / np.sqrt(len(own))
        low, high = (
            wilson(mean, np.array(len(own)))
            if answers.kind in ("classes", "labels")
            else (max(0.0, mean - 1.96 * error), mean + 1.96 * error)
        )
        values = (epistemic[index == group].mean(), mean, low, high, len(own))
        for name, value in zip(found, values, strict=True):
            found[name].append(float(value))
    return dict(found)


def scatter(answers: Answers, at: int, seed: int) -> Curve:
    """Return truth, prediction and the ends of its interval for some rows of the first output."""
    n = len(answers)
    chosen = np.arange(n) if n <= _DOTS else np.sort(np.random.default_rng(seed).choice(n, _DOTS, replace=False))
    parts = {"y": answers["y"], "mean": answers["mean"]}
    ends = {"lower": answers["lower"][..., at], "upper": answers["upper"][..., at]}
    return _lists(**{name: values[chosen, 0] for name, values in (parts | ends).items()})


def histograms(values: dict[str, Array], logarithmic: bool = False) -> Curve:
    """Return the share of each set of numbers in common bins."""
    everything = np.concatenate(list(values.values()))
    if logarithmic:
        positive = everything[everything > 0]
        if not len(positive):
            return {}
        low = np.quantile(positive, 0.002)
        everything, values = np.maximum(everything, low), {name: np.maximum(v, low) for name, v in values.items()}
    low, high = float(everything.min()), float(everything.max())
    if not high > low:
        return {}
    space = np.geomspace if logarithmic else np.linspace
    edges = space(low, high, _HISTOGRAM + 1)
    edges[0], edges[-1] = low, high
    return {
        "edges": edges.tolist(),
        "logarithmic": logarithmic,
        "share": {name: (np.histogram(v, edges)[0] / len(v)).tolist() for name, v in values.items()},
    }


def wilson(share: Any, count: Any) -> tuple[Any, Any]:
    """Return a 95 % interval of a proportion that stays inside [0, 1], even for a handful of examples."""
    z2 = 1.96**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = np.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return np.clip(centre - half, 0, 1), np.clip(centre + half, 0, 1)


def _lists(**arrays: np.ndarray) -> Curve:
    return {name: values.tolist() for name, values in arrays.items()}
