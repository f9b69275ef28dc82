"""Give BoTorch a mixture of Laplace posteriors as a model: acquisition functions are averaged over its members."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from botorch.models.model import Model
from botorch.posteriors import GPyTorchPosterior
from botorch.posteriors.fully_bayesian import MCMC_DIM, GaussianMixturePosterior
from botorch.sampling.base import MCSampler
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Size, Tensor

from laplace.checks import generator_or_none
from laplace.errors import OptionError, UnsupportedError
from laplace.integrations.botorch.model import LaplaceModel, normal
from laplace.integrations.botorch.path import LaplacePath


class LaplaceMixtureModel(Model):
    """Holds several models that are equally likely, such as networks with different scales or restarts.

    BoTorch averages the value of an acquisition function over the members, as over the draws of a fully Bayesian
    Gaussian process. It knows no weights: draw the members by theirs. A prediction costs that of all members.

    Args:
        members: At least one `LaplaceModel`, all with the same number of outcomes, none with several sets of
            observations side by side.

    Attributes:
        members: The models.

    Raises:
        OptionError: a member is no `LaplaceModel`, or the numbers of outcomes differ.
        UnsupportedError: a member has batch dimensions.
    """

    _is_ensemble = True  # which BoTorch's acquisition functions ask

    def __init__(self, members: Sequence[LaplaceModel]) -> None:
        super().__init__()
        members = list(members)
        if not members or not all(isinstance(member, LaplaceModel) for member in members):
            came = ", ".join(sorted({type(member).__name__ for member in members})) or "an empty list"
            raise OptionError(f"members is {came}; write [LaplaceModel(la, ...) for la in ...].")
        if len(counts := sorted({member.num_outputs for member in members})) > 1:
            raise OptionError(f"the members have {counts} outcomes; all need the same number.")
        if any(member.batch_shape for member in members):
            raise UnsupportedError("a member of a mixture must be one model, without batch dimensions.")
        self.members = members
        if all(hasattr(member, "train_inputs") for member in members):
            self.train_inputs, self.train_targets = members[0].train_inputs, members[0].train_targets

    @property
    def num_outputs(self) -> int:
        """Return the number of outcomes, m."""
        return self.members[0].num_outputs

    @property
    def batch_shape(self) -> Size:
        """Return the number of members, as a shape: BoTorch sees them as a batch. Fantasies come before it."""
        return Size([*self.members[0].batch_shape, len(self.members)])

    def posterior(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> GaussianMixturePosterior:
        """Return the joint Gaussian over q points and m outcomes under every member, (*batch, K, q, m).

        Args:
            X: (*batch, q, d).
            output_indices: The wanted outcomes. All if left out.
            observation_noise: Whether to add the observation noise, or its variances; as of `LaplaceModel.posterior`.
            posterior_transform: A transform of BoTorch, applied to every member.

        Returns:
            A posterior whose `mean` and `variance` are those of the members; `mixture_mean` and `mixture_variance` are
            those of their mixture.

        Raises:
            InputError: X has no dimension q or d.
            UnsupportedError: the outcomes are not Gaussian after the transforms are undone.
        """
        found = [member.posterior(X, output_indices, observation_noise, posterior_transform) for member in self.members]
        gaussians = [posterior.distribution for posterior in found if isinstance(posterior, GPyTorchPosterior)]
        if len(gaussians) < len(found):
            raise UnsupportedError(
                "a mixture needs Gaussian outcomes: take an outcome_transform that is linear, such as Standardize."
            )
        many = isinstance(gaussians[0], MultitaskMultivariateNormal)
        mean = torch.stack([g.mean if many else g.mean.unsqueeze(-1) for g in gaussians], MCMC_DIM)
        covariance = torch.stack([g.covariance_matrix for g in gaussians], -3)
        return GaussianMixturePosterior(normal(mean, covariance))

    def subset_output(self, idcs: list[int]) -> LaplaceMixtureModel:
        """Return the mixture of some of its outcomes.

        Args:
            idcs: Their indices.
        """
        return LaplaceMixtureModel([member.subset_output(idcs) for member in self.members])

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> LaplaceMixtureModel:
        """Return the mixture whose members have further observations. They stay equally likely.

        Args:
            X: (n', d).
            Y: (n', m).
            noise: The variances of Y, on the scale of transformed outcomes. Those of the likelihood if left out.
            **kwargs: Not used.

        Raises:
            InputError: X and Y do not fit, or Y is not finite.
            UnsupportedError: several sets of observations side by side were given.
        """
        return LaplaceMixtureModel([member.condition_on_observations(X, Y, noise) for member in self.members])

    def fantasize(
        self, X: Tensor, sampler: MCSampler, observation_noise: Tensor | None = None, **kwargs: Any
    ) -> LaplaceMixtureModel:
        """Return the members, each conditioned on outcomes at X that were drawn from it. For `qKnowledgeGradient`.

        Args:
            X: (*batch, n', d).
            sampler: A sampler of BoTorch, which draws the outcomes of each member with the same base samples.
            observation_noise: Variances of the outcomes; those of the likelihood if left out.
            **kwargs: As of BoTorch's `fantasize`.

        Returns:
            A model of batch shape (number of fantasies, *batch, K).
        """
        out = copy.copy(self)
        out.members = [member.fantasize(X, sampler, observation_noise, **kwargs) for member in self.members]
        out._is_ensemble = False  # who asks for fantasies averages over the members, and would do so twice
        return out

    def path(self, generator: torch.Generator | None = None, pred_type: str = "glm") -> LaplacePath:
        """Draw a member, and a function from its posterior. For Thompson sampling.

        Args:
            generator: The random generator. torch's global one if left out.
            pred_type: 'glm' or 'nn', as of `LaplaceModel.path`.
        """
        generator = generator_or_none(generator)
        chosen = int(torch.randint(len(self.members), (), generator=generator))
        return self.members[chosen].path(generator, pred_type)
