"""Regression: y = f + sigma r eps. Formulas are at unit noise; sigma is a scale that can be tuned after one fit.

r is the noise of the outputs relative to each other: 1, one number per output, or given with every example.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, Normal

from laplace.checks import shown
from laplace.errors import InputError, OptionError
from laplace.likelihoods.base import Labels, Likelihood, Sums, Targets, finite
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.sampling import Draws, normals_by_example
from laplace.predictive.outputs import lower_root
from laplace.predictive.response import Latent, Outputs, Response

_START = 1.0  # the noise of a regression that was neither given one nor tuned
_FAR = 3.0  # by this factor, residuals of the training data may differ from that noise before predictions warn


class Gaussian(Likelihood):
    """Models a regression, N(y; f, sigma^2 diag(r)^2); labels have the shape of the outputs, (N, C), or (N,) if C is 1.

    sigma is `Laplace`'s `sigma_noise`. It can be tuned; r stays fixed.

    Args:
        per_output: r, (C,): the noise of each output relative to the others. 1 by default.

    Raises:
        OptionError: a value is not positive.
    """

    name = "regression"
    options = ("per_output",)
    has_noise = True
    tunes_noise = True
    joint = True

    def __init__(self, per_output: Any = None) -> None:
        self.per_output = None if per_output is None else _checked_noise(per_output)

    @property
    def described(self) -> str:
        noise = "" if self.per_output is None else ", ".join(f"{r:.6g}" for r in self.per_output.tolist())
        return self.name + (f"(per_output=[{noise}])" if noise else "")

    def check_outputs(self, f: Tensor) -> None:
        super().check_outputs(f)
        if self.per_output is not None and len(self.per_output) != f.shape[1]:
            raise InputError(
                f"sigma_noise has {len(self.per_output)} values for {f.shape[1]} outputs. Give one per output, or one "
                "for all."
            )

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        if y.shape == f.shape[:1] and f.shape[1] == 1:
            y = y.unsqueeze(1)
        if y.shape != f.shape:
            raise InputError(
                f"regression labels have shape {tuple(y.shape)}, the outputs {tuple(f.shape)}; make them equal."
            )
        if y.is_complex() or y.dtype is torch.bool:
            raise InputError(f"regression labels have dtype {y.dtype}; real numbers are needed. Write y.float().")
        y = y.to(f.dtype)
        return finite(y)

    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
        value, r = self._read(f, y)
        noise = torch.as_tensor(sigma, dtype=f.dtype, device=f.device) * r
        return -(0.5 * ((value - f) / noise).square() + 0.5 * math.log(2 * math.pi) + noise.log()).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        value, r = self._read(f, y)
        return (value - f) / r.square()

    def fisher(self, f: Tensor, y: Tensor | None = None) -> OutputCurvature:
        return OutputCurvature(diagonal=torch.ones_like(f).mul_(self._read(f, f if y is None else y)[1].pow(-2)))

    def drawn_scores(self, f: Tensor, y: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        return normals_by_example(f.shape[0], n_samples, f.shape[1], f, generator) / self._read(f, y)[1]

    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        return f + self._relative(f) * normals_by_example(f.shape[0], n_samples, f.shape[1], f, generator)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f

    def sums(self, f: Tensor, targets: Targets) -> Sums:
        value, r = self._read(f, targets.y)
        ones = torch.ones(len(f), dtype=torch.float64, device=f.device)
        sums = {
            "loss": targets.total(0.5 * ((value - f) / r).square().sum(-1)).double(),
            "count": f.shape[1] * targets.total(ones),
        }
        if self.per_output is not None or r.dim() > 1:  # one common noise is in sigma, not here
            sums["log_noise"] = f.shape[1] * targets.total(r.log().mean(-1).expand(len(f))).double()
        return sums

    def log_likelihood(self, sums: Sums, sigma: Tensor) -> Tensor:
        normaliser = 0.5 * sums["count"] * (math.log(2 * math.pi) + 2 * sigma.log()) + sums.get("log_noise", 0.0)
        return -sums["loss"] / sigma.square() - normaliser

    def curvature_scale(self, curvature: str, sigma: Tensor) -> Tensor:
        return sigma.pow(-4) if curvature == "ef" else sigma.pow(-2)

    def doubt_of_noise(self, sums: Sums, sigma: Tensor) -> str | None:
        """Doubt a noise that nobody has set, if the residuals of the training data are far from it."""
        if not self.tunes_noise or float(sigma.detach()) != _START:
            return None
        residual = float((2 * sums["loss"] / sums["count"]).sqrt())
        if 1 / _FAR <= residual / _START <= _FAR:
            return None
        return (
            f"sigma_noise is {_START:g}, its starting value, but the training data is off by about {residual:.2g}: "
            f"intervals will be too {'narrow' if residual > _START else 'wide'}. Call la.tune(), or set la.sigma_noise."
        )

    def with_noise(self, sigma: Tensor) -> tuple[Likelihood, Tensor]:
        if sigma.numel() == 1:
            return self, sigma.reshape(())
        if sigma.requires_grad:
            raise OptionError(
                "a sigma_noise per output cannot require a gradient; one number can. Write likelihood="
                "Gaussian(per_output=...) and sigma_noise= one number, which multiplies all of them."
            )
        level = _checked_noise(sigma).log().mean().exp()
        relative = sigma / level.to(sigma)
        if self.per_output is not None and self.per_output.shape == sigma.shape:
            mine = self.per_output.to(sigma)
            ratios = sigma / mine
            scale = ratios.log().mean().exp()
            if torch.allclose(mine * scale, sigma, rtol=1e-4):
                exact = [level for level in (scale, *ratios) if torch.equal(mine * level, sigma)]
                return self, exact[0] if exact else scale  # return exactly the level that `noise_at` was given
        return Gaussian(relative), level.to(sigma)

    def noise_at(self, level: Tensor) -> Tensor:
        return level if self.per_output is None else level * self.per_output.to(level)

    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        """Return a multivariate normal if covariances are known, else independent normals."""
        return _observed(outputs, self._noise(outputs, sigma))

    def uncertainty(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        return outputs.variance, self._noise(outputs, sigma)

    def _noise(self, outputs: Outputs, sigma: Tensor) -> Tensor:  # (N, C)
        """Return the variance of the observation noise."""
        return (sigma.to(outputs.mean) * self._relative(outputs.mean)).square().expand_as(outputs.mean)

    def _read(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return y, (N, C), and r, which is (N, C), (C,) or (1,)."""
        return y, self._relative(f)

    def _relative(self, f: Tensor) -> Tensor:
        return f.new_ones(1) if self.per_output is None else self.per_output.to(f)


class GivenNoise(Gaussian):
    """Models a regression with a known noise per example: N(y; f, sigma^2 diag(r_n)^2).

    Batches are (x, y, noise), with noise (N,) or (N, C), or mappings with a key `noise`. Predictions are of f, without
    noise: the noise of an observation at a new input is not known.
    """

    name = "given_noise"
    tunes_noise = False  # sigma multiplies a noise that is known
    options = ()
    further = ("noise",)

    def __init__(self) -> None:
        super().__init__()

    @property
    def response(self) -> Response:
        return Latent()

    def labels_of(self, f: Tensor, batch: Labels) -> Tensor:
        y, noise = batch.y.to(f.device), batch.given.get("noise")
        if noise is None:
            raise InputError("'given_noise' needs the noise of every example: a batch (x, y, noise), or a key 'noise'.")
        noise = noise.to(f)
        if noise.shape == f.shape[:1]:
            noise = noise.unsqueeze(1)
        if noise.shape not in (f.shape, (len(f), 1)):
            raise InputError(
                f"the noise has shape {tuple(noise.shape)}; give standard deviations ({len(f)},) or {tuple(f.shape)}."
            )
        if not (noise.isfinite() & (noise > 0)).all():
            raise InputError("the noise holds values that are not positive and finite; standard deviations are needed.")
        return torch.stack([super().check_targets(f, y), noise.expand_as(f)], 1)

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the labels with their noise, (N, 2, C); `labels_of` has checked both."""
        return y

    def observed(self, y: Tensor) -> Tensor:
        return y[:, 0]

    def distribution_at(self, outputs: Outputs, p: Tensor | None, y: Tensor, sigma: Tensor) -> Distribution:
        return _observed(outputs, (sigma.to(y) * y[:, 1]).square())

    def with_noise(self, sigma: Tensor) -> tuple[Likelihood, Tensor]:
        if sigma.numel() != 1:
            raise OptionError("sigma_noise must be one number here: it multiplies the noise of every example.")
        return self, sigma.reshape(())

    def _read(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (y[:, 0], y[:, 1]) if y.dim() == 3 else (y, torch.ones_like(f))


def _observed(outputs: Outputs, noise: Tensor) -> Distribution:  # (N, C)
    """Return the distribution of f plus independent noise with these variances."""
    covariance = outputs.covariance
    if covariance is None or noise.shape[1] == 1:
        return Normal(outputs.mean, (outputs.variance + noise).sqrt())
    return MultivariateNormal(outputs.mean, scale_tril=lower_root(covariance + noise.diag_embed()))


def _checked_noise(values: Any) -> Tensor:
    try:
        noise = torch.as_tensor(values).detach().double().clone()
    except (TypeError, ValueError, RuntimeError):
        noise = torch.empty(0)
    if noise.dim() != 1 or not len(noise) or not (noise.isfinite() & (noise > 0)).all():
        raise OptionError(
            f"sigma_noise={shown(values)}: one number, or a vector with one positive number per output, is needed."
        )
    return noise
