"""Links for a single row of outputs, in NumPy: E[softmax(f)] for one input on a processor.

The formulas and constants are those of `links.probit` and `one_vs_rest`, and so are the results, up to rounding. Of
ten numbers, an operation of torch takes a microsecond for being called, one of NumPy a third of that, and a step of
Python a tenth: sums over classes are left to Python. A network of 0.1 ms notices the difference. There are no
gradients, and nothing that a tracer would see: see `linalg.tracing.is_plain`.

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
    def __call__(self, f: list[float], terms: list[float]) -> Array:  # C numbers each -> (C,)
        """Return the mean of softmax."""


class ProbitRow(RowForm):
    """Computes softmax(f / sqrt(1 + pi/8 v)), of pi/8 v.

    Args:
        dtype: that of the result.
    """

    def __init__(self, dtype: Any) -> None:
        self._dtype = dtype

    def terms(self, matrix: Array) -> Array:
        return matrix * (math.pi / 8)

    def __call__(self, f: list[float], terms: list[float]) -> Array:
        sqrt, exp = math.sqrt, math.exp
        shrunk = [m / sqrt(1 + v) for m, v in zip(f, terms, strict=True)]
        top = max(shrunk)
        p = [exp(s - top) for s in shrunk]
        total = sum(p)
        return np.array([e / total for e in p], self._dtype)


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
        self._nodes, self._node_weights = known.nodes[:, :, 0].numpy(), known.node_weights[0].numpy()
        self._means, self._variances = known.means[:, :, 0].numpy(), known.variances[:, :, 0].numpy()
        self._below, self._density = known.below[0].numpy(), known.density[0].numpy()
        y, speed = known.grid.numpy()[:, : integral.POINTS], known.grid.numpy()[:, integral.POINTS :]
        self._grid = np.concatenate([-y, speed], 1)
        each, nodes = np.eye(c, dtype=dtype), self._nodes.reshape(1, -1)
        exponents = np.concatenate([np.kron(np.ones_like(nodes), each), np.kron(nodes, each)])
        # What maps (m, sqrt(u), bounds) to the exponents m + sqrt(u) x, node by node, to -y and to dy/dt.
        self._map = np.zeros((2 * c + 3, 7 * c + 2 * integral.POINTS), dtype)
        self._map[: 2 * c, : 7 * c], self._map[2 * c :, 7 * c :] = exponents, self._grid

    def terms(self, matrix: Array) -> Array:
        """Return u of variances of contrasts, where it is not below 0: see `as_if_independent`."""
        if self.c == 2:
            return 2 * matrix
        shared = matrix.sum(-1, keepdims=True) / (self.c * (self.c - 1))
        return (matrix - shared) / (1 - 2 / self.c)

    def __call__(self, f: list[float], terms: list[float]) -> Array:
        # What takes few steps is left to Python, and few kinds of operations are used: after a network has run, the
        # first call of each kind has to fetch its code.
        top, sqrt, ends = max(f), math.sqrt, self._ends
        twice, square = 2 * ends, ends * ends
        low = following = high = -math.inf
        numbers, roots = list[float](), list[float]()
        for m, v in zip(f, terms, strict=True):  # the bounds of `one_vs_rest`
            m, v = m - top, v if v > 0 else 0.0
            near = sqrt(v + integral.LEFT_VARIANCE)
            start = m - integral.LEFT * near
            following_here, high_here = start + near, m + sqrt(twice * v + square)
            if start > low:  # comparisons, because a call of `max` takes three times as long
                low = start
            if following_here > following:
                following = following_here
            if high_here > high:
                high = high_here
            numbers.append(m)
            roots.append(sqrt(v))
        bounds = low, following, high
        if max(terms) <= integral.NARROW:
            mapped = np.array([*numbers, *roots, *bounds], self._dtype).dot(self._map)
            speed = mapped[-integral.POINTS :]
            below, density = self._by_outer_product(mapped[: -integral.POINTS])
        else:
            points = np.array(bounds, self._dtype).dot(self._grid)
            speed = points[integral.POINTS :]
            a = np.array(numbers, self._dtype)[:, None] + points[: integral.POINTS]  # (C, Y)
            u = np.array([v if v > 0 else 0.0 for v in terms], self._dtype)[:, None]
            wide = min(terms) >= integral.WIDE
            below, density = self._by_mixture(a, u) if wide else self._by_both(a, u)
        together = np.multiply.reduce(below, 0)
        together *= speed
        density /= below
        p = density.dot(together)
        p /= sum(p.tolist())
        return p

    def _by_outer_product(self, exponents: Array) -> tuple[Array, Array]:
        """Return F and F' where u is small: e^(m + sqrt(u) x - y) is a product. F > 0, because a is small."""
        first, weights, shape = 7 * self.c, self._node_weights, (self.c, integral.POINTS)
        factors = np.exp(exponents)
        x = factors[:first, None].dot(factors[None, first:])  # (7 C, Y)
        each = np.negative(x)
        np.exp(each, each)
        below = weights.dot(each.reshape(7, -1))
        each *= x
        return below.reshape(shape), weights.dot(each.reshape(7, -1)).reshape(shape)

    def _by_nodes(self, a: Array, spread: Array) -> tuple[Array, Array]:
        """Return F and F' where u is small."""
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
        return ProbitRow(dtype)
    return OneVsRestRow(c, dtype) if closed_form is integral.one_vs_rest else None
