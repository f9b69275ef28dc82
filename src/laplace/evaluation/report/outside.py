"""Inputs from outside the distribution: which score of which method tells them from the test data, and how well."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from laplace.evaluation.report.answers import Answers
from laplace.evaluation.report.curves import Curve, histograms
from laplace.evaluation.report.reading import LAPLACE, NETWORK, SCALED, Reading
from laplace.evaluation.report.resampling import Array, Estimate, Resamples, interval
from laplace.evaluation.report.weighted import Detector

MEASURES: Final = ("auroc", "aupr", "fpr95")
LABELS: Final = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR95"}


class Detected:
    """Holds how well each score separates one set of inputs from the test data.

    Attributes:
        name: What the set is called.
        values: By method and score ('confidence', 'entropy', 'epistemic', 'total'), the three measures.
        best: The method and score with the largest AUROC.
        equal: Those whose AUROC is not lower than the best one's beyond chance.
        n: How many examples it has.
    """

    def __init__(self, name: str, inside: Reading, outside: Reading, n_bootstrap: int, seed: int) -> None:
        self.name, self.n = name, outside.n
        detectors = {
            (method, score): Detector(values, uncertainties(outside.answers[method])[score])
            for method, answers in inside.answers.items()
            for score, values in uncertainties(answers).items()
            if useful(method, score)
        }
        whole = np.ones(len(inside.examples)), np.ones(len(outside.examples))
        value = {key: detector.scores(*whole) for key, detector in detectors.items()}
        pairs = zip(
            Resamples(inside.examples, n_bootstrap, seed),
            Resamples(outside.examples, n_bootstrap, seed + 1),
            strict=False,
        )
        drawn = np.array([[each.scores(*pair) for each in detectors.values()] for pair in pairs])
        self.values: dict[tuple[str, str], dict[str, Estimate]] = {
            key: {
                measure: interval(value[key][m], drawn[:, i, m], least=0, most=1) for m, measure in enumerate(MEASURES)
            }
            for i, key in enumerate(detectors)
        }
        keys = list(detectors)
        best = max(range(len(keys)), key=lambda i: value[keys[i]][0])
        self.best = keys[best]
        self.equal = [
            key
            for i, key in enumerate(keys)
            if interval(value[self.best][0] - value[key][0], drawn[:, best, 0] - drawn[:, i, 0]).low <= 0
        ]


def uncertainties(answers: Answers) -> dict[str, Array]:
    """Return the scores that may tell outside from inside. Higher means out."""
    if answers.kind in ("classes", "labels"):
        return {
            "confidence": 1 - answers["confidence"],
            "entropy": answers["entropy"],
            "epistemic": answers["epistemic"],
        }
    return {"total": answers["total"], "epistemic": answers["epistemic"]}


def useful(method: str, score: str) -> bool:
    """Return whether a method has this score. The network alone has no epistemic uncertainty."""
    return not (method in (NETWORK, SCALED) and score == "epistemic")


def drawn(inside: Reading, outside: dict[str, Reading]) -> dict[str, Curve]:
    """Return histograms of test data and outside data: the network's confidence, and Laplace's epistemic part."""
    readings = {"test data": inside, **outside}
    found = {}
    if inside.kind in ("classes", "labels"):
        found["confidence"] = histograms({name: r.answers[NETWORK]["confidence"] for name, r in readings.items()})
    found["epistemic"] = histograms({name: r.answers[LAPLACE]["epistemic"] for name, r in readings.items()}, True)
    return {name: curve for name, curve in found.items() if curve}


def table(found: list[Detected]) -> list[dict[str, Any]]:
    """Return the measures as rows of the JSON."""
    return [
        {
            "set": each.name,
            "examples": each.n,
            "method": method,
            "score": score,
            "best": (method, score) == each.best,
            **{name: vars(estimate) for name, estimate in measures.items()},
        }
        for each in found
        for (method, score), measures in each.values.items()
    ]
