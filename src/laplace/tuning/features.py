"""Regress on a network's features in closed form: the last layer's weights, and an evidence that trains the features.

For y = W phi(x) + b + noise with independent normal priors on the entries of W and b, each column of y has the
distribution N(0, K + sigma^2) with K = Phi Phi^T / delta_W + 1 1^T / delta_b. Its log-density is the evidence that
`Laplace(..., 'last_layer', 'full')` has at the posterior mean. It is a smooth function of Phi, so its gradient reaches
whatever made the features: scales of the inputs, hidden weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laplace.checks import positive, shown
from laplace.errors import InputError, OptionError


@dataclass(frozen=True)
class LastLayerRegression:
    """Holds the last layer of a regression, in closed form. Made by `regress_on_features`.

    Attributes:
        weight: The posterior mean of the weights, (C, H).
        bias: The posterior mean of the biases, (C,).
        log_evidence: log p(y), summed over the outputs. A tensor of shape () that can be differentiated.
    """

    weight: Tensor
    bias: Tensor
    log_evidence: Tensor

    def linear(self) -> nn.Linear:
        """Return the layer with these weights, to be appended to the network that makes the features."""
        c, h = self.weight.shape
        layer = nn.Linear(h, c, device=self.weight.device, dtype=self.weight.dtype)
        with torch.no_grad():
            layer.weight.copy_(self.weight)
            layer.bias.copy_(self.bias)
        return layer


def regress_on_features(
    features: Tensor,
    targets: Tensor,
    prior_precision: float | Tensor = 1.0,
    sigma_noise: float | Tensor = 1.0,
) -> LastLayerRegression:
    """Return the posterior mean of a last layer and its evidence, which can be differentiated in all arguments.

    Maximise `log_evidence` to train what makes the features; then fit a `Laplace` with the same `prior_precision` and
    `sigma_noise` to the network with `linear()` as its last layer. Costs N^2 H + N^3 or H^2 N + H^3 operations,
    whichever is less. Give float64 if the noise is small.

    Args:
        features: What the last layer is given, Phi, (N, H).
        targets: The outcomes, (N, C).
        prior_precision: The prior precision of all weights, or of weights and biases, (2,).
        sigma_noise: The standard deviation of the observation noise.

    Raises:
        InputError: features and targets are no matrices with the same number of rows.
        OptionError: a precision or the noise is not positive.
    """
    if features.dim() != 2 or targets.dim() != 2 or len(features) != len(targets):
        raise InputError(
            f"features and targets are {tuple(features.shape)} and {tuple(targets.shape)}; (N, H) and (N, C) are "
            "needed. Write y.unsqueeze(-1) for one outcome."
        )
    delta, sigma = positive(prior_precision, "prior_precision").to(features), positive(sigma_noise, "sigma_noise")
    if delta.numel() > 2 or sigma.numel() != 1:
        raise OptionError(
            f"prior_precision={shown(prior_precision)}, sigma_noise={shown(sigma_noise)}: one precision or two, of "
            "weights and biases, and one noise are allowed."
        )
    deviations, variance = delta.flatten().expand(2).rsqrt(), sigma.to(features).reshape(()).square()
    phi = torch.cat([features * deviations[0], deviations[1].expand(len(features), 1)], 1)  # of weights w ~ N(0, 1)
    n, h = phi.shape
    if n <= h:
        factor = torch.linalg.cholesky(phi @ phi.T + variance * torch.eye(n).to(phi))
        white = torch.linalg.solve_triangular(factor, targets, upper=False)
        fit, log_det = white.square().sum(), 2 * factor.diagonal().log().sum()
        mean = phi.T @ torch.linalg.solve_triangular(factor.T, white, upper=True)
    else:
        factor = torch.linalg.cholesky(phi.T @ phi + variance * torch.eye(h).to(phi))
        white = torch.linalg.solve_triangular(factor, phi.T @ targets, upper=False)
        mean = torch.linalg.solve_triangular(factor.T, white, upper=True)
        fit = (targets - phi @ mean).square().sum() / variance + mean.square().sum()
        log_det = 2 * factor.diagonal().log().sum() + (n - h) * variance.log()
    evidence = -(fit + targets.shape[1] * (log_det + n * math.log(2 * math.pi))) / 2
    return LastLayerRegression((mean[:-1] * deviations[0]).T, mean[-1] * deviations[1], evidence)
