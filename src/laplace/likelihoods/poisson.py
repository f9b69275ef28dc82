"""Counts: y_c ~ Poisson(exp(f_c)), Lambda = diag(exp(f)).

Under f ~ N(f, S) the rate is log-normal: its mean is exp(f + S/2), its variance (exp(S) - 1) exp(2 f + S).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, MixtureSameFamily
from torch.distributions import Poisson as Counts

from laplace.curvature.output import OutputCurvature
from laplace.draws import Draws, uniforms
from laplace.errors import InputError
from laplace.likelihoods.base import Likelihood, shaped_like_outputs
from laplace.predictive.links import Link, MonteCarlo, hermite
from laplace.predictive.outputs import OutputGaussian
from laplace.predictive.response import Outputs


def mean_rate(f: Tensor, variance: Tensor) -> Tensor:
    """exp(f + S/2)."""
    return (f + variance / 2).exp()


RATE_LINKS: Final[dict[str, Link]] = {
    "exact": Link(mean_rate, "variance"),
    "mc": Link(MonteCarlo(torch.exp), "marginals"),
}


class Poisson(Likelihood):
    """C counts, from the C logarithms of their rates; labels (N, C) are whole numbers from 0 on."""

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
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return y - f.exp()

    def fisher(self, f: Tensor, y: Tensor | None = None) -> OutputCurvature:
        return OutputCurvature(diagonal=f.exp())

    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """The smallest k with P(y <= k) >= u, by bisection."""
        rate = f.double().exp()
        u = uniforms(f.shape[0], n_samples, f.shape[1], f, generator)
        low, high = torch.full_like(u, -1), (rate + 10 * rate.sqrt() + 40).ceil().expand_as(u).clone()
        while (high - low > 1).any():
            middle = ((low + high) / 2).floor()
            enough = torch.special.gammaincc(middle + 1, rate.expand_as(u)) >= u
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        return high.to(f.dtype)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f.exp()

    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        """A mixture of Poisson distributions over the nodes of a quadrature, or over the draws."""
        if isinstance(outputs, OutputGaussian):
            nodes, weights = hermite(outputs.mean)
            f = outputs.mean.unsqueeze(-1) + outputs.variance.sqrt().unsqueeze(-1) * nodes
        else:
            f = outputs.samples.permute(1, 2, 0)
            weights = torch.full_like(f[0, 0], 1 / f.shape[-1])
        return MixtureSameFamily(Categorical(probs=weights.expand_as(f)), Counts(f.exp(), validate_args=False))

    def uncertainty(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Var[rate] and E[rate], (N, C): together the variance of y."""
        assert p is not None
        if isinstance(outputs, OutputGaussian):
            return mean_rate(outputs.mean, outputs.variance).square() * torch.expm1(outputs.variance), p
        return outputs.samples.exp().var(0), p
