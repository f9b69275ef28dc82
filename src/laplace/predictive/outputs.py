"""The distribution of the outputs f at some inputs: a Gaussian, or draws of the network itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.draws import Draws, normals_by_example

_CHUNK = 2**24  # elements drawn at a time


@dataclass(frozen=True)
class OutputGaussian:
    """N(f, S) for each input.

    Attributes:
        mean: (N, C).
        variance: (N, C).
        covariance: (N, C, C), where it was asked for.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None

    def __post_init__(self) -> None:
        if self.covariance is not None:  # rounding in float32 leaves it a little skewed
            object.__setattr__(self, "covariance", (self.covariance + self.covariance.mT) / 2)

    def draws(self, how: Draws) -> Iterator[Tensor]:
        """Draws for consecutive chunks of inputs, (S, n, C) each; without covariances, outputs are independent."""
        step = max(1, _CHUNK // (how.n * self.mean.shape[1]))
        for start in range(0, max(1, self.mean.shape[0]), step):
            part = slice(start, start + step)
            eps = normals_by_example(len(self.mean[part]), how.n, self.mean.shape[1], self.mean, how.generator)
            if self.covariance is None:
                yield self.mean[part] + self.variance[part].sqrt() * eps
            else:
                yield self.mean[part] + torch.einsum("ncd,snd->snc", root(self.covariance[part]), eps)


@dataclass(frozen=True)
class OutputSamples:
    """Outputs of the network with sampled weights.

    Attributes:
        samples: (S, N, C).
    """

    samples: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean over the draws."""
        return self.samples.mean(0)

    @property
    def variance(self) -> Tensor:
        """Variance over the draws."""
        return self.samples.var(0)

    def draws(self, how: Draws) -> Iterator[Tensor]:
        """The draws that there are."""
        yield self.samples


def root(covariance: Tensor) -> Tensor:  # (N, C, C)
    """R with R R^T = covariance; Cholesky where it exists, the symmetric root of the others."""
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed.any():
        values, vectors = torch.linalg.eigh(covariance[failed > 0])
        factor = factor.clone()
        factor[failed > 0] = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    return factor


def joined(parts: list[OutputGaussian | OutputSamples]) -> OutputGaussian | OutputSamples:
    """The outputs of consecutive batches as one."""
    samples = [part.samples for part in parts if isinstance(part, OutputSamples)]
    if samples:
        return OutputSamples(torch.cat(samples, 1))
    gaussians = [part for part in parts if isinstance(part, OutputGaussian)]
    covariances = [g.covariance for g in gaussians if g.covariance is not None]
    return OutputGaussian(
        torch.cat([g.mean for g in gaussians]),
        torch.cat([g.variance for g in gaussians]),
        torch.cat(covariances) if covariances else None,
    )
