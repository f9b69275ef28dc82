"""Mixtures of output distributions, sum_k w_k N(f_k, S_k): of several networks, each with or without a posterior.

Means of functions of f are weighted sums over the members. Variances obey the law of total variance,

    S = sum_k w_k (S_k + (f_k - f) (f_k - f)^T),    f = sum_k w_k f_k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.linalg.sampling import Draws
from laplace.predictive.outputs import OutputGaussian, OutputSamples

_CHUNK = 2**16  # elements drawn at a time, as of one Gaussian


@dataclass(frozen=True)
class OutputMixture:
    """Mixes the output distributions of several members at the same inputs.

    Attributes:
        members: The distribution of the outputs under each member.
        weights: The probability of each, (K,). They sum to 1.
    """

    members: tuple[OutputGaussian | OutputSamples, ...]
    weights: Tensor

    @property
    def mean(self) -> Tensor:  # (N, C)
        """Return the mean of f."""
        return self.averaged([member.mean for member in self.members])

    @property
    def variance(self) -> Tensor:  # (N, C)
        """Return the variance of f: that within the members, and that between them."""
        mean = self.mean
        return self.averaged([member.variance + (member.mean - mean).square() for member in self.members])

    @property
    def covariance(self) -> Tensor | None:  # (N, C, C)
        """Return the covariance of each input's outputs, if it is known of every member."""
        found = [member.covariance for member in self.members]
        known = [covariance for covariance in found if covariance is not None]
        if len(known) < len(found):
            return None
        mean = self.mean
        off = [member.mean - mean for member in self.members]
        pairs = zip(known, off, strict=True)
        return self.averaged([covariance + d.unsqueeze(-1) * d.unsqueeze(-2) for covariance, d in pairs])

    def averaged(self, values: Sequence[Tensor]) -> Tensor:
        """Return the weighted sum of one value per member."""
        return torch.tensordot(self.weights.to(values[0]), torch.stack(list(values)), 1)

    def marginals(self) -> OutputMixture:
        """Return the same mixture without covariances within the members."""
        return replace(self, members=tuple(member.marginals() for member in self.members))

    def map_rows(self, f: Callable[[Tensor], Tensor]) -> OutputMixture:
        """Return the mixture with f applied to each tensor, whose rows are the inputs."""
        members = tuple(member.map_rows(f) for member in self.members)
        return OutputMixture(members, self.weights.to(members[0].mean.device))

    def scaled(self, factor: float) -> OutputMixture:
        """Return the distribution of a f for a factor a."""
        return replace(self, members=tuple(member.scaled(factor) for member in self.members))

    def draws(self, how: Draws) -> Iterator[Tensor]:
        """Yield draws for consecutive chunks of inputs, (S, n, C): those of each member, one member after the other.

        Each member has as many draws as it needs for `how.n` of all. Their weights are those of `weights_of_draws`.
        """
        each = [replace(how, n=self._draws_each(how)) for _ in self.members]  # random numbers of their own
        n, c = self.mean.shape
        step = max(1, _CHUNK // (how.n * c))
        for start in range(0, max(1, n), step):
            part = self.map_rows(lambda t, rows=slice(start, start + step): t[rows])
            members = zip(part.members, each, strict=True)
            yield torch.cat([torch.cat(list(member.draws(draws)), 1) for member, draws in members])

    def weights_of_draws(self, how: Draws) -> Tensor:  # (S,)
        """Return the weight of each of the draws that `draws` makes."""
        found = []
        for member, weight in zip(self.members, self.weights, strict=True):
            within = member.weights_of_draws(how)
            if within is None:
                count = len(member.samples) if isinstance(member, OutputSamples) else self._draws_each(how)
                within = weight.new_full((count,), 1 / count)
            found.append(weight * within.to(weight))
        return torch.cat(found)

    def _draws_each(self, how: Draws) -> int:
        return max(2, -(-how.n // len(self.members)))


Outputs = OutputGaussian | OutputSamples | OutputMixture


def averaged(
    outputs: Outputs, of_gaussian: Callable[[OutputGaussian], Tensor], of_values: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return E[g(f)], given g and its mean under a Gaussian."""
    if isinstance(outputs, OutputGaussian):
        return of_gaussian(outputs)
    if isinstance(outputs, OutputSamples):
        return outputs.averaged(of_values(outputs.samples))
    return outputs.averaged([averaged(member, of_gaussian, of_values) for member in outputs.members])


def joined(parts: Sequence[Outputs]) -> Outputs:
    """Join the outputs of consecutive batches, which are all of one form."""
    samples = [part for part in parts if isinstance(part, OutputSamples)]
    mixtures = [part for part in parts if isinstance(part, OutputMixture)]
    if samples:
        return replace(samples[0], samples=torch.cat([part.samples for part in samples], 1))
    if mixtures:
        members = zip(*(part.members for part in mixtures), strict=True)
        return replace(mixtures[0], members=tuple(_member(joined(each)) for each in members))
    return _joined([part for part in parts if isinstance(part, OutputGaussian)])


def _member(outputs: Outputs) -> OutputGaussian | OutputSamples:
    assert isinstance(outputs, (OutputGaussian, OutputSamples))
    return outputs


def _joined(gaussians: list[OutputGaussian]) -> OutputGaussian:
    if len(gaussians) == 1:
        return gaussians[0].map_rows(lambda t: t)
    covariances = [g.covariance for g in gaussians if g.covariance is not None]
    contrasts = [g.contrasts for g in gaussians if g.contrasts is not None]
    return OutputGaussian(
        torch.cat([g.mean for g in gaussians]),
        torch.cat([g.variance for g in gaussians]),
        torch.cat(covariances) if covariances else None,
        contrasts=_joined(contrasts) if contrasts else None,
    )
