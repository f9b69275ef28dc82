"""Predictions made up for tests, without a network."""

from __future__ import annotations

import torch
from torch.distributions import Bernoulli, Categorical, Normal

from laplace.predictive import Prediction
from laplace.predictive.outputs import OutputGaussian


def regression(mean, std):
    """A prediction N(mean, std^2), (N, C)."""
    half = std.square() / 2
    return Prediction(Normal(mean, std), mean, half, half, OutputGaussian(mean, half))


def classes(p):
    """A prediction of classes with probabilities (N, C)."""
    nothing = torch.zeros(len(p), dtype=p.dtype)
    outputs = OutputGaussian(p.log(), torch.ones_like(p))
    return Prediction(Categorical(p), p, nothing, Categorical(p).entropy(), outputs)


def labels(p):
    """A prediction of labels 0 and 1 with probabilities of a 1, (N, C)."""
    nothing = torch.zeros_like(p)
    return Prediction(Bernoulli(p), p, nothing, nothing, OutputGaussian(p.logit(), torch.ones_like(p)))


def random_classes(n, c=5, seed=0, sharp=1.5):
    """Probabilities, and classes drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(sharp * torch.randn(n, c, generator=generator, dtype=torch.float64), -1)
    return p, torch.multinomial(p, 1, generator=generator).squeeze(1)


def random_regression(n, c=1, seed=0):
    """Means, standard deviations that are off by a factor, and numbers."""
    generator = torch.Generator().manual_seed(seed)
    mean, noise = (torch.randn(n, c, generator=generator, dtype=torch.float64) for _ in range(2))
    std = 0.2 + torch.rand(n, c, generator=generator, dtype=torch.float64)
    return mean, std, mean + 1.7 * std * noise
