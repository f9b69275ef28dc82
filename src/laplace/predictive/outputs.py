"""Hold the distribution of the outputs f at some inputs: a Gaussian, or draws of the network's outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from laplace.checks import all_finite
from laplace.errors import NumericalError
from laplace.linalg.contrasts import as_if_independent, centred_twice, variances_if_independent
from laplace.linalg.sampling import Draws, normals_by_example
from laplace.linalg.symmetric import or_double, spectrum

_CHUNK = 2**16  # elements drawn at a time: few enough to stay in a processor's cache until they are summed


@dataclass(frozen=True)
class OutputGaussian:
    """Holds N(f, S) for each input.

    Attributes:
        mean: (N, C).
        variance: (N, C).
        covariance: (N, C, C), if it was asked for.
        times: Maps v (N, C) to S v, if that is possible without the covariance.
        contrasts: The Gaussian of f_c - mean of f, if it was asked for: all that softmax sees of f. Its variances are
            not differences of the outputs' own, which a common shift may dominate.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None
    times: Callable[[Tensor], Tensor] | None = field(default=None, repr=False, compare=False)
    contrasts: OutputGaussian | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_finite(self.variance if self.covariance is None else self.covariance, "the variance of the outputs")
        object.__setattr__(self, "variance", self.variance.clamp(min=0))  # a difference may round to below 0
        if self.covariance is not None:  # rounding in float32 leaves it a little skewed
            object.__setattr__(self, "covariance", (self.covariance + self.covariance.mT) / 2)

    def marginals(self) -> OutputGaussian:
        """Return the same Gaussian without covariances: its outputs are treated as independent but for a shift."""
        contrasts = None if self.contrasts is None else self.contrasts.marginals()
        return replace(self, covariance=None, times=None, contrasts=contrasts)

    @property
    def contrast_variance(self) -> Tensor:  # (N, C)
        """Return the variances of f_c - mean of f. If no covariances are known, the outputs are independent."""
        if self.contrasts is not None:
            return self.contrasts.variance
        if self.covariance is not None:
            return centred_twice(self.covariance).diagonal(dim1=1, dim2=2).clamp(min=0)
        return variances_if_independent(self.variance)

    def map_rows(self, f: Callable[[Tensor], Tensor]) -> OutputGaussian:
        """Return the Gaussian with f applied to each tensor, whose rows are the inputs."""
        same, contrasts = copy.copy(self), self.contrasts  # a copy: these values were checked
        parts = {"mean": self.mean, "variance": self.variance, "covariance": self.covariance}
        for name, value in parts.items():
            object.__setattr__(same, name, None if value is None else f(value))
        object.__setattr__(same, "times", None)
        object.__setattr__(same, "contrasts", None if contrasts is None else contrasts.map_rows(f))
        return same

    def beside(self, contrasts: OutputGaussian) -> OutputGaussian:
        """Return the Gaussian with that of its contrasts."""
        same = copy.copy(self)
        object.__setattr__(same, "contrasts", contrasts)
        return same

    def scaled(self, factor: float) -> OutputGaussian:
        """Return N(a f, a^2 S) for a factor a."""
        if factor == 1:
            return self
        contrasts = None if self.contrasts is None else self.contrasts.scaled(factor)
        return replace(self.widened(factor * factor), mean=factor * self.mean, contrasts=contrasts)

    def widened(self, factor: float) -> OutputGaussian:
        """Return N(f, a S) for a factor a."""
        times, covariance = self.times, self.covariance
        return replace(
            self,
            variance=factor * self.variance,
            covariance=None if covariance is None else factor * covariance,
            times=None if times is None else lambda v: factor * times(v),
            contrasts=None if self.contrasts is None else self.contrasts.widened(factor),
        )

    def product(self, v: Tensor) -> Tensor:  # (N, C) -> (N, C)
        """Return S v. If no covariances are known, the outputs are treated as independent."""
        if self.times is not None:
            return self.times(v)
        if self.covariance is not None:
            return torch.einsum("ncd,nd->nc", self.covariance, v)
        return self.variance * v

    def _with_some_shift(self) -> OutputGaussian:
        """Return, for the Gaussian of contrasts, one of outputs that have them: its covariance is not singular."""
        if self.covariance is None:
            return replace(self, variance=as_if_independent(self.variance))
        c = self.mean.shape[1]
        shift = self.variance.sum(-1) / (c * max(1, c - 1))  # the mean of the other eigenvalues, over C
        return replace(self, covariance=self.covariance + shift[:, None, None])

    def draws(self, how: Draws) -> Iterator[Tensor]:
        """Yield draws for consecutive chunks of inputs, (S, n, C). Without covariances, outputs are independent.

        All inputs share the same random numbers, unless `how.apart`: see `Draws`.

        If the contrasts are known, draws have these, and a common shift of no meaning: for who sees differences only.
        """
        if self.contrasts is not None:
            yield from self.contrasts._with_some_shift().draws(how)
            return
        step = max(1, _CHUNK // (how.n * self.mean.shape[1]))
        for start in range(0, max(1, self.mean.shape[0]), step):
            part = slice(start, start + step)
            f, variance = self.mean[part], self.variance[part]
            roots = None if self.covariance is None else root(self.covariance[part])
            yield _apart(f, variance, roots, how) if how.apart else _together(f, variance, roots, how)

    def weights_of_draws(self, how: Draws) -> Tensor | None:
        """Return None: draws have equal weights."""
        return None


def _apart(f: Tensor, variance: Tensor, roots: Tensor | None, how: Draws) -> Tensor:  # (S, n, C)
    """Draw with random numbers of its own for each input."""
    eps = normals_by_example(len(f), how.n, f.shape[1], f, how.generator)
    return f + (variance.sqrt() * eps if roots is None else torch.einsum("ncd,snd->snc", roots, eps))


def _together(f: Tensor, variance: Tensor, roots: Tensor | None, how: Draws) -> Tensor:  # (S, n, C)
    """Draw with the same random numbers for all inputs. The draws of a number lie side by side in memory.

    So a sum over draws or classes adds vectors; softmax over neighbouring classes takes ten times longer.
    """
    eps = how.shared_normals(f.shape[1], f)
    if roots is None:
        drawn = torch.addcmul(f.unsqueeze(2), variance.sqrt().unsqueeze(2), eps)
    else:
        drawn = torch.addmm(f.reshape(-1, 1), roots.flatten(0, 1), eps).unflatten(0, f.shape)
    return drawn.permute(2, 0, 1)


@dataclass(frozen=True)
class OutputSamples:
    """Holds outputs of several networks: draws from a distribution, or all of its values with their weights.

    Attributes:
        samples: (S, N, C).
        weights: The probability of each value, (S,). None if they are draws, from which the distribution is estimated.
        joint: Whether covariances between outputs are asked for. Draws have none.
    """

    samples: Tensor
    weights: Tensor | None = None
    joint: bool = False

    @property
    def mean(self) -> Tensor:
        """Return the mean over the draws."""
        return self.averaged(self.samples)

    @property
    def variance(self) -> Tensor:
        """Return the variance over the draws; of all values of a distribution, exactly its variance."""
        if self.weights is None:
            return self.samples.var(0)
        return self.averaged((self.samples - self.mean).square())

    @property
    def covariance(self) -> Tensor | None:  # (N, C, C)
        """Return the covariance of each input's outputs, if it was asked for."""
        if not self.joint or self.weights is None:
            return None
        off = self.samples - self.mean
        return torch.einsum("s,snc,snd->ncd", self.weights.to(off), off, off)

    def averaged(self, values: Tensor) -> Tensor:  # (S, ...) -> (...)
        """Return the mean of one value per draw."""
        return values.mean(0) if self.weights is None else torch.tensordot(self.weights.to(values), values, 1)

    def marginals(self) -> OutputSamples:
        """Return the same without covariances."""
        return replace(self, joint=False)

    def map_rows(self, f: Callable[[Tensor], Tensor]) -> OutputSamples:
        """Return the draws with f applied to a tensor of them whose rows are the inputs, (N, S, C)."""
        return replace(self, samples=f(self.samples.movedim(1, 0)).movedim(0, 1))

    def scaled(self, factor: float) -> OutputSamples:
        """Return a f for each draw f."""
        return self if factor == 1 else replace(self, samples=factor * self.samples)

    def draws(self, how: Draws) -> Iterator[Tensor]:
        """Yield the stored draws; `how` is not used."""
        yield self.samples

    def weights_of_draws(self, how: Draws) -> Tensor | None:  # (S,)
        """Return the weights of the draws; None if they are equal."""
        return self.weights


def require_finite(values: Tensor, what: str, axis: int = 0) -> Tensor:
    """Return `values`, which have one entry per input along `axis`. Refuse NaN and infinite ones."""
    if not all_finite(values):
        inputs = (~values.isfinite()).movedim(axis, 0).flatten(1).any(1).nonzero().flatten().tolist()
        raise NumericalError(
            f"{what} is NaN or infinite at {len(inputs)} inputs, the first is number {inputs[0]}, though the outputs "
            "are finite: it has overflowed, or the network has no derivative there. Raise the prior precision, or "
            f"scale the inputs to about 1{or_double(values.dtype)}."
        )
    return values


def root(covariance: Tensor) -> Tensor:  # (N, C, C)
    """Return R with R R^T = covariance: the Cholesky factor if it exists, else the symmetric root."""
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed.any():
        values, vectors = spectrum(covariance[failed > 0])
        factor = factor.clone()
        factor[failed > 0] = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    return factor


def lower_root(covariance: Tensor) -> Tensor:  # (N, C, C)
    """Return L, lower triangular with a positive diagonal, such that L L^T = covariance.

    Eigenvalues that are zero in this dtype are raised to its rounding error.
    """
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed.any():
        values, vectors = spectrum(covariance[failed > 0].double())
        least = torch.finfo(covariance.dtype).eps * values[:, -1:].clamp(min=torch.finfo(covariance.dtype).tiny)
        upper = torch.linalg.qr((vectors * torch.maximum(values, least).sqrt().unsqueeze(-2)).mT).R
        factor = factor.clone()
        factor[failed > 0] = (upper.mT * upper.diagonal(dim1=1, dim2=2).sign().unsqueeze(-2)).to(factor)
    return factor
