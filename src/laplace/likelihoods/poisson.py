"""Counts: y_c ~ Poisson(exp(f_c)), Lambda = diag(exp(f)).

Under f ~ N(f, S) the rate is log-normal: its mean is exp(f + S/2), its variance (exp(S) - 1) exp(2 f + S).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace.errors import InputError
from laplace.likelihoods.base import Likelihood, shaped_like_outputs
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.sampling import Draws, uniforms
from laplace.predictive.counts import PoissonLogNormal, PoissonLogNormalMixture, PoissonMixture
from laplace.predictive.links import Link, MonteCarlo
from laplace.predictive.mixtures import OutputMixture
from laplace.predictive.outputs import OutputGaussian, OutputSamples
from laplace.predictive.response import Outputs, at_quantiles


def mean_rate(f: Tensor, variance: Tensor) -> Tensor:
    """Return exp(f + S/2)."""
    return (f + variance / 2).exp()


RATE_LINKS: Final[dict[str, Link]] = {
    "exact": Link.of_variances(mean_rate),
    "mc": Link(MonteCarlo(torch.exp, marginal=True)),
}


class Poisson(Likelihood):
    """Predicts C counts from the C logarithms of their rates; labels (N, C) are whole numbers from 0 on."""

    name = "poisson"
    links = RATE_LINKS

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        y = shaped_like_outputs(f, y, self.name)
        if len(y) and ((y < 0).any() or (y != y.round()).any()):
            raise InputError(
                f"poisson labels lie in [{float(y.min()):g}, {float(y.max()):g}]; counts are needed, whole numbers "
                "from 0 on. For real numbers write likelihood='regression'."
            )
        return y

    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
        y64, f64 = y.double(), f.double()  # for large counts, float32 would be off by whole nats
        return (y64 * f64 - f64.exp() - torch.lgamma(y64 + 1)).sum(-1).to(f.dtype)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return y - f.exp()

    def fisher(self, f: Tensor, y: Tensor | None = None) -> OutputCurvature:
        return OutputCurvature(diagonal=f.exp())

    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """Draw the smallest k with P(y <= k) >= u, by bisection."""
        rate = f.double().exp()
        u = uniforms(f.shape[0], n_samples, f.shape[1], f, generator)
        low, high = torch.full_like(u, -1), (rate + 10 * rate.sqrt() + 40).ceil().expand_as(u).clone()
        while (high - low > (high * 1e-15).clamp(min=1)).any():  # beyond 2^52, neighbours are further apart than 1
            middle = ((low + high) / 2).floor()
            enough = torch.special.gammaincc(middle + 1, rate.expand_as(u)) >= u
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        return high.to(f.dtype)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f.exp()

    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        """Return the Poisson distribution averaged over N(f, S) by quadrature, over the draws, or over a mixture."""
        if isinstance(outputs, OutputGaussian):
            return PoissonLogNormal(outputs.mean, outputs.variance)
        if isinstance(outputs, OutputSamples) and outputs.weights is None:
            return PoissonMixture(outputs.samples.permute(1, 2, 0))
        f, variance, weights = (t.movedim(0, -1) for t in _components(outputs))
        return PoissonLogNormalMixture(f, variance, weights)

    def quantiles(self, outputs: OutputGaussian, z: Tensor) -> Tensor:
        return self.inverse_link(at_quantiles(outputs, z))

    def uncertainty(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return Var[rate] and E[rate], (N, C) each. Their sum is the variance of y."""
        assert p is not None
        if isinstance(outputs, OutputGaussian):
            return _variance_of_rate(outputs.mean, outputs.variance), p
        if isinstance(outputs, OutputSamples) and outputs.weights is None:
            return outputs.samples.exp().var(0), p
        f, variance, weights = _components(outputs)
        rates = mean_rate(f, variance)
        between = (rates - (weights * rates).sum(0)).square()
        return (weights * (_variance_of_rate(f, variance) + between)).sum(0), p


def _variance_of_rate(f: Tensor, variance: Tensor) -> Tensor:
    """Return (exp(S) - 1) exp(2 f + S)."""
    rate = mean_rate(f, variance)
    return rate * (rate * torch.expm1(variance))


def _components(outputs: OutputSamples | OutputMixture) -> tuple[Tensor, Tensor, Tensor]:  # (K, N, C) each
    """Return means, variances and weights of the Gaussians in a mixture. A single value has the variance 0."""
    if isinstance(outputs, OutputSamples):
        f = outputs.samples
        weights = f.new_full((len(f),), 1 / len(f)) if outputs.weights is None else outputs.weights.to(f)
        return f, torch.zeros_like(f), weights.reshape(-1, 1, 1).expand_as(f)
    found = []
    for member, weight in zip(outputs.members, outputs.weights, strict=True):
        if isinstance(member, OutputSamples):
            f, variance, within = _components(member)
        else:
            f, variance = member.mean.unsqueeze(0), member.variance.unsqueeze(0)
            within = torch.ones_like(f)
        found.append((f, variance, weight.to(f) * within))
    f, variance, weights = (torch.cat(parts) for parts in zip(*found, strict=True))
    return f, variance, weights
