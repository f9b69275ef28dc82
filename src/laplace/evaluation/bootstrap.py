"""Compute how much a score would vary with another test set of the same size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace.checks import flag, generator_or_none, whole_number
from laplace.errors import InputError, OptionError
from laplace.evaluation.arrays import Values, share_of, tensor_of


@dataclass(frozen=True)
class Bootstrap:
    """Holds a score with its interval. Made by `bootstrap`.

    Attributes:
        value: The score on all examples.
        lower: Lower end of the interval.
        upper: Upper end of the interval.
        level: The level of the interval.
        std: Standard deviation of the score over the resamples, its standard error.
        n_resamples: How many resamples were drawn.
    """

    value: float
    lower: float
    upper: float
    level: float
    std: float
    n_resamples: int

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.lower:.4g}, {self.upper:.4g}]"


def bootstrap(
    metric: Callable[..., float],
    *data: Values,  # (N, ...) each
    level: float = 0.95,
    n_resamples: int = 1000,
    paired: bool = True,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Bootstrap:
    """Return a score with a percentile bootstrap interval: the score of test sets drawn with replacement from this one.

        bootstrap(ece, probs, y, n_bins=10)
        bootstrap(auroc, scores_in, scores_out, paired=False)
        bootstrap(lambda p, q, y: nll(p, y) - nll(q, y), p_laplace, p_network, y)   # of a difference

    The interval holds what another test set of this size would give; it knows nothing of training again. Scores that
    cannot be negative and are close to zero, as the ECE of a calibrated model, are biased upwards in resamples. Costs
    `n_resamples` calls of the metric.

    Args:
        metric: Called with the data, and returns a number.
        *data: Arrays with the examples in front.
        level: The level of the interval, between 0 and 1.
        n_resamples: How many test sets are drawn.
        paired: Whether row n of all arrays belongs to the same example. False draws each array by itself.
        generator: The random generator. A new one with seed 0 by default, so that a call gives the same interval twice.
        **options: Passed on to the metric.

    Returns:
        A `Bootstrap`.

    Raises:
        InputError: arrays are empty, paired ones have different lengths, or the level is not between 0 and 1.
        OptionError: the metric is not callable, or does not return a number.
    """
    if not callable(metric):
        raise OptionError(f"metric={metric!r} must be a function, as in bootstrap(ece, probs, y).")
    tails = (1 - share_of(level, "level").reshape(())) / 2
    n_resamples, paired = whole_number(n_resamples, "n_resamples", least=2), flag(paired, "paired")
    arrays = [tensor_of(values, f"data[{i}]") for i, values in enumerate(data)]
    lengths = [len(array) if array.dim() else 0 for array in arrays]
    if not lengths or 0 in lengths:
        raise InputError("bootstrap needs at least one array with examples in front: bootstrap(ece, probs, y).")
    if paired and len(set(lengths)) > 1:
        raise InputError(
            f"paired arrays must have one row per example, got {', '.join(map(str, lengths))} rows. For groups of "
            "their own, as in auroc, write paired=False."
        )
    rng = generator_or_none(generator) or torch.Generator().manual_seed(0)
    value = _score(metric, arrays, options)
    scores = torch.tensor(
        [_score(metric, _drawn(arrays, paired, rng), options) for _ in range(n_resamples)], dtype=torch.float64
    )
    lower, upper = scores.sort().values.quantile(torch.stack([tails, 1 - tails])).tolist()
    return Bootstrap(value, lower, upper, float(1 - 2 * tails), scores.std().item(), n_resamples)


def _drawn(arrays: list[Tensor], paired: bool, rng: torch.Generator) -> list[Tensor]:
    """Return as many rows of each array, drawn with replacement; the same ones of all if `paired`."""
    if paired:
        rows = _rows(len(arrays[0]), rng)
        return [array[rows.to(array.device)] for array in arrays]
    return [array[_rows(len(array), rng).to(array.device)] for array in arrays]


def _rows(n: int, rng: torch.Generator) -> Tensor:
    return torch.randint(n, (n,), generator=rng, device=rng.device)


def _score(metric: Callable[..., float], arrays: list[Tensor], options: dict[str, Any]) -> float:
    found = metric(*arrays, **options)
    try:
        value = float(found)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if math.isnan(value):
        raise OptionError(f"the metric returned {found!r}; bootstrap needs a number.")
    return value
