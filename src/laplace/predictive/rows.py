"""Links for a single row of outputs, in NumPy: E[softmax(f)] for one input on a processor.

The formulas and constants are those of `links.probit` and `one_vs_rest`, and so are the results, up to rounding. Of ten
numbers, an operation of torch takes a microsecond for being called, one of NumPy a third of that. A network of 0.1 ms
notices the difference. There are no gradients, and nothing that a tracer would see: see `linalg.tracing.is_plain`.

A row form takes variances through a linear map, `terms`, which the caller applies to what its variances are made of.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laplace.predictive import one_vs_rest as integral
from laplace.predictive.links import probit

Array = NDArray[Any]

MOST: Final = 16  # outputs: with more of them, calling an operation is not what costs


class RowForm(ABC):
    """Applies a link to one row of finite numbers."""

    @abstractmethod
    def terms(self, matrix: Array) -> Array:  # (..., C) -> (..., C)
        """Return the linear map of variances that the form takes."""

    @abstractmethod
    def __call__(self, f: Array, terms: Array) -> Array:  # (C,), (C,) -> (C,)
        """Return the mean of softmax."""


class ProbitRow(RowForm):
    """Computes softmax(f / sqrt(1 + pi/8 v)), of pi/8 v."""

    def terms(self, matrix: Array) -> Array:
        return matrix * (math.pi / 8)

    def __call__(self, f: Array, terms: Array) -> Array:
        shrunk = f / np.sqrt(terms + 1)
        p = np.exp(shrunk - max(shrunk.tolist()))
        p /= np.add.reduce(p)
        return p


class OneVsRestRow(RowForm):
    """Computes the integral of `one_vs_rest`, of the variances u of independent outputs.

    Args:
        c: the number of classes.
        dtype: that of the numbers.
    """

    def __init__(self, c: int, dtype: Any) -> None:
        known = integral.constants_for(c, torch.from_numpy(np.empty(0, dtype)).dtype, torch.device("cpu"))
        self.c, self._dtype, self._tiny = c, dtype, np.finfo(dtype).tiny
        self._ends = integral.end_exponent(c)
        y, speed = known.grid.numpy()[:, : integral.POINTS], known.grid.numpy()[:, integral.POINTS :]
        self._grid = np.concatenate([-y, speed], 1)
        self._nodes, self._node_weights = known.nodes[:, :, 0].numpy(), known.node_weights[0].numpy()
        self._means, self._variances = known.means[:, :, 0].numpy(), known.variances[:, :, 0].numpy()
        self._below, self._density = known.below[0].numpy(), known.density[0].numpy()

    def terms(self, matrix: Array) -> Array:
        """Return u of variances of contrasts, where it is not below 0: see `as_if_independent`."""
        if self.c == 2:
            return 2 * matrix
        shared = matrix.sum(-1, keepdims=True) / (self.c * (self.c - 1))
        return (matrix - shared) / (1 - 2 / self.c)

    def __call__(self, f: Array, terms: Array) -> Array:
        # What takes few steps is left to Python, and few kinds of operations are used: after a network has run, the
        # first call of each kind has to fetch its code.
        means, u = f.tolist(), [v if v > 0 else 0.0 for v in terms.tolist()]
        top, ends, sqrt = max(means), self._ends, math.sqrt
        near = [sqrt(v + integral.LEFT_VARIANCE) for v in u]  # for the bounds of `one_vs_rest`
        starts = [m - integral.LEFT * r for m, r in zip(means, near, strict=True)]
        low, following = max(starts), max([m + r for m, r in zip(starts, near, strict=True)])
        high = max([m + sqrt(2 * ends * v + ends * ends) for m, v in zip(means, u, strict=True)])
        y = np.array([low - top, following - top, high - top], self._dtype) @ self._grid  # -y, and dy/dt
        a = (f - top) + y[: integral.POINTS, None]  # (Y, C)
        if max(u) <= integral.NARROW:
            below, density = self._by_nodes(a, np.array([sqrt(v) for v in u], self._dtype))
        elif min(u) >= integral.WIDE:
            below, density = self._by_mixture(a, np.array(u, self._dtype))
        else:
            below, density = self._by_both(a, np.array(u, self._dtype))
        p = (np.multiply.reduce(below, 1) * y[integral.POINTS :]) @ (density / below)
        p /= sum(p.tolist())
        return p

    def _by_nodes(self, a: Array, spread: Array) -> tuple[Array, Array]:
        """Return F and F' where u is small. F > 0, because a is small."""
        x = np.exp(a + spread * self._nodes)
        each = np.exp(x * -1)
        x *= each
        below, density = self._node_weights @ each.reshape(7, -1), self._node_weights @ x.reshape(7, -1)
        return below.reshape(a.shape), density.reshape(a.shape)

    def _by_mixture(self, a: Array, u: Array) -> tuple[Array, Array]:
        """Return F and F' where u is large, with Jensen's bound of F'."""
        scale = 1 / np.sqrt(self._variances + 2 * u)  # (6, 1, C)
        z = np.minimum(np.maximum((a - self._means) * scale, -integral.OUTER), integral.OUTER)
        density = (self._density @ (np.exp(z * z * -1) * scale).reshape(6, -1)).reshape(a.shape)
        below = (self._below @ torch.special.erfc(torch.from_numpy(z)).numpy().reshape(6, -1)).reshape(a.shape)
        bound = a + u / 2 - np.exp(np.minimum(a + 1.5 * u, integral.HIGH))
        return np.maximum(below, self._tiny), np.maximum(density, np.exp(bound))

    def _by_both(self, a: Array, u: Array) -> tuple[Array, Array]:
        share = np.minimum(np.maximum((u - integral.NARROW) / (integral.WIDE - integral.NARROW), 0), 1)
        narrow = self._by_nodes(np.minimum(a, integral.HIGH), np.sqrt(np.minimum(u, integral.WIDE)))
        wide = self._by_mixture(a, u)
        below, density = ((1 - share) * few + share * many for few, many in zip(narrow, wide, strict=True))
        return np.maximum(below, self._tiny), density


@cache
def row_form(closed_form: Callable[[Tensor, Tensor], Tensor], c: int, dtype: Any) -> RowForm | None:
    """Return the row form of a link's closed form for c outputs; None if there is none."""
    if not 2 <= c <= MOST:
        return None
    if closed_form is probit:
        return ProbitRow()
    return OneVsRestRow(c, dtype) if closed_form is integral.one_vs_rest else None
