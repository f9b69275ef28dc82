"""Write the predictions of a method as columns of numbers, with scores where the labels are known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, Normal

from laplace.likelihoods import Likelihood
from laplace.likelihoods.custom import ByAutograd
from laplace.linalg.sampling import Draws
from laplace.predictive.counts import UncertainCounts
from laplace.predictive.outputs import OutputGaussian
from laplace.predictive.prediction import Prediction

LEVELS: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # at which intervals are checked
KINDS: Final = ("classes", "labels", "regression", "counts", "other")
_GRID = 400  # points of the CRPS of counts; up to so many counts it is exact

Columns = dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Answers:
    """Holds predictions of one method at N rows. A row is an example, or one position of an example.

    Columns of all kinds: `epistemic` (N,) and `total` (N,), high where the method is unsure; with labels `nll` (N,).

        classes     p (N, C), confidence (N,), entropy (N,); y (N,), error (N,), brier (N,)
        labels      the same, with y (N, C); confidence and error are means over the labels
        regression  mean, sd (N, C); y (N, C), squared, absolute, crps (N,), pit (N, C), lower, upper, held (N, C, L)
        counts      as for regression

    `held` is the probability that the prediction itself gives to its interval: the level, but for counts, which jump.

    Attributes:
        kind: 'classes', 'labels', 'regression', 'counts', or 'other', of which only `nll` is known.
        columns: The numbers by name.
    """

    kind: str
    columns: Columns

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(self.columns["total"])

    @classmethod
    def cat(cls, parts: list[Answers]) -> Answers:
        """Join the answers to consecutive examples."""
        names = parts[0].columns
        return cls(parts[0].kind, {name: np.concatenate([part[name] for part in parts]) for name in names})


def kind_of(prediction: Prediction, likelihood: Likelihood) -> str:
    """Return what y is, or 'other' where only its log-probability is known."""
    kind = prediction.kind
    if isinstance(likelihood, ByAutograd):
        return "other"
    if kind == "counts" and not isinstance(prediction.distribution, UncertainCounts):
        return "other"
    return kind


def answers(
    prediction: Prediction, likelihood: Likelihood, sigma: Tensor, y: Tensor | None, rng: np.random.Generator
) -> Answers:
    """Return the columns of a prediction; without labels, those that need none."""
    kind = kind_of(prediction, likelihood)
    columns = _unlabelled(prediction, kind)
    if y is None:
        return Answers(kind, columns)
    p = prediction.mean if likelihood.response.links else None
    columns["nll"] = -_array(likelihood.log_predictive(prediction.outputs, p, y, sigma))
    if kind == "classes":
        columns |= _classes(columns["p"], y)
    elif kind == "labels":
        columns |= _labels(columns["p"], _array(likelihood.observed(y)))
    elif kind != "other":
        distribution = likelihood.distribution_at(prediction.outputs, p, y, sigma)
        columns |= _numbers(distribution, likelihood.observed(y), rng)
    return Answers(kind, columns)


def network_alone(likelihood: Likelihood, f: Tensor, sigma: Tensor) -> Prediction:  # (N, C)
    """Return the prediction of the network itself, whose outputs are certain."""
    response = likelihood.response
    p = response.inverse_link(f) if response.links else None
    draws = Draws(2, torch.Generator(f.device).manual_seed(0))  # all alike
    return response.prediction(OutputGaussian(f, torch.zeros_like(f)), p, sigma, response.link_named(None), draws)


def _unlabelled(prediction: Prediction, kind: str) -> Columns:
    epistemic = prediction.epistemic.double().clamp(min=0)  # from draws, it may round to below 0
    aleatoric = prediction.total.double() - epistemic
    if kind in ("classes", "labels"):
        p = _array(prediction.mean)
        sure = p.max(-1) if kind == "classes" else np.maximum(p, 1 - p).mean(-1)
        entropy = _array((epistemic + aleatoric).flatten(1).sum(1) if epistemic.dim() > 1 else epistemic + aleatoric)
        knowledge = _array(epistemic.flatten(1).sum(1) if epistemic.dim() > 1 else epistemic)
        return {"p": p, "confidence": sure, "entropy": entropy, "epistemic": knowledge, "total": 1 - sure}
    # Several outputs may have different units: their variances are added in units of their noise.
    noise = aleatoric if epistemic.shape[1] > 1 and (aleatoric > 0).all() else torch.ones_like(aleatoric)
    parts = [(value / noise).mean(1).sqrt() for value in (epistemic, epistemic + aleatoric)]
    return {"epistemic": _array(parts[0]), "total": _array(parts[1])}


def _classes(p: NDArray[np.float64], y: Tensor) -> Columns:
    index = _array(y.argmax(-1) if y.dim() > 1 else y).astype(np.int64)
    true = p[np.arange(len(p)), index]
    return {
        "y": index.astype(np.float64),
        "error": (p.argmax(-1) != index).astype(np.float64),
        "brier": np.square(p).sum(-1) - 2 * true + 1,
    }


def _labels(p: NDArray[np.float64], y: NDArray[np.float64]) -> Columns:
    y = (y > 0.5).astype(np.float64)
    return {"y": y, "error": ((p > 0.5) != y).mean(-1), "brier": np.square(p - y).mean(-1)}


def _numbers(distribution: Distribution, y: Tensor, rng: np.random.Generator) -> Columns:
    mean, sd = _array(distribution.mean), np.sqrt(_array(distribution.variance))
    truth = _array(y).reshape(mean.shape)
    off = truth - mean
    columns = {
        "y": truth,
        "mean": mean,
        "sd": sd,
        "squared": np.square(off).mean(-1),
        "absolute": np.abs(off).mean(-1),
    }
    own = _normal if isinstance(distribution, (Normal, MultivariateNormal)) else _counts
    return columns | own(distribution, mean, sd, truth, rng)


def _normal(_: Distribution, mean: NDArray, sd: NDArray, y: NDArray, rng: np.random.Generator) -> Columns:
    z = (y - mean) / sd
    half = torch.special.ndtri(torch.tensor([(1 + level) / 2 for level in LEVELS], dtype=torch.float64)).numpy()
    ends = sd[..., None] * half
    phi, below = np.exp(-np.square(z) / 2) / math.sqrt(2 * math.pi), _array(torch.special.ndtr(torch.from_numpy(z)))
    return {
        "crps": (sd * (z * (2 * below - 1) + 2 * phi - 1 / math.sqrt(math.pi))).mean(-1),
        "pit": below,
        "lower": mean[..., None] - ends,
        "upper": mean[..., None] + ends,
        "held": np.broadcast_to(np.array(LEVELS), ends.shape).copy(),
    }


def _counts(distribution: Distribution, mean: NDArray, sd: NDArray, y: NDArray, rng: np.random.Generator) -> Columns:
    """Return the columns of counts. Their PIT is drawn between P(< y) and P(<= y), so that it can be uniform."""
    assert isinstance(distribution, UncertainCounts)
    at = torch.from_numpy(y)
    below, upto = _array(distribution.cdf(at - 1)), _array(distribution.cdf(at))
    lower = np.stack([_array(distribution.icdf(torch.tensor((1 - level) / 2))) for level in LEVELS], -1)
    upper = np.stack([_array(distribution.icdf(torch.tensor((1 + level) / 2))) for level in LEVELS], -1)
    held = [
        _array(
            distribution.cdf(torch.from_numpy(upper[..., i])) - distribution.cdf(torch.from_numpy(lower[..., i] - 1))
        )
        for i in range(len(LEVELS))
    ]
    return {
        "crps": _crps(distribution, y).mean(-1),
        "pit": below + rng.random(y.shape) * (upto - below),
        "lower": lower,
        "upper": upper,
        "held": np.stack(held, -1),
    }


def _crps(distribution: UncertainCounts, y: NDArray) -> NDArray[np.float64]:  # (N, C)
    """Return the sum over k of (P(<= k) - [y <= k])^2, over a coarser grid where counts are large."""
    most = max(float(distribution.icdf(torch.tensor(0.9999)).max()), float(y.max())) + 1
    edges = np.unique(np.floor(np.linspace(0, most, min(_GRID, int(most)) + 1)))
    total = np.zeros_like(y)
    for k, after in pairwise(edges.tolist()):
        total += (after - k) * np.square(_array(distribution.cdf(torch.full(y.shape, k))) - (y <= k))
    return total


def _array(values: Tensor) -> NDArray[np.float64]:
    return values.detach().cpu().double().numpy()
