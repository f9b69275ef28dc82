"""Choose the scores of a report by the kind of label, with a value and a bootstrap interval for every method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from laplace.evaluation.report import weighted
from laplace.evaluation.report.answers import LEVELS, Answers
from laplace.evaluation.report.reading import LAPLACE, Reading
from laplace.evaluation.report.resampling import Array, Estimate, Resamples, Weighted, bootstrap, interval

_MOST: Final = 2**24  # probabilities of classes that are binned one by one

Make = Callable[[Answers, int], Weighted]


@dataclass(frozen=True)
class Score:
    """Holds one row of the table.

    Attributes:
        label: What it is called.
        make: Makes the score, a function of row weights, from the answers and the index of the level.
        better: 'higher', 'lower', or '' where neither is.
        share: Whether it is a share, written in per cent.
        biased: Whether resamples have more of it than the data.
        most: The largest value that it can have.
        note: What it says, in one sentence.
    """

    label: str
    make: Make
    better: str
    share: bool = False
    biased: bool = False
    most: float = np.inf
    note: str = ""


def scores_of(answers: Answers, level: float) -> dict[str, Score]:
    """Return the scores of these labels by key, the most important first."""
    kind, per_cent = answers.kind, f"{100 * level:g} %"
    found = dict(_OF_KIND[kind])
    if too_many(answers):
        found.pop("classwise_ece")
    if kind in ("regression", "counts"):
        found["coverage"] = Score(
            f"in {per_cent} interval", _inside, "", share=True, most=1, note=f"should be {per_cent}"
        )
        found["interval_score"] = Score(
            f"interval score, {per_cent}", _interval_score, "lower", note="width, plus a fine for what lies outside"
        )
        found["width"] = Score(
            f"width of {per_cent} interval", _width, "", note="narrower is better only at equal coverage"
        )
    return found


def too_many(answers: Answers) -> bool:
    """Return whether there are too many probabilities to bin all of them for each resample."""
    return answers.kind == "classes" and answers["p"].size > _MOST


@dataclass(frozen=True)
class Measured:
    """Holds the scores of all methods on one data set.

    Attributes:
        values: By method and key.
        gains: By method and key, how much better Laplace is than that method, on the same resamples.
        drawn: By method and key, the values on the resamples.
    """

    values: dict[str, dict[str, Estimate]]
    gains: dict[str, dict[str, Estimate]]
    drawn: dict[tuple[str, str], tuple[float, Array]]


def measure(reading: Reading, level: float, n_bootstrap: int, seed: int) -> Measured:
    """Return the scores of all methods, with intervals and with the gains of Laplace on the others."""
    scores = scores_of(reading.answers[LAPLACE], level)
    at = LEVELS.index(level)
    functions = {
        (method, key): score.make(answers, at)
        for method, answers in reading.answers.items()
        for key, score in scores.items()
    }
    drawn = bootstrap(functions, Resamples(reading.examples, n_bootstrap, seed))
    values: dict[str, dict[str, Estimate]] = {}
    gains: dict[str, dict[str, Estimate]] = {}
    for (method, key), (value, resampled) in drawn.items():
        score = scores[key]
        least = 0.0 if key not in ("nll", "gap") else -np.inf
        values.setdefault(method, {})[key] = interval(value, resampled, score.biased, least, score.most)
        if method != LAPLACE and score.better:
            mine, others = drawn[LAPLACE, key]
            sign = 1 if score.better == "higher" else -1
            gains.setdefault(method, {})[key] = interval(sign * (mine - value), sign * (others - resampled))
    return Measured(values, gains, drawn)


def point_values(answers: Mapping[str, Answers], level: float) -> dict[str, dict[str, float]]:
    """Return the scores of all methods without intervals."""
    at = LEVELS.index(level)
    return {
        method: {key: score.make(each, at)(np.ones(len(each))) for key, score in scores_of(each, level).items()}
        for method, each in answers.items()
    }


def _accuracy(answers: Answers, _: int) -> Weighted:
    return weighted.mean_of(1 - answers["error"])


def _column(name: str) -> Make:
    return lambda answers, _: weighted.mean_of(answers[name])


def _gap(answers: Answers, _: int) -> Weighted:
    return weighted.mean_of(answers["confidence"] - (1 - answers["error"]))


def _flat(answers: Answers) -> tuple[Array, Array, int]:
    """Return the probability of each label with whether it holds; of classes, that of the predicted one."""
    if answers.kind == "labels":
        return answers["p"].ravel(), answers["y"].ravel(), answers["p"].shape[1]
    return answers["confidence"], 1 - answers["error"], 1


def _calibration(make: Callable[[Array, Array], Weighted]) -> Make:
    def made(answers: Answers, _: int) -> Weighted:
        confidence, correct, each = _flat(answers)
        score = make(confidence, correct)
        return score if each == 1 else lambda w: score(np.repeat(w, each))

    return made


def _classwise(answers: Answers, _: int) -> Weighted:
    return weighted.classwise_error(answers["p"], answers["y"].astype(np.int64))


def _risk(answers: Answers, _: int) -> Weighted:
    return weighted.area_under_risk(answers["total"], loss_of(answers))


def loss_of(answers: Answers) -> Array:  # (N,)
    """Return the loss that selective prediction should avoid: errors, or the size of the residual."""
    return answers["error"] if answers.kind in ("classes", "labels") else answers["absolute"]


def _inside(answers: Answers, at: int) -> Weighted:
    y = answers["y"]
    held = (answers["lower"][..., at] <= y) & (y <= answers["upper"][..., at])
    return weighted.mean_of(held.mean(-1))


def _interval_score(answers: Answers, at: int) -> Weighted:
    y, lower, upper = answers["y"], answers["lower"][..., at], answers["upper"][..., at]
    missed = np.maximum(lower - y, 0) + np.maximum(y - upper, 0)
    return weighted.mean_of((upper - lower + 2 / (1 - LEVELS[at]) * missed).mean(-1))


def _width(answers: Answers, at: int) -> Weighted:
    return weighted.mean_of((answers["upper"][..., at] - answers["lower"][..., at]).mean(-1))


_NLL = Score("NLL", _column("nll"), "lower", note="negative log-likelihood per example, in nats")
_ERRORS: dict[str, Score] = {
    "ece": Score(
        "ECE", _calibration(weighted.calibration_error), "lower", True, True, 1, "mean gap of confidence and accuracy"
    ),
    "adaptive_ece": Score(
        "adaptive ECE", _calibration(weighted.adaptive_error), "lower", True, True, 1, "in bins of equal counts"
    ),
    "mce": Score(
        "MCE",
        _calibration(lambda p, correct: weighted.calibration_error(p, correct, largest=True)),
        "lower", True, False, 1, "the largest gap of a bin, however few it holds",
    ),
}  # fmt: skip
_AURC = Score("AURC", _risk, "lower", note="area under the risk-coverage curve")
_NUMBERS: dict[str, Score] = {
    "rmse": Score(
        "RMSE", lambda a, _: weighted.root_mean_of(a["squared"]), "lower", note="root mean squared error of the mean"
    ),
    "nll": _NLL,
    "crps": Score("CRPS", _column("crps"), "lower", note="distance of prediction and truth, in units of y"),
    "sharpness": Score(
        "sharpness",
        lambda a, _: weighted.root_mean_of(np.square(a["sd"]).mean(-1)),
        "",
        note="root mean variance; smaller is better only at equal calibration",
    ),
    "aurc": _AURC,
}
_OF_KIND: Final[dict[str, dict[str, Score]]] = {
    "classes": {
        "accuracy": Score("accuracy", _accuracy, "higher", True, most=1, note="share of predictions that are right"),
        "nll": _NLL,
        "brier": Score("Brier score", _column("brier"), "lower", note="squared distance to the truth, 0 to 2"),
        **_ERRORS,
        "classwise_ece": Score(
            "class-wise ECE", _classwise, "lower", True, True, 1, "mean over classes, of each class's probability"
        ),
        "gap": Score(
            "confidence minus accuracy", _gap, "", True, most=1, note="above 0 overconfident, below 0 underconfident"
        ),
        "aurc": _AURC,
    },
    "labels": {
        "accuracy": Score("accuracy", _accuracy, "higher", True, most=1, note="share of labels that are right"),
        "nll": _NLL,
        "brier": Score("Brier score", _column("brier"), "lower", note="squared distance to the truth, per label"),
        **_ERRORS,
        "gap": Score(
            "confidence minus accuracy", _gap, "", True, most=1, note="above 0 overconfident, below 0 underconfident"
        ),
        "aurc": _AURC,
    },
    "regression": _NUMBERS,
    "counts": _NUMBERS,
    "other": {"nll": _NLL},
}
