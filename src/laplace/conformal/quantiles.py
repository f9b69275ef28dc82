"""Compute the quantile behind every guarantee: the ceil((n + 1) level)-th smallest of n calibration scores.

If the n scores and that of a new example are exchangeable, the new one is as likely to have each rank, and so exceeds
this quantile with probability 1 - ceil((n + 1) level) / (n + 1) <= 1 - level (Vovk et al., 2005). Where n is too small
for that rank, no finite threshold holds `level`, and the threshold is infinite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace.checks import shown
from laplace.errors import OptionError

_ROUNDING = 1e-9  # (9 + 1) * .7 is 7.000000000000001 in floating point, and its ceiling must be 7


def rank_of(n: int, level: float) -> int:
    """Return ceil((n + 1) level), which exceeds n if n is too small for the level."""
    return max(math.ceil((n + 1) * level * (1 - _ROUNDING)), 1)


def least_examples(level: float) -> int:
    """Return the smallest n with a finite threshold at this level: ceil(level / (1 - level))."""
    n = max(math.floor(level / (1 - level)) - 1, 1)
    while rank_of(n, level) > n:
        n += 1
    return n


def threshold(
    scores: Tensor,  # (n,)
    level: float,
) -> Tensor:  # ()
    """Return the ceil((n + 1) level)-th smallest score, or infinity if there are too few."""
    rank = rank_of(len(scores), level)
    if rank > len(scores):
        return torch.full((), torch.inf, dtype=scores.dtype, device=scores.device)
    return scores.kthvalue(rank).values


def told_infinite(
    q: Tensor,  # (G,), or (G, K) with thresholds by class
    level: float,
    n: int,
    numbers: bool,
) -> str | None:
    """Return the warning about infinite thresholds, or None if all are finite."""
    if not q.isinf().any():
        return None
    there, what = f", there are {n}", "all numbers, from minus to plus infinity" if numbers else "everything"
    if q.dim() == 2:
        classes = sorted(set(q.isinf().nonzero()[:, -1].tolist()))
        listed = ", ".join(map(str, classes[:8])) + (", ..." if len(classes) > 8 else "")
        there, what = " of each class", f"class{'es' if len(classes) > 1 else ''} {listed}"
    return (
        f"level={level:g} needs at least {least_examples(level)} calibration examples{there}: every set holds {what}. "
        "Give more examples, or a lower level."
    )


def checked_level(level: object) -> float:
    """Return a level strictly between 0 and 1."""
    try:
        value = float(level)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if isinstance(level, bool) or not 0 < value < 1:
        raise OptionError(f"level={shown(level)} must lie strictly between 0 and 1, as in level=0.9.")
    return value
