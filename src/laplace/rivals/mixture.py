"""Mixtures of Laplace approximations (Eschenhagen et al. 2021): an ensemble whose members know their uncertainty.

At an input, the outputs have the distribution sum_k w_k N(f_k, S_k): the Gaussians of the members, weighted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from laplace.checks import positive, shown
from laplace.errors import InputError, OptionError
from laplace.inference.source import Answer, Frame, Part, Source, scaled_outputs
from laplace.keywords import checked_before
from laplace.network.inputs import Inputs
from laplace.predictive.mixtures import OutputMixture, Outputs, joined
from laplace.predictive.outputs import OutputGaussian, OutputSamples
from laplace.predictive.positions import Positions
from laplace.predictive.queries import Covariances, Functions, Joint, Products, Query
from laplace.predictive.reshape import Reshaper
from laplace.rivals.base import Options, Rival
from laplace.rivals.ensemble import weights_of
from laplace.rivals.members import chosen_members


class Member(Source, Protocol):
    """Defines a source with a network: a fitted `Laplace`, or any rival."""

    @property
    def model(self) -> nn.Module: ...


class Mixture(Rival):
    """Averages the predictions of several fitted `Laplace` objects, or other sources.

    Classes and labels: p(y) = sum_k w_k E[softmax(f)], f ~ N(f_k, S_k), through the same link for all members. The
    epistemic part is the mutual information of y and both, the member and its weights. Regression: the normal with the
    mean and variance of the mixture. Each member keeps its own prior, noise and softmax temperature.

    Args:
        members: at least one; all with the same likelihood and outputs of one shape.
        weights: the probability of each member, up to a factor; equal by default.
        softmax_temperature: T, by which all logits are divided, besides the members' own. `calibrate` finds it.

    Attributes:
        members: the sources.
        weights: their probabilities, (K,).

    Raises:
        OptionError: there is no member, the likelihoods differ, or a weight is negative.
    """

    def __init__(
        self,
        members: Sequence[Member],
        weights: Sequence[float] | Tensor | None = None,
        *,
        softmax_temperature: float = 1.0,
    ) -> None:
        if hasattr(members, "outputs"):
            raise OptionError(f"members is one {type(members).__name__}; write Mixture([...]) with a list of them.")
        self.members = list(members)
        if not self.members or not all(hasattr(member, "outputs") for member in self.members):
            came = ", ".join(sorted({type(member).__name__ for member in self.members})) or "an empty list"
            raise OptionError(
                f"members is {came}; a list of fitted Laplace objects is needed. Networks: Ensemble([...])."
            )
        likelihoods = list(dict.fromkeys(member.likelihood.described for member in self.members))
        if len(likelihoods) > 1:
            raise OptionError(f"the members have the likelihoods {', '.join(likelihoods)}; one for all is needed.")
        self.weights = weights_of(weights, len(self.members))
        first = self.members[0]
        super().__init__(Options(first.likelihood, first.frame), 1.0, softmax_temperature)
        self._noise: Tensor | None = None

    if not TYPE_CHECKING:
        __new__ = checked_before(__init__)

    @property
    def model(self) -> nn.Module:
        """Return the network of the first member."""
        return self.members[0].model

    @property
    def n_outputs(self) -> int | None:
        """Return the number of outputs, C. None before the first run."""
        return next((c for member in self.members if (c := member.n_outputs) is not None), None)

    @property
    def frame(self) -> Frame:
        """Return how inputs are read: as the first member does."""
        functional = any(member.frame.functional for member in self.members)
        return replace(self.members[0].frame, functional=functional)

    @property
    def noise_level(self) -> Tensor:  # ()
        """Return the level of the observation noise: the root of the mean of the members' noise variances."""
        if self._noise is not None:
            return self._noise
        levels = torch.stack([member.noise_level.detach().double().cpu() for member in self.members])
        return (self.weights @ levels.square()).sqrt().to(self.members[0].noise_level.device)

    @property
    def sigma_noise(self) -> Tensor:
        """Return the standard deviation of the observation noise of a regression; may be set."""
        return self.likelihood.noise_at(self.noise_level)

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        found, level = self.likelihood.with_noise(positive(value, "sigma_noise").detach().double())
        if found.described != self.likelihood.described:
            raise OptionError(
                f"sigma_noise={shown(value)}: the noise of the outputs relative to each other is that of the members. "
                "Give one number, which scales all of them."
            )
        self._noise = level

    def outputs(self, inputs: Inputs, need: Query, answer: Answer | None = None) -> Iterator[Part]:
        """Yield the distribution of the outputs, as one part.

        Args:
            inputs: what the networks are called with.
            need: how much of the distribution is asked for; each member is asked for the same.
            answer: counts what the caller keeps, which is refused before it would not fit into memory.

        Raises:
            InputError: the members' outputs have different shapes.
            NotFittedError: a member is not fitted yet.
        """
        if isinstance(need, Functions):
            counts = chosen_members(self.weights, need.draws).bincount(minlength=len(self.members)).tolist()
            used = [(member, n) for member, n in zip(self.members, counts, strict=True) if n]
            asked = [(member, replace(need, draws=replace(need.draws, n=n))) for member, n in used]
            positions, found = self._answers(asked, inputs, answer)
            yield Part(positions, OutputSamples(torch.cat([o.samples for o in found if isinstance(o, OutputSamples)])))
            return
        if isinstance(need, Products):  # which cannot be joined
            need = Covariances()
        positions, found = self._answers([(member, need) for member in self.members], inputs, answer)
        mixture = _flat(found, self.weights)
        if isinstance(need, Joint):
            yield Part(positions, OutputGaussian(mixture.mean, mixture.variance, mixture.covariance))
        else:
            yield Part(positions, mixture)

    def _answers(
        self, asked: Sequence[tuple[Member, Query]], inputs: Inputs, answer: Answer | None
    ) -> tuple[Positions, list[Outputs]]:
        """Return the outputs of each member, at all inputs together."""
        seen, found = [], []
        for member, need in asked:
            shape = Reshaper()
            found.append(joined([part.outputs for part in shape.watch(scaled_outputs(member, inputs, need, answer))]))
            seen.append(shape.positions)
            if seen[-1] != seen[0]:
                raise InputError(
                    f"the members' outputs have different shapes: {seen[0].c} at {seen[0].grid} and {seen[-1].c} at "
                    f"{seen[-1].grid}. All members must return the same shape."
                )
        return seen[0], found

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(type(member).__name__ for member in self.members))
        return f"Mixture of {len(self.members)} ({kinds}), {self.likelihood.described}"


def _flat(outputs: list[Outputs], weights: Tensor) -> OutputMixture:
    """Return the mixture of these distributions; members that are mixtures are taken apart."""
    members: list[OutputGaussian | OutputSamples] = []
    shares: list[Tensor] = []
    for one, weight in zip(outputs, weights, strict=True):
        if isinstance(one, OutputMixture):
            members += one.members
            shares.append(weight * one.weights.to(weight))
        else:
            members.append(one)
            shares.append(weight.reshape(1))
    return OutputMixture(tuple(members), torch.cat(shares))
