"""Rescale any source on held-out data: one temperature for all logits, or one noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from laplace.errors import InputError, UnsupportedError, within
from laplace.inference.linearised import through_link
from laplace.inference.source import Source
from laplace.inference.targets import checked, labelled_rows
from laplace.likelihoods.base import Targets
from laplace.linalg.autocast import plainly
from laplace.linalg.sampling import Draws
from laplace.network.batches import training_batches
from laplace.network.loaders import held_out_batches
from laplace.predictive.links import Link
from laplace.predictive.mixtures import Outputs, averaged, joined
from laplace.predictive.outputs import OutputGaussian
from laplace.predictive.queries import Contrasts, Covariances
from laplace.predictive.reshape import Reshaper

_LEAST, _MOST = -6.0, 6.0  # of log T
_COARSE, _FINE = 25, 40  # values of the grid, then steps of the golden section
_GOLDEN = (math.sqrt(5) - 1) / 2


class Scalable(Source, Protocol):
    """Is a source with a network. Batches are moved to the network's device and dtype."""

    @property
    def model(self) -> nn.Module: ...


@dataclass(frozen=True)
class Rescaled:
    """Holds the result of `calibrate`.

    Attributes:
        nll_before: The mean negative log-likelihood of the held-out data before.
        nll: The same after.
        softmax_temperature: What the logits are divided by; 1 for a regression.
        sigma_noise: The noise of a regression. None for other likelihoods.
    """

    nll_before: float
    nll: float
    softmax_temperature: float
    sigma_noise: Tensor | None

    def __str__(self) -> str:
        what = f"softmax temperature {self.softmax_temperature:.3g}"
        if self.sigma_noise is not None:
            levels = self.sigma_noise.reshape(-1).tolist()
            what = "noise " + (f"{levels[0]:.3g}" if len(levels) == 1 else f"[{', '.join(f'{s:.3g}' for s in levels)}]")
        return f"Rescaled: {what}; the negative log-likelihood went from {self.nll_before:.4f} to {self.nll:.4f}"


@plainly
@torch.no_grad()
def rescale(source: Scalable, loader: Any, link_approx: str | None) -> Rescaled:
    """Return the best softmax temperature, or the best noise, on held-out data. The source runs over it once."""
    likelihood = source.likelihood
    if not (likelihood.has_logits or likelihood.has_noise):
        raise UnsupportedError(
            f"calibrate divides logits or sets the noise; {likelihood.name!r} has neither. Leave it out."
        )
    outputs, targets = _held_out(source, held_out_batches(loader))
    _, how = likelihood.link_of(link_approx)
    draws = Draws(100, torch.Generator().manual_seed(0))
    n = float(targets.total(torch.ones(len(outputs.mean), dtype=torch.float64, device=outputs.mean.device)))

    def nll(scale: float, noise: Tensor) -> float:
        at = outputs.scaled(1 / scale)
        p = None if how is None else averaged(at, partial(_linked, how, draws), likelihood.inverse_link)
        return -float(targets.total(likelihood.log_predictive(at, p, targets.y, noise).double())) / n

    level, scale = source.noise_level, source.softmax_temperature
    before = nll(scale, level)
    if likelihood.has_logits:
        found = math.exp(_minimum(lambda t: nll(math.exp(t), level)))
        return Rescaled(before, nll(found, level), found, None)
    start = float((targets.y.reshape(outputs.mean.shape) - outputs.mean).double().square().mean().sqrt())
    start = level.double().new_tensor(max(start, 1e-12))
    best = start * math.exp(_minimum(lambda t: nll(1.0, start * math.exp(t))))
    return Rescaled(before, nll(1.0, best), 1.0, likelihood.noise_at(best))


def _held_out(source: Scalable, loader: Any) -> tuple[Outputs, Targets]:
    """Return the outputs at all held-out inputs, and their labels."""
    likelihood, parts, labels = source.likelihood, [], []
    need = Contrasts(covariances=True, beside=True) if likelihood.response.only_differences else Covariances()
    for batch in training_batches(loader, source.model, source.frame.keys, False, "calibrate"):
        with within(f"batch {batch.index}"):
            shape = Reshaper()
            outputs = joined([part.outputs for part in shape.watch(source.outputs(batch.inputs, need))])
            given, kept = labelled_rows(shape.positions, batch, likelihood, outputs.mean.device)
            if kept is not None:
                outputs = outputs.map_rows(lambda t, kept=kept: t[kept])
            parts.append(outputs)
            labels.append(checked(outputs.mean, given, likelihood))
    if not parts or not sum(len(part.mean) for part in parts):
        raise InputError("the data to calibrate with holds no example; give at least one.")
    weighted = any(each.weights is not None for each in labels)
    each = [torch.ones(len(t.y), device=t.y.device) if t.weights is None else t.weights for t in labels]
    return joined(parts), Targets(torch.cat([t.y for t in labels]), torch.cat(each) if weighted else None)


def _linked(link: Link, draws: Draws, outputs: OutputGaussian) -> Tensor:
    return through_link(link, outputs, draws)[0]


def _minimum(function: Callable[[float], float]) -> float:
    """Return where a function has its minimum: the best of a grid, then the golden section around it."""
    step = (_MOST - _LEAST) / (_COARSE - 1)
    grid = [_LEAST + i * step for i in range(_COARSE)]
    best = min(grid, key=function)
    low, high = best - step, best + step
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = function(a), function(b)
    for _ in range(_FINE):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = function(b)
    return (low + high) / 2
