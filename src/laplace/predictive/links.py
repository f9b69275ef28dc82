"""From a Gaussian over logits to class probabilities: E[softmax(f)], f ~ N(f, S)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from laplace.draws import Draws
from laplace.predictive.outputs import OutputGaussian, OutputSamples


@dataclass(frozen=True)
class Link:
    """One approximation of the integral and what it needs of S: 'variance', 'product' (S p too) or 'covariance'."""

    apply: Callable[..., Tensor]
    needs: str


def probit(f: Tensor, variance: Tensor) -> Tensor:  # (N, C), (N, C) -> (N, C)
    """softmax of f_c / sqrt(1 + pi/8 S_cc)."""
    return (f / torch.sqrt(1 + math.pi / 8 * variance)).softmax(-1)


def bridge_concentration(f: Tensor, variance: Tensor) -> Tensor:
    """The Laplace bridge's Dirichlet: alpha_i = (1 - 2/C + exp(f_i)/C^2 sum_j exp(-f_j)) / S_ii."""
    return _log_bridge(f, variance).exp().clamp(max=torch.finfo(f.dtype).max)


def bridge_norm_concentration(f: Tensor, variance: Tensor) -> Tensor:
    """The bridge of f / sqrt(m) and S / m with m = mean(S_ii) / sqrt(C/2), which tames large variances."""
    return bridge_concentration(*_rescaled(f, variance))


def bridge(f: Tensor, variance: Tensor) -> Tensor:
    """Mean of the bridge's Dirichlet."""
    return _log_bridge(f, variance).softmax(-1)


def bridge_norm(f: Tensor, variance: Tensor) -> Tensor:
    """Mean of the normalised bridge's Dirichlet."""
    return bridge(*_rescaled(f, variance))


def _log_bridge(f: Tensor, variance: Tensor) -> Tensor:
    c = f.shape[-1]
    constant = torch.tensor(1 - 2 / c, dtype=f.dtype, device=f.device).log()
    ratio = f + torch.logsumexp(-f, -1, keepdim=True) - 2 * math.log(c)
    return torch.logaddexp(constant, ratio) - _positive(variance).log()


def _rescaled(f: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    m = _positive(variance.mean(-1, keepdim=True) / math.sqrt(f.shape[-1] / 2))
    return f / m.sqrt(), variance / m


def _positive(variance: Tensor) -> Tensor:
    """Bounded away from 0, where a network knows an output for certain."""
    return variance.clamp(min=torch.finfo(variance.dtype).tiny)


def delta(f: Tensor, variance: Tensor, product: Tensor) -> Tensor:
    """Second order around f: p_k + p_k/2 [(e_k - p)^T S (e_k - p) - tr((diag p - p p^T) S)].

    `product` is S p. Large variances push it off the simplex: see `onto_simplex`.
    """
    p = f.softmax(-1)
    quadratic = (p * product).sum(-1, keepdim=True)
    trace = (p * variance).sum(-1, keepdim=True)
    return p + p / 2 * (variance - 2 * product + 2 * quadratic - trace)


def onto_simplex(p: Tensor) -> tuple[Tensor, int]:
    """Clipped at zero and renormalised, and for how many inputs that was needed."""
    outside = int(((p < 0) | (p > 1)).any(-1).sum())
    return (_normalised(p.clamp(min=0)), outside) if outside else (p, 0)


def monte_carlo(outputs: OutputGaussian | OutputSamples, draws: Draws) -> Tensor:
    """Mean of softmax over draws."""
    return torch.cat([part.softmax(-1).mean(0) for part in outputs.draws(draws)])


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


CATEGORICAL_LINKS: Final[dict[str, Link]] = {
    "probit": Link(probit, "variance"),
    "mc": Link(monte_carlo, "covariance"),
    "bridge": Link(bridge, "variance"),
    "bridge_norm": Link(bridge_norm, "variance"),
    "delta": Link(delta, "product"),
}
