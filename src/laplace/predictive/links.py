"""Links: approximations of E[inverse link(f)] for f ~ N(f, S). The inverse link is softmax unless stated otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from laplace.linalg.sampling import Draws
from laplace.linalg.softmax import softmax
from laplace.predictive.one_vs_rest import one_vs_rest
from laplace.predictive.outputs import OutputGaussian, OutputSamples
from laplace.predictive.queries import Contrasts, Products, Query, Variances


@dataclass(frozen=True)
class Link:
    """Approximates E[inverse link(f)], f ~ N(f, S), and says what it needs to know about S.

    Attributes:
        apply: Maps the outputs' Gaussian and the `Draws` to use to the mean, (N, K).
        needs: Makes the query that gives as much of S as `apply` uses: `Variances`, `Products`, `Covariances` or
            `Contrasts`, for links that see differences of outputs only.
        may_leave_simplex: Whether wide Gaussians can push the mean off the simplex.
    """

    apply: Callable[[OutputGaussian, Draws], Tensor]
    needs: Callable[[], Query] = Variances
    may_leave_simplex: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.needs, Query):  # Covariances() means Covariances
            object.__setattr__(self, "needs", type(self.needs))

    @property
    def closed_form(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return the closed form of a link that was made from one by `of_variances` or `of_contrasts`."""
        known = isinstance(self.apply, partial) and self.apply.func in (_closed_form, _of_contrasts)
        return self.apply.args[0] if isinstance(self.apply, partial) and known else None

    @property
    def makes_draws(self) -> bool:
        """Return whether `apply` may use the draws. For a link of the user this is unknown, so True is assumed."""
        return self.apply is not _delta and self.closed_form is None

    @classmethod
    def of_variances(cls, mean: Callable[[Tensor, Tensor], Tensor]) -> Link:
        """Make a link from a closed form `mean(f, variance)`."""
        return cls(partial(_closed_form, mean))  # which can be pickled, unlike a lambda

    @classmethod
    def of_contrasts(cls, mean: Callable[[Tensor, Tensor], Tensor]) -> Link:
        """Make a link from a closed form `mean(f, variance of the contrasts f_c - mean of f)`."""
        return cls(partial(_of_contrasts, mean), Contrasts)


def _closed_form(mean: Callable[[Tensor, Tensor], Tensor], outputs: OutputGaussian, draws: Draws) -> Tensor:
    return mean(outputs.mean, outputs.variance)


def _of_contrasts(mean: Callable[[Tensor, Tensor], Tensor], outputs: OutputGaussian, draws: Draws) -> Tensor:
    return mean(outputs.mean, outputs.contrast_variance)


def probit(f: Tensor, variance: Tensor) -> Tensor:  # (N, C), (N, C) -> (N, C)
    """Return softmax of f_c / sqrt(1 + pi/8 S_cc)."""
    return softmax(shrunk(f, variance))


def bridge_concentration(f: Tensor, variance: Tensor) -> Tensor:
    """Return the Laplace bridge's Dirichlet: alpha_i = (1 - 2/C + exp(f_i)/C^2 sum_j exp(-f_j)) / S_ii.

    `variance` is that of the contrasts f_i - mean of f: the bridge is for logits without a common shift.
    """
    return _log_bridge(f, variance).exp().clamp(max=torch.finfo(f.dtype).max)


def bridge_norm_concentration(f: Tensor, variance: Tensor) -> Tensor:
    """Return the bridge of f / sqrt(m) and S / m with m = mean(S_ii) / sqrt(C/2), which tames large variances."""
    return bridge_concentration(*_rescaled(f, variance))


def bridge(f: Tensor, variance: Tensor) -> Tensor:
    """Return the mean of the bridge's Dirichlet."""
    return softmax(_log_bridge(f, variance))


def bridge_norm(f: Tensor, variance: Tensor) -> Tensor:
    """Return the mean of the normalised bridge's Dirichlet."""
    return bridge(*_rescaled(f, variance))


def _log_bridge(f: Tensor, variance: Tensor) -> Tensor:
    c = f.shape[-1]
    constant = torch.tensor(1 - 2 / c, dtype=f.dtype, device=f.device).log()
    ratio = f + torch.logsumexp(-f, -1, keepdim=True) - 2 * math.log(c)
    return _logaddexp(constant, ratio) - _positive(variance).log()


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """Return log(exp(a) + exp(b)). ONNX writes torch's own as it stands, and exp of large numbers is infinite there."""
    return torch.maximum(a, b) + (-(a - b).abs()).exp().log1p()


def _rescaled(f: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    m = _positive(variance.mean(-1, keepdim=True) / math.sqrt(f.shape[-1] / 2))
    return f / m.sqrt(), variance / m


def _positive(variance: Tensor) -> Tensor:
    """Bound the variance away from 0, which it is if the network is certain of an output."""
    return variance.clamp(min=torch.finfo(variance.dtype).tiny)


def _delta(outputs: OutputGaussian, draws: Draws) -> Tensor:
    """Apply `delta` to the Gaussian of the outputs."""
    p = outputs.mean.softmax(-1)
    return delta(outputs.mean, outputs.variance, outputs.product(p))


def delta(f: Tensor, variance: Tensor, product: Tensor) -> Tensor:
    """Return the second-order expansion around f: p_k + p_k/2 [(e_k - p)^T S (e_k - p) - tr((diag p - p p^T) S)].

    `product` is S p. Large variances push the result off the simplex: see `onto_simplex`. Computed in float64, because
    large terms in S cancel.
    """
    p, variance, product = f.double().softmax(-1), variance.double(), product.double()
    quadratic = (p * product).sum(-1, keepdim=True)
    trace = (p * variance).sum(-1, keepdim=True)
    return (p + p / 2 * (variance - 2 * product + 2 * quadratic - trace)).to(f.dtype)


def onto_simplex(p: Tensor) -> tuple[Tensor, int]:
    """Clip at zero and renormalise. Return the result, and for how many inputs that was needed."""
    outside = int(((p < 0) | (p > 1)).any(-1).sum())
    return (_normalised(p.clamp(min=0)), outside) if outside else (p, 0)


@dataclass(frozen=True)
class MonteCarlo:
    """Averages the inverse link over draws of f.

    Attributes:
        inverse_link: Maps outputs to what they stand for.
        marginal: Whether the outputs are drawn independently, because each has a meaning of its own.
    """

    inverse_link: Callable[[Tensor], Tensor]
    marginal: bool = False

    def __call__(self, outputs: OutputGaussian | OutputSamples, draws: Draws) -> Tensor:
        if self.marginal and isinstance(outputs, OutputGaussian):
            outputs = outputs.marginals()
        return torch.cat([self.inverse_link(part).mean(0) for part in outputs.draws(draws)])


def shrunk(f: Tensor, variance: Tensor) -> Tensor:
    """Return f / sqrt(1 + pi/8 S), the argument of the logistic function in the probit approximation."""
    return f * torch.rsqrt(torch.add(1, variance, alpha=math.pi / 8))


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


CATEGORICAL_LINKS: Final[dict[str, Link]] = {
    "probit": Link.of_variances(probit),
    "one_vs_rest": Link.of_contrasts(one_vs_rest),
    "mc": Link(MonteCarlo(softmax), partial(Contrasts, covariances=True)),
    "bridge": Link.of_contrasts(bridge),
    "bridge_norm": Link.of_contrasts(bridge_norm),
    "delta": Link(_delta, Products, may_leave_simplex=True),
}
