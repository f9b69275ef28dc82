"""Posterior and evidence under any prior, densely in float64, straight from the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle import Dense

LogDensity = Callable[[Tensor], Tensor]


@dataclass
class Reference:
    """N(mean, (s H + D)^-1) with D = -d2 log p(mean), its negative eigenvalues set to zero."""

    fitted: Dense
    log_density: LogDensity  # (P,) -> ()

    @property
    def hessian(self) -> Tensor:
        """-d2 log p by autograd, (P, P)."""
        return -torch.autograd.functional.hessian(self.log_density, self.fitted.mean)

    @property
    def prior_precision(self) -> Tensor:
        values, vectors = torch.linalg.eigh(self.hessian)
        return (vectors * values.clamp(min=0)) @ vectors.T

    def precision(self, sigma: float = 1.0, temperature: float = 1.0) -> Tensor:
        scale = (sigma**-2 if self.fitted.task == "regression" else 1.0) / temperature
        return self.fitted.h * scale + self.prior_precision

    def evidence(self, sigma: float = 1.0, temperature: float = 1.0) -> Tensor:
        """log of the integral of exp(log joint at the mean - 1/2 quadratic form)."""
        peak = self.fitted.loglik(sigma) / temperature + self.log_density(self.fitted.mean)
        p = len(self.fitted.mean)
        return peak + 0.5 * p * math.log(2 * math.pi) - 0.5 * torch.logdet(self.precision(sigma, temperature))


def student_t(sizes: list[int], df: object, scale: object, mean: float = 0.0) -> LogDensity:
    df, scale = (_each(value, sizes) for value in (df, scale))
    return lambda theta: torch.distributions.StudentT(df, mean, scale).log_prob(theta).sum()


def smoothed_laplace(sizes: list[int], scale: object, smoothing: object) -> LogDensity:
    """With its normaliser by quadrature."""
    b, e = (_each(value, sizes) for value in (scale, smoothing))
    t = torch.linspace(-12, 12, 4_001, dtype=torch.float64)  # w = 0.1 sinh(t), dw = 0.1 cosh(t) dt
    heights = (-((0.1 * t.sinh()) ** 2 + e[:, None] ** 2).sqrt() / b[:, None]).exp()
    z = torch.trapezoid(heights * 0.1 * t.cosh(), t)
    return lambda theta: (-(theta**2 + e**2).sqrt() / b - z.log()).sum()


def gaussian(precision: Tensor, mean: float = 0.0) -> LogDensity:  # (P, P)
    p = len(precision)
    return lambda theta: torch.distributions.MultivariateNormal(
        torch.full((p,), mean, dtype=torch.float64), precision_matrix=precision
    ).log_prob(theta)


def _each(value: object, sizes: list[int]) -> Tensor:
    values = torch.as_tensor(value, dtype=torch.float64).reshape(-1)
    if len(values) == 1:
        return values.expand(sum(sizes))
    return torch.cat([v.expand(size) for v, size in zip(values, sizes, strict=True)])
