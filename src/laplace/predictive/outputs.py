"""The distribution of the outputs f at some inputs: a Gaussian, or draws of the network itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.algebra import spectrum
from laplace.draws import Draws, normals_by_example
from laplace.errors import NumericalError

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
        require_finite(self.variance if self.covariance is None else self.covariance, "the variance of the outputs")
        object.__setattr__(self, "variance", self.variance.clamp(min=0))  # differences may round to below
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


def require_finite(values: Tensor, what: str, axis: int = 0) -> Tensor:
    """What follows from finite outputs, one entry per input along an axis, refused where it is NaN or infinite."""
    bad = ~values.isfinite()
    if bad.any():
        inputs = bad.movedim(axis, 0).flatten(1).any(1).nonzero().flatten().tolist()
        raise NumericalError(
            f"{what} is NaN or infinite at {len(inputs)} inputs, the first is number {inputs[0]}, though the outputs "
            "are finite: it has overflowed, or the network has no derivative there. Raise the prior precision, scale "
            "the inputs to about 1, or take model.double()."
        )
    return values


def root(covariance: Tensor) -> Tensor:  # (N, C, C)
    """R with R R^T = covariance; Cholesky where it exists, the symmetric root of the others."""
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed.any():
        values, vectors = spectrum(covariance[failed > 0])
        factor = factor.clone()
        factor[failed > 0] = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    return factor


def lower_root(covariance: Tensor) -> Tensor:  # (N, C, C)
    """L, lower triangular with a positive diagonal; of matrices that are singular in this dtype a little is added."""
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed.any():
        values, vectors = spectrum(covariance[failed > 0].double())
        least = torch.finfo(covariance.dtype).eps * values[:, -1:].clamp(min=torch.finfo(covariance.dtype).tiny)
        upper = torch.linalg.qr((vectors * torch.maximum(values, least).sqrt().unsqueeze(-2)).mT).R
        factor = factor.clone()
        factor[failed > 0] = (upper.mT * upper.diagonal(dim1=1, dim2=2).sign().unsqueeze(-2)).to(factor)
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
