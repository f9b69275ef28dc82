"""From a Gaussian over outputs to what they stand for: E[inverse link(f)], f ~ N(f, S); softmax unless said."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from laplace.algebra import total
from laplace.draws import Draws
from laplace.predictive.outputs import OutputGaussian, OutputSamples


@dataclass(frozen=True)
class Link:
    """One approximation of the integral and what it needs of S.

    'variance'    apply(f, variance)            'product'    apply(f, variance, S p)
    'marginals'   apply(outputs, draws), from variances; 'covariance' the same from covariances
    """

    apply: Callable[..., Tensor]
    needs: str


def softmax(f: Tensor) -> Tensor:
    """The class probabilities."""
    return f.softmax(-1)


def probit(f: Tensor, variance: Tensor) -> Tensor:  # (N, C), (N, C) -> (N, C)
    """softmax of f_c / sqrt(1 + pi/8 S_cc)."""
    return shrunk(f, variance).softmax(-1)


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


@dataclass(frozen=True)
class MonteCarlo:
    """Mean of the inverse link over draws."""

    inverse_link: Callable[[Tensor], Tensor]

    def __call__(self, outputs: OutputGaussian | OutputSamples, draws: Draws) -> Tensor:
        return torch.cat([self.inverse_link(part).mean(0) for part in outputs.draws(draws)])


@dataclass(frozen=True)
class Quadrature:
    """Gauss-Hermite: each output is integrated by itself."""

    inverse_link: Callable[[Tensor], Tensor]

    def __call__(self, f: Tensor, variance: Tensor) -> Tensor:
        nodes, weights = hermite(f)
        return total(w * self.inverse_link(f + node * variance.sqrt()) for node, w in zip(nodes, weights, strict=True))


def hermite(like: Tensor, order: int = 64) -> tuple[Tensor, Tensor]:  # (Q,), (Q,)
    """Nodes and weights with sum_q w_q h(z_q) = E[h(z)] for z ~ N(0, 1) and polynomials h of degree below 2 Q."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return like.new_tensor(nodes), like.new_tensor(weights / weights.sum())


def shrunk(f: Tensor, variance: Tensor) -> Tensor:
    """f / sqrt(1 + pi/8 S): what the paper's probit approximation puts through the logistic function."""
    return f / torch.sqrt(1 + math.pi / 8 * variance)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


CATEGORICAL_LINKS: Final[dict[str, Link]] = {
    "probit": Link(probit, "variance"),
    "mc": Link(MonteCarlo(softmax), "covariance"),
    "bridge": Link(bridge, "variance"),
    "bridge_norm": Link(bridge_norm, "variance"),
    "delta": Link(delta, "product"),
}
