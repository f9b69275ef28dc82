"""Scores of intervals: how many targets they hold, how wide they are, and both in one number.

`interval_coverage` is the share of targets inside. It has nothing to do with `la.coverage()`, which lists the weights
that a posterior covers, nor with the coverage of `risk_coverage`, the share of examples that are answered.
"""

from __future__ import annotations

from torch import Tensor

from laplace.errors import InputError
from laplace.evaluation.arrays import Values, real_of, same_shape, share_of


def interval_coverage(
    lower: Values,  # (N,) or (N, C)
    upper: Values,  # like lower
    y: Values,  # like lower
) -> float:
    """Return the share of targets inside their interval, ends included: mean [lower <= y <= upper].

    A well-calibrated 95 % interval covers close to 0.95 of new data.

    Args:
        lower: Lower ends, (N,) or (N, C).
        upper: Upper ends, of the same shape.
        y: Targets, of the same shape.

    Returns:
        A number between 0 and 1.

    Raises:
        InputError: the shapes differ, a lower end is above its upper end, or a value is nan.
    """
    lower, upper, y = _ends(lower, upper, y)
    return ((lower <= y) & (y <= upper)).double().mean().item()


def interval_width(
    lower: Values,  # (N,) or (N, C)
    upper: Values,  # like lower
) -> float:
    """Return the mean width of the intervals: mean (upper - lower). The sharpness of intervals; it needs no targets.

    Args:
        lower: Lower ends, (N,) or (N, C).
        upper: Upper ends, of the same shape.

    Returns:
        A number from 0 to infinity; smaller is better among intervals with the same coverage.

    Raises:
        InputError: the shapes differ, a lower end is above its upper end, or a value is nan.
    """
    lower, upper = _ends(lower, upper)
    return (upper - lower).mean().item()


def interval_score(
    lower: Values,  # (N,) or (N, C)
    upper: Values,  # like lower
    y: Values,  # like lower
    level: float,
) -> float:
    """Return the interval score (Winkler score) of central intervals at `level`, which rewards narrow ones that hold y.

    With a = 1 - level, mean [(upper - lower) + 2/a max(lower - y, 0) + 2/a max(y - upper, 0)]. It is proper: the
    quantiles a/2 and 1 - a/2 of the true distribution minimise it (Gneiting and Raftery, 2007).

    Args:
        lower: Lower ends, (N,) or (N, C).
        upper: Upper ends, of the same shape.
        y: Targets, of the same shape.
        level: The probability that the intervals are meant to hold, between 0 and 1.

    Returns:
        A number from 0 to infinity, in units of y; smaller is better.

    Raises:
        InputError: the shapes differ, a lower end is above its upper end, a value is nan, or the level is not between
            0 and 1.
    """
    outside = 1 - share_of(level, "level")
    if outside.dim():
        raise InputError(f"level has shape {tuple(outside.shape)}; one number between 0 and 1 is needed.")
    lower, upper, y = _ends(lower, upper, y)
    missed = (lower - y).clamp_min(0) + (y - upper).clamp_min(0)
    return (upper - lower + 2 / outside.item() * missed).mean().item()


def _ends(lower: Values, upper: Values, y: Values | None = None) -> list[Tensor]:
    named = {name: real_of(end, name, finite=False) for name, end in (("lower", lower), ("upper", upper))}
    named |= {} if y is None else {"y": real_of(y, "y")}
    low, high, *others = same_shape(**named)
    if (low > high).any():
        raise InputError("lower exceeds upper somewhere: pass lower, upper and y in this order.")
    return [low, high, *others]
