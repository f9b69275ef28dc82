"""Say what speaks against validation data: it was trained on, is too small, lacks classes, or is in other units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from laplace.checks import how_many
from laplace.likelihoods.bernoulli import Multilabel
from laplace.likelihoods.classes import OneOfSeveral
from laplace.network.overlap import overlap
from laplace.tuning.calibrated import Gain
from laplace.tuning.held_out import HeldOut
from laplace.tuning.profile import count

_FEW = 50  # examples
_OTHER_UNITS = 10  # times the residuals in training, and the noise
_LISTED = 8  # classes that are named


def remarks(la: object, val_loader: Iterable[Any], held_out: HeldOut, gain: Gain) -> list[str]:
    """Return what the user should know about the validation data."""
    found = [
        _trained_on(getattr(la, "training_data", None), val_loader),
        _few(held_out, gain),
        _missing_classes(held_out),
        _other_units(held_out),
    ]
    return [note for note in found if note]


def _trained_on(training: Any, validation: Any) -> str:
    shared = overlap(training, validation)
    if not shared:
        return ""
    return (
        f"val_loader {shared}. The network was trained on these labels, so its errors there are too small and the "
        "result is overconfident. Give data that it was not trained on."
    )


def _few(held_out: HeldOut, gain: Gain) -> str:
    n = count(held_out.weights, held_out.targets)
    if n >= _FEW:
        return ""
    low, high = gain.interval
    return (
        f"{how_many(round(n), 'validation example')} {'is' if round(n) == 1 else 'are'} few: the gain over the network "
        f"is {gain.mean:.3f} nats per example with a 95 % interval from {low:.3f} to {high:.3f}. Give a few hundred."
    )


def _missing_classes(held_out: HeldOut) -> str:
    likelihood, y = held_out.likelihood, held_out.targets
    if held_out.weights is not None:
        y = y[held_out.weights > 0]
    if isinstance(likelihood, Multilabel) and not likelihood.pairs:
        constant = (y.amin(0) == y.amax(0)).nonzero().flatten().tolist()
        if not constant:
            return ""
        which = "the label is the same" if y.shape[1] == 1 else f"labels {_listed(constant)} are the same"
        return f"{which} for all validation examples, so they say nothing about the other label."
    if not isinstance(likelihood, OneOfSeveral):
        return ""
    f = torch.zeros(1, held_out.posterior.fit.n_outputs, dtype=torch.float64, device=y.device)
    classes = likelihood.inverse_link(f).shape[1]
    seen = y.unique() if y.dim() == 1 else (y > 0).any(0).nonzero().flatten()  # class probabilities
    missing = sorted({*range(classes)} - {*seen.tolist()})
    if not missing:
        return ""
    return (
        f"{len(missing)} of {classes} classes are missing from the validation data: {_listed(missing)}. Their "
        "probabilities are calibrated by the other classes alone."
    )


def _other_units(held_out: HeldOut) -> str:
    here, there = _residual(held_out.data), _residual(held_out.posterior.fit.data)
    noise = float(held_out.posterior.sigma)
    if here is None or there is None or here <= _OTHER_UNITS * max(there, noise):
        return ""
    return (
        f"the residuals on val_loader have a standard deviation of {here:.3g}, in training it was {there:.3g}, and the "
        f"noise was {noise:.3g}. Are the labels in the units that the network was trained on?"
    )


def _residual(data: Mapping[str, Tensor]) -> float | None:
    """Return the standard deviation of a regression's residuals, from its sums."""
    if "count" not in data:
        return None
    return math.sqrt(2 * float(data["loss"]) / float(data["count"]))


def _listed(numbers: list[int]) -> str:
    shown, rest = ", ".join(map(str, numbers[:_LISTED])), len(numbers) - _LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown
