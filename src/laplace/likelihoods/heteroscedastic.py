"""Regression with noise that the network predicts: f = (m, s), y ~ N(m, exp(s)), Lambda = diag(exp(-s), 1/2).

Under f ~ N(f, S), E[y] = m and Var[y] = S_mm + exp(s + S_ss / 2), in closed form.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal

from laplace.errors import InputError
from laplace.likelihoods.base import Likelihood, shaped_like_outputs
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.sampling import Draws, normals_by_example
from laplace.predictive.mixtures import averaged
from laplace.predictive.outputs import OutputGaussian
from laplace.predictive.response import Outputs


class HeteroscedasticGaussian(Likelihood):
    """Models a regression where the network predicts the noise; labels (N, C), outputs (N, 2 C).

    The first C outputs are the means, the last C the logarithms of the variances.
    """

    name = "heteroscedastic"
    hessian_is_fisher = False

    def check_outputs(self, f: Tensor) -> None:
        super().check_outputs(f)
        if f.shape[1] % 2 or not f.shape[1]:
            raise InputError(
                f"'{self.name}' needs an even number of outputs, C means and then C log-variances; the network's "
                f"output has shape {tuple(f.shape)}. Write nn.Linear(..., 2 * C)."
            )

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        if y.shape == f.shape:
            raise InputError(
                f"{self.name} labels have shape {tuple(y.shape)}, like the outputs, but half of those are variances: "
                f"labels ({len(f)}, {f.shape[1] // 2}) are needed."
            )
        return shaped_like_outputs(f[:, self.location_outputs(f.shape[1])], y, self.name)

    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
        m, s = f.chunk(2, -1)
        return -0.5 * ((y - m).square() * (-s).exp() + s + math.log(2 * math.pi)).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        m, s = f.chunk(2, -1)
        pull = (y - m) * (-s).exp()
        return torch.cat([pull, 0.5 * (pull * (y - m) - 1)], -1)

    def fisher(self, f: Tensor, y: Tensor | None = None) -> OutputCurvature:
        precision = (-f.chunk(2, -1)[1]).exp()
        return OutputCurvature(diagonal=torch.cat([precision, torch.full_like(precision, 0.5)], -1))

    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        m, s = f.chunk(2, -1)
        return m + (0.5 * s).exp() * normals_by_example(m.shape[0], n_samples, m.shape[1], f, generator)

    def location_outputs(self, n_outputs: int) -> slice:
        return slice(0, n_outputs // 2)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f.chunk(2, -1)[0]

    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        """Return the normal with the mean and variance of y. The exact distribution is a mixture of normals."""
        epistemic, aleatoric = self._variances(outputs)
        return Normal(outputs.mean.chunk(2, -1)[0], (epistemic + aleatoric).sqrt())

    def uncertainty(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        return self._variances(outputs)

    def _variances(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Return S_mm and E[exp(s)], (N, C) each."""
        noise = averaged(outputs, _mean_noise, lambda f: f.chunk(2, -1)[1].exp())
        return outputs.variance.chunk(2, -1)[0], noise


def _mean_noise(outputs: OutputGaussian) -> Tensor:
    """Return exp(s + S_ss / 2)."""
    return (outputs.mean + outputs.variance / 2).chunk(2, -1)[1].exp()
