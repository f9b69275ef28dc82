"""The prediction of a last layer for a single row of features, in NumPy.

What the posterior fixes is folded into two matrices, with the linear part of the link: w = (Q^T phi)^2 gives the
variances of the outputs and the terms of the link by one product. See `predictive.rows` for why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import linear

from laplace.posterior.spread import Factored, Spread
from laplace.predictive.rows import Array, RowForm, row_form


class RowPredictive:
    """Maps one row of outputs and turned features to the mean of the inverse link, and to the variances of the outputs.

    Args:
        right: Q^T, (R, H); None for the unit vectors.
        matrix: what w is multiplied by, (R, K): for the variances if they are kept, then for the link's terms.
        bias: what a bias adds, (K,).
        form: the link.
        c: the number of outputs.
    """

    def __init__(self, right: Tensor | None, matrix: Array, bias: Array, form: RowForm, c: int) -> None:
        self._form, self._first = form, matrix.shape[1] - c  # where the link's terms begin
        self.turn = None if right is None else _with_one(right)
        # With a one among the turned features, the bias is a row of the matrix: one operation less.
        self._matrix = matrix if right is None else np.concatenate([matrix, bias[None]])
        self._bias = bias if right is None else None

    def turned(self, phi: Tensor) -> Array:  # (1, H) -> (R + 1,), or (H,)
        """Return Q^T phi and a one. Torch multiplies, because its code is at hand: the network has just used it."""
        return (phi if self.turn is None else linear(phi, *self.turn)).numpy()[0]

    def __call__(self, f: list[float], turned: Array) -> tuple[Array, Array] | None:  # C numbers, what `turned` returns
        """Return the mean, (C,), and the variances, (C,) or (0,). None if a number is not finite."""
        found = (turned * turned).dot(self._matrix)
        if self._bias is not None:
            found += self._bias
        numbers = found.tolist()
        if not math.isfinite(sum(numbers) + sum(f)):
            return None
        return self._form(f, numbers[self._first :]), found[: self._first]


def row_predictive(
    closed_form: Callable[[Tensor, Tensor], Tensor], of_link: Spread | None, of_outputs: Spread | None = None
) -> RowPredictive | None:
    """Fold the spread that a link reads, and that of the outputs if its variances are wanted, with the link.

    None for links without a row form, and for spreads without eigenvectors: they take torch's operations.
    """
    if not isinstance(of_link, Factored) or not (of_outputs is None or isinstance(of_outputs, Factored)):
        return None
    spreads = [of_link] if of_outputs is None else [of_outputs, of_link]
    right, first = of_link.right, of_link.by_output
    if first.device.type != "cpu" or not of_link.same_squares(spreads[0]):
        return None
    dtype = first.numpy().dtype
    form = row_form(closed_form, first.shape[1], dtype)
    if form is None:
        return None
    matrices = [_rows(spread) for spread in spreads]
    matrices[-1] = form.terms(matrices[-1])
    both = np.concatenate(matrices, 1).astype(dtype)
    turn = None if right is None else right.T
    return RowPredictive(turn, both[:-1].copy(), both[-1].copy(), form, first.shape[1])


def _with_one(right: Tensor) -> tuple[Tensor, Tensor]:  # (R, H) -> (R + 1, H), (R + 1,)
    """Return a weight and a bias that map features to the turned ones and a one."""
    weight, bias = right.new_zeros(len(right) + 1, right.shape[1]), right.new_zeros(len(right) + 1)
    weight[:-1], bias[-1] = right, 1
    return weight, bias


def _rows(spread: Factored) -> Array:  # (R + 1, C), float64
    """Return what w is multiplied by, with a last row for the bias."""
    bias = spread.bias_variance
    last: Any = np.zeros(spread.by_output.shape[1]) if bias is None else bias.double().numpy()
    return np.concatenate([spread.by_output.double().numpy(), last[None]])
