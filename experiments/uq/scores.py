"""What is measured: class probabilities on known and shifted inputs, and how unknown inputs are told apart."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from laplace.evaluation import accuracy, auroc, brier, ece, nll
from laplace.predictive import Prediction


class Predicts(Protocol):
    """Gives whole predictions, or probabilities alone."""

    def predict(self, x: Tensor) -> Prediction: ...

    def mean(self, x: Tensor) -> Tensor: ...


def scores(
    method: Predicts,
    labelled: Mapping[str, tuple[Tensor, Tensor]],
    outside: Mapping[str, Tensor],
    known: str,
) -> dict:
    """Return the scores on each set. Unknown inputs are told apart from those of the set `known`."""
    start, found, inside = time.process_time(), {}, {}
    for name, (x, y) in labelled.items():
        prediction = method.predict(x) if name == known else None
        p = _normalised(method.mean(x) if prediction is None else prediction.mean)
        found[name] = {"nll": nll(p, y), "ece": ece(p, y), "brier": brier(p, y), "accuracy": accuracy(p, y)}
        found[name]["confidence"] = float(p.amax(-1).mean())
        if prediction is not None:
            inside = _uncertainty(prediction)
    apart = {}
    for name, x in outside.items():
        unknown = _uncertainty(method.predict(x))
        apart[name] = {score: auroc(inside[score], unknown[score]) for score in inside}
        apart[name]["mean_confidence"] = 1 - float(unknown["confidence"].mean())
    return {"sets": _rounded(found), "ood": _rounded(apart), "seconds": round(time.process_time() - start, 2)}


def averaged(rows: list[dict]) -> dict:
    """Return the mean of all numbers in rows of the same form."""
    first = rows[0]
    if isinstance(first, dict):
        return {key: averaged([row[key] for row in rows]) for key in first}
    return sum(rows) / len(rows)  # type: ignore[return-value, arg-type]


def _normalised(p: Tensor) -> Tensor:
    p = p.double()
    return p / p.sum(-1, keepdim=True)


def _uncertainty(prediction: Prediction) -> dict[str, Tensor]:
    """Return scores that are high where an input looks unknown; 'confidence' is that of the other classes.

    One network without a posterior has no epistemic part.
    """
    p, epistemic = _normalised(prediction.mean), prediction.epistemic.double()
    found = {"confidence": 1 - p.amax(-1), "entropy": torch.special.entr(p).sum(-1)}
    return found if float(epistemic.abs().max()) < 1e-12 else found | {"epistemic": epistemic}


def _rounded(values: dict) -> dict:
    return {key: _rounded(v) if isinstance(v, dict) else round(v, 5) for key, v in values.items()}
