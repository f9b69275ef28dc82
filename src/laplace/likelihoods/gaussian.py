"""Regression: y = f + sigma eps. Formulas at unit noise; sigma enters as a scale, and is tuned after one fit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace.curvature.output import OutputCurvature
from laplace.draws import normals_by_example
from laplace.errors import InputError
from laplace.likelihoods.base import Likelihood, Sums


class Gaussian(Likelihood):
    """N(y; f, sigma^2 I) with one noise level for all outputs."""

    name = "regression"
    has_noise = True

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        if y.shape != f.shape:
            hint = " Write y.unsqueeze(-1)." if y.shape == f.shape[:1] and f.shape[1] == 1 else ""
            raise InputError(
                f"regression labels have shape {tuple(y.shape)}, the outputs {tuple(f.shape)}: equal needed.{hint}"
            )
        if y.is_complex() or y.dtype is torch.bool:
            raise InputError(f"regression labels have dtype {y.dtype}; real numbers needed. Write y.float().")
        y = y.to(f.dtype)
        if not y.isfinite().all():
            raise InputError("the labels hold NaN or infinite values.")
        return y

    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
        sigma = torch.as_tensor(sigma, dtype=f.dtype, device=f.device)
        return -0.5 * (((y - f) / sigma).square() + math.log(2 * math.pi)).sum(-1) - f.shape[-1] * sigma.log()

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return y - f

    def fisher(self, f: Tensor) -> OutputCurvature:
        return OutputCurvature(diagonal=torch.ones_like(f))

    def root_times(self, f: Tensor, eps: Tensor) -> Tensor:
        return eps

    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        return f + normals_by_example(f.shape[0], n_samples, f.shape[1], f, generator)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f

    def sums(self, f: Tensor, y: Tensor) -> Sums:
        count = torch.tensor(y.numel(), dtype=torch.float64, device=f.device)
        return {"loss": 0.5 * (y - f).square().sum().double(), "count": count}

    def log_likelihood(self, sums: Sums, sigma: Tensor) -> Tensor:
        return -sums["loss"] / sigma.square() - 0.5 * sums["count"] * (math.log(2 * math.pi) + 2 * sigma.log())

    def curvature_scale(self, curvature: str, sigma: Tensor) -> Tensor:
        return sigma.pow(-4) if curvature == "ef" else sigma.pow(-2)
