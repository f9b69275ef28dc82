"""Calibration of predictive distributions of numbers, by the probability integral transform u[n] = F[n](y[n]).

If each F[n] is the distribution of y[n], then u is uniform on [0, 1]. Everything about the calibration of quantiles and
central intervals can be read from u: a central interval at a level holds y where abs(2 u - 1) <= level.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace.checks import generator_or_none, whole_number
from laplace.errors import InputError
from laplace.evaluation.arrays import Values, real_of, share_of
from laplace.evaluation.regression import drawn_for, standardised


def gaussian_pit(
    mean: Values,  # (N,) or (N, C)
    variance: Values,  # like mean
    y: Values,  # like mean
) -> Tensor:  # like mean
    """Return Phi((y - mean) / sd), uniform on [0, 1] if y has the distribution N(mean, variance).

    A hump in the middle of their histogram means too wide, peaks at both ends too narrow, a slope biased.

    Args:
        mean: Predictions, (N,) or (N, C).
        variance: Variances of y, noise included, of the same shape.
        y: Targets, of the same shape.

    Returns:
        Numbers between 0 and 1 in float64, of the same shape.

    Raises:
        InputError: the shapes differ, variances are not positive, or values are not finite.
    """
    return torch.special.ndtr(standardised(mean, variance, y)[0])


def sample_pit(
    samples: Values,  # (S, N) or (S, N, C)
    y: Values,  # (N,) or (N, C)
    generator: torch.Generator | None = None,
) -> Tensor:  # like y
    """Return the place of y among draws from its predictive distribution; for counts and anything that can be drawn.

    (number of draws below y + v (number of draws equal to y + 1)) / (S + 1). With v drawn uniformly it is exactly
    uniform if y has the distribution of the draws, ties (counts) and few draws included.

    Args:
        samples: Draws of y, noise included, the draws in front: (S, N) or (S, N, C).
        y: Targets, (N,) or (N, C).
        generator: What v is drawn from. If left out, v = 1/2, and nothing is random.

    Returns:
        Numbers between 0 and 1 in float64, of the shape of y.

    Raises:
        InputError: the shapes do not match, or values are not finite.
    """
    drawn, y = drawn_for(samples, y)
    generator = generator_or_none(generator)
    v = torch.full_like(y, 0.5)
    if generator is not None:
        v = torch.rand(y.shape, generator=generator, dtype=y.dtype, device=generator.device).to(y.device)
    return ((drawn < y).sum(0) + v * ((drawn == y).sum(0) + 1)) / (len(drawn) + 1)


def coverage_at(
    pit: Values,  # (N,) or (N, C)
    levels: Values,  # () or (L,)
) -> Tensor:  # () or (L,)
    """Return the share of targets inside their central interval at each level: mean [abs(2 u - 1) <= level].

    Args:
        pit: What `gaussian_pit` or `sample_pit` returned.
        levels: Levels between 0 and 1.

    Returns:
        As many shares as levels, in float64. Calibrated predictions have `coverage_at(pit, levels)` close to `levels`.

    Raises:
        InputError: `pit` lies outside [0, 1] or is empty, or a level is not between 0 and 1.
    """
    level = share_of(levels, "levels")
    return _shares((2 * _uniform(pit) - 1).abs(), level)


def quantile_calibration_error(
    pit: Values,  # (N,) or (N, C)
    n_levels: int = 99,
) -> float:
    """Return the mean distance between the share of targets below their q-quantile and q, over evenly spaced q.

    mean_q abs(mean [u <= q] - q) for q = 1/(n_levels + 1), ..., n_levels/(n_levels + 1): the miscalibration area of
    regression (Kuleshov et al., 2018, with absolute values). N calibrated examples still score about 0.3 / sqrt(N).

    Args:
        pit: What `gaussian_pit` or `sample_pit` returned.
        n_levels: How many quantiles.

    Returns:
        A number between 0 and 0.5; smaller is better.

    Raises:
        InputError: `pit` lies outside [0, 1] or is empty.
        OptionError: `n_levels` is not a whole number of at least 1.
    """
    n = whole_number(n_levels, "n_levels")
    u = _uniform(pit)
    q = torch.arange(1, n + 1, dtype=u.dtype, device=u.device) / (n + 1)
    return (_shares(u, q) - q).abs().mean().item()


def _shares(values: Tensor, at: Tensor) -> Tensor:
    """Return the share of values that do not exceed each number."""
    ranked = values.flatten().sort().values
    # An interval's end is rounded: what lies on it to the last digits counts in, as in `interval_coverage`.
    return torch.searchsorted(ranked, at.to(ranked) + 8 * math.ulp(1.0), side="right").double() / len(ranked)


def _uniform(pit: Values) -> Tensor:
    u = real_of(pit, "pit")
    if u.dim() not in (1, 2) or not u.numel() or not ((u >= 0) & (u <= 1)).all():
        raise InputError(
            f"pit of shape {tuple(u.shape)} must be numbers between 0 and 1, (N,) or (N, C): pass what gaussian_pit or "
            "sample_pit returns."
        )
    return u
