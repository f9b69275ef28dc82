"""What is measured of a prediction: of classes on known and unknown inputs, of regression in 90 % intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal

from laplace.evaluation import accuracy, auroc, brier, ece, nll

LEVEL = 0.9


@dataclass(frozen=True)
class Classes:
    """Probabilities of N inputs, and the mutual information of class and weights where there is a posterior."""

    probs: Tensor  # (N, C)
    epistemic: Tensor | None = None  # (N,)

    def certainty(self) -> dict[str, Tensor]:
        """Return three scores that are high where the input looks known."""
        p = self.probs.double()
        found = {"confidence": p.amax(-1), "entropy": torch.special.entr(p).sum(-1).neg()}
        return found if self.epistemic is None else found | {"epistemic": self.epistemic.double().neg()}


@dataclass(frozen=True)
class Values:
    """Means and standard deviations of N targets, noise included."""

    mean: Tensor  # (N, 1)
    spread: Tensor  # (N, 1)


def of_classes(
    predict: Callable[[Tensor], Classes],
    x: Tensor,
    y: Tensor,
    outside: Mapping[str, Tensor],
) -> dict:
    """Return NLL, ECE, Brier score and accuracy, and the AUROC of each score against each kind of unknown input."""
    inside = predict(x)
    probs = inside.probs.double()
    probs = probs / probs.sum(-1, keepdim=True)
    known = inside.certainty()
    ood = {}
    for name, other in outside.items():
        unknown = predict(other).certainty()
        ood[name] = {score: auroc(-known[score], -unknown[score]) for score in known}
    measured = {"nll": nll(probs, y), "ece": ece(probs, y), "brier": brier(probs, y), "accuracy": accuracy(probs, y)}
    return measured | {"confidence": float(probs.amax(-1).mean()), "ood": ood}


def of_values(found: Values, y: Tensor) -> dict:
    """Return NLL and RMSE in units of the targets' standard deviation, coverage and mean width of the interval."""
    mean, spread, y = found.mean.double(), found.spread.double(), y.double()
    z = float(Normal(0.0, 1.0).icdf(torch.tensor((1 + LEVEL) / 2)))
    return {
        "nll": float(-Normal(mean, spread).log_prob(y).mean()),
        "rmse": math.sqrt(float((mean - y).square().mean())),
        "coverage": float(((mean - y).abs() <= z * spread).double().mean()),
        "width": float(2 * z * spread.mean()),
    }
