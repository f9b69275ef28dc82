"""E[sigmoid(f)] for f ~ N(m, S), exact to rounding.

Below zero sigmoid(f) is sum_k (-1)^(k-1) e^(k f), k = 1, 2, ...; above it is sum_k (-1)^k e^(-k f), k = 0, 1, ... Each
term has a closed integral over its half of N(m, S), and with a = m / sqrt(S)

    E[e^(k f); f < 0] = e^(k m + k^2 S/2) Phi(-a - k sqrt(S)) = exp(-a^2/2) erfcx((a + k sqrt(S)) / sqrt(2)) / 2.

As functions of k these are moments of a positive measure on [0, 1]. For such an alternating series, n terms with the
weights of Cohen, Rodriguez Villegas and Zagier (Experimental Mathematics 9, 2000) give the sum to a relative 5.8^-n,
for any m and S. Both halves are positive, so the relative error of the result is small too, about 1e-13.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from laplace.linalg.tracing import is_traced

_TERMS = 22  # for a relative 1e-16
_MORE = 5  # additional terms for each derivative: its terms grow with k
_LEAST = 1e-200  # stands in for S = 0
_CHUNK = 2**11  # integrals at a time


def expected_sigmoid(f: Tensor, variance: Tensor) -> Tensor:
    """Return E[sigmoid(f)], elementwise. Computed in float64, returned in the dtype of f; all derivatives are exact."""
    mean, s = torch.broadcast_tensors(f.double(), variance.double())
    result: Any = _series(mean, s, 0) if is_traced() else _Expected.apply(mean, s, 0)
    return result.to(f.dtype)


class _Expected(torch.autograd.Function):
    """Computes E[g(f)] for g the j-th derivative of sigmoid: d/dm is E[g'], and d/dS is E[g''] / 2."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, variance: Tensor, j: int) -> Tensor:
        if mean.numel() <= _CHUNK:
            return _series(mean, variance, j)
        parts = zip(mean.reshape(-1).split(_CHUNK), variance.reshape(-1).split(_CHUNK), strict=True)
        return torch.cat([_series(*part, j) for part in parts]).reshape(mean.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.j = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        by_mean, by_variance = ctx.needs_input_grad[:2]
        mean, variance = ctx.saved_tensors
        first: Any = _Expected.apply(mean, variance, ctx.j + 1) if by_mean else None
        second: Any = _Expected.apply(mean, variance, ctx.j + 2) if by_variance else None
        return grad * first if by_mean else None, grad * second / 2 if by_variance else None, None


def _series(mean: Tensor, variance: Tensor, j: int) -> Tensor:
    """Return the sum of both halves. The j-th derivative multiplies the terms by k^j, or by (-k)^j."""
    root = variance.clamp(min=_LEAST).sqrt()
    weights = torch.tensor(_weights(_TERMS + _MORE * j), dtype=mean.dtype, device=mean.device)
    k = torch.arange(len(weights) + 1, dtype=mean.dtype, device=mean.device)
    terms = k.reshape(-1, *[1] * mean.dim())
    above = torch.tensordot(weights * (-k[:-1]) ** j, _half(-mean, root, terms[:-1]), 1)
    below = torch.tensordot(weights * k[1:] ** j, _half(mean, root, terms[1:]), 1)
    return above + below


def _half(mean: Tensor, root: Tensor, k: Tensor) -> Tensor:  # (K, ...)
    """Return E[e^(k f); f < 0]."""
    a = mean / root
    b = (a + k * root) / math.sqrt(2)
    tail = torch.special.erfcx(b.abs()) * ((-a.square() / 2).exp() / 2)
    return torch.where(b > 0, tail, (k * (mean + k * root.square() / 2)).clamp(max=0).exp() - tail)


@cache
def _weights(n: int) -> list[float]:
    """Return w_k such that sum_(k < n) w_k a_k is nearly sum_k (-1)^k a_k."""
    before, d = 1, 3  # (3 + sqrt(8))^n + (3 - sqrt(8))^n, halved
    for _ in range(n - 1):
        before, d = d, 6 * d - before
    b, c, weights = -1, -d, []
    for k in range(n):
        c = b - c
        weights.append(c / d)
        b = b * 2 * (k + n) * (k - n) // ((2 * k + 1) * (k + 1))
    return weights
