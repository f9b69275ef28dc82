"""Binary labels: y_c ~ Bernoulli(sigmoid(f_c)), independent given f, Lambda = diag(p (1 - p))."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.distributions import Bernoulli as Coin
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from laplace.errors import InputError
from laplace.likelihoods.base import IGNORED, Likelihood, shaped_like_outputs
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.sampling import Draws, uniforms
from laplace.predictive.entropy import decompose, entropy_of_label
from laplace.predictive.links import Link, MonteCarlo, shrunk
from laplace.predictive.logistic import expected_sigmoid
from laplace.predictive.outputs import OutputGaussian
from laplace.predictive.response import Outputs, at_quantiles


def probit(f: Tensor, variance: Tensor) -> Tensor:
    """Return sigmoid(f / sqrt(1 + pi/8 S))."""
    return shrunk(f, variance).sigmoid()


BINARY_LINKS: Final[dict[str, Link]] = {
    "probit": Link.of_variances(probit),
    "mc": Link(MonteCarlo(torch.sigmoid, marginal=True)),
    "quadrature": Link.of_variances(expected_sigmoid),
}


class Multilabel(Likelihood):
    """Predicts C binary labels from C logits; labels have shape (N, C) and are 0, 1 or a probability between them."""

    name = "multilabel"
    has_logits = True
    ignored = IGNORED
    links = BINARY_LINKS
    default_link = "quadrature"
    drawn_uncertainty = True

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        y = shaped_like_outputs(f, y, self.name)
        if len(y) and not ((y >= 0) & (y <= 1)).all():
            raise InputError(
                f"{self.name} labels lie in [{float(y.min()):g}, {float(y.max()):g}]; 0 and 1 are needed, or "
                "probabilities between them. For class indices write likelihood='classification'."
            )
        return y

    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
        return (y * logsigmoid(f) + (1 - y) * logsigmoid(-f)).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return y - f.sigmoid()

    def fisher(self, f: Tensor, y: Tensor | None = None) -> OutputCurvature:
        return OutputCurvature(diagonal=f.sigmoid() * (-f).sigmoid())

    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        return (uniforms(f.shape[0], n_samples, f.shape[1], f, generator) < f.double().sigmoid()).to(f.dtype)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f.sigmoid()

    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        assert p is not None
        return Coin(probs=p.clamp(0, 1))

    def quantiles(self, outputs: OutputGaussian, z: Tensor) -> Tensor:
        return self.inverse_link(at_quantiles(outputs, z))

    def uncertainty(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return the parts of each label's entropy, (N, C) each."""
        assert p is not None
        total = entropy_of_label(p)
        return decompose(total, outputs, draws, lambda f: torch.stack([f.sigmoid(), (-f).sigmoid()], -1))


class Bernoulli(Multilabel):
    """Predicts one binary label from one logit; labels have shape (N,) or (N, 1), predictions (N, 1)."""

    name = "binary"

    def check_outputs(self, f: Tensor) -> None:
        super().check_outputs(f)
        if f.shape[1] != 1:
            raise InputError(
                f"'{self.name}' needs one output; the network's output has shape {tuple(f.shape)}. For one of "
                f"{f.shape[1]} classes write likelihood='classification', for {f.shape[1]} labels 'multilabel'."
            )
