"""Give BoTorch a Laplace posterior as a model: Gaussians over q points jointly, given further observations.

The outputs are Gaussian at any inputs, f ~ N(m, K) with K = J Sigma J^T. For a last layer with Gaussian noise this is
Bayesian linear regression on its features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from botorch.models.model import FantasizeMixin, Model
from botorch.posteriors import GPyTorchPosterior, Posterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from torch import Size, Tensor, nn

from laplace.checks import choice, generator_or_none, shown
from laplace.decisions.functions import DrawnFunctions, draw_functions
from laplace.errors import InputError, OptionError, UnsupportedError
from laplace.inference.blocks import noise_variance
from laplace.integrations.botorch.conditioning import Observations, drawn_given, joint, require_data
from laplace.integrations.botorch.path import LaplacePath
from laplace.laplace import Laplace
from laplace.likelihoods import Likelihood
from laplace.linalg.sampling import normals

_GIVE_NOISE = "Give the variances as a tensor: observation_noise= (posterior), noise= (condition_on_observations)."


class LaplaceModel(Model, FantasizeMixin):
    """Wraps a regression posterior as a BoTorch model. Differentiable in X, whatever `la.enable_backprop` is.

    The posterior is taken as it is: a later change of `la` or its hyperparameters does not reach the model.

    Args:
        la: A fitted posterior of a regression; of 'reward_modeling', the rewards are modelled.
        input_transform: What the inputs went through before the network was trained, such as BoTorch's Normalize.
        outcome_transform: What the outcomes went through, such as a Standardize that was called on them.
        train_X: The inputs of the training data, before the transform, (n, d). For `refit`, and for acquisition
            functions that read `model.train_inputs`.
        train_Y: The outcomes, (n, m).
        refit: Makes a new model from all data, (X, Y) -> LaplaceModel, by training the network again. Used by
            `condition_on_observations` if the outputs are not linear in the uncertain weights.

    Raises:
        OptionError: `la` is no Laplace posterior, or `refit` comes without data.
        NotFittedError: `la` has seen no data.
        UnsupportedError: the outputs of `la` are probabilities or rates.
    """

    input_transform: Any
    outcome_transform: Any

    def __init__(
        self,
        la: Laplace,
        input_transform: nn.Module | None = None,
        outcome_transform: nn.Module | None = None,
        *,
        train_X: Tensor | None = None,
        train_Y: Tensor | None = None,
        refit: Callable[[Tensor, Tensor], LaplaceModel] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(la, Laplace):
            raise OptionError(f"la is a {type(la).__name__}; a fitted Laplace(model, 'regression') is needed.")
        if la.likelihood.response.links:
            raise UnsupportedError(
                f"a BoTorch model is Gaussian in its outcomes; {la.likelihood.name!r} predicts probabilities or rates. "
                "Take Laplace(model, 'regression')."
            )
        if refit is not None and (train_X is None or train_Y is None):
            raise OptionError("refit= makes a model from all data, old and new: give train_X= and train_Y= as well.")
        _ = la.posterior.gaussian  # factorised once, for both copies
        self._views = copy.copy(la), copy.copy(la)
        self._views[0].enable_backprop, self._views[1].enable_backprop = False, True
        self._refit, self._observed, self._outputs = refit, None, None
        if input_transform is not None:
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        if train_X is not None and train_Y is not None:
            require_data(train_X, train_Y, self.num_outputs, "train_X", "train_Y")
            self._keep(train_X, train_Y)

    # ---- what it is --------------------------------------------------------------------------------------------------

    @property
    def laplace(self) -> Laplace:
        """Return the posterior, without what the model was conditioned on since."""
        return self._views[0]

    @property
    def likelihood(self) -> Likelihood:
        """Return the likelihood of the posterior."""
        return self.laplace.likelihood

    @property
    def num_outputs(self) -> int:
        """Return the number of outcomes, m."""
        return self._n_located if self._outputs is None else len(self._outputs)

    @property
    def batch_shape(self) -> Size:
        """Return the batch shape: that of the observations, such as the number of fantasies."""
        return Size() if self._observed is None else self._observed.batch_shape

    def _set_transformed_inputs(self) -> None:
        """Do nothing: the network was trained before."""

    # ---- BoTorch's calls ---------------------------------------------------------------------------------------------

    def posterior(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Posterior:
        """Return the joint Gaussian over q points and m outcomes, for every batch.

        Args:
            X: (*batch, q, d).
            output_indices: The wanted outcomes. All if left out.
            observation_noise: Whether to add the observation noise; or the variances of the wanted outcomes, in their
                order, (*batch, q, m), on the scale of transformed outcomes.
            posterior_transform: A transform of BoTorch.

        Returns:
            A `GPyTorchPosterior` over (*batch, q, m); with an outcome transform, what that makes of it.

        Raises:
            InputError: X has no dimension q or d.
            UnsupportedError: the noise at new inputs is unknown to the likelihood.
        """
        if output_indices is not None:
            some = self.subset_output(output_indices)
            return some.posterior(X, None, observation_noise, posterior_transform)
        self.eval()
        x = self._network_inputs(X)
        mean, covariance = joint(self.view, x, self._observed)
        noise = self._noise(x, observation_noise).to(mean)
        if self._outputs is not None:
            q, index = mean.shape[-2], torch.as_tensor(self._outputs, device=mean.device)
            rows = (torch.arange(q, device=mean.device)[:, None] * mean.shape[-1] + index).flatten()
            mean, covariance = mean[..., index], covariance[..., rows, :][..., rows]
            given = isinstance(observation_noise, Tensor)  # for these outcomes, in their order
            noise = noise if given or noise.dim() == 0 or noise.shape[-1] != self._n_located else noise[..., index]
        if observation_noise is not False:
            covariance = covariance + noise.expand_as(mean).flatten(-2).diag_embed()
        posterior: Posterior = GPyTorchPosterior(normal(mean.to(X.dtype), covariance.to(X.dtype)))
        if hasattr(self, "outcome_transform"):
            posterior = self.outcome_transform.untransform_posterior(posterior, X=X)
        return posterior if posterior_transform is None else posterior_transform(posterior=posterior, X=X)

    def subset_output(self, idcs: list[int]) -> LaplaceModel:
        """Return the model of some of its outcomes.

        Args:
            idcs: Their indices.

        Raises:
            OptionError: an index is out of range.
        """
        m = self.num_outputs
        if not isinstance(idcs, Sequence) or not idcs or not all(isinstance(i, int) and 0 <= i < m for i in idcs):
            raise OptionError(f"outputs {shown(idcs)} must be a list of indices from 0 to {m - 1}.")
        out = copy.copy(self)
        out._modules = dict(self._modules)  # copies of a module share their submodules' dict
        out._outputs = list(idcs) if self._outputs is None else [self._outputs[i] for i in idcs]
        if hasattr(self, "outcome_transform"):
            out.outcome_transform = self.outcome_transform.subset_output(list(idcs))
        return out

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> LaplaceModel:
        """Return the model with further observations.

        Exact for a last layer. For other weights, `refit` is called with all data if it was given; otherwise the
        linearised network is conditioned, at the weights that it has. Several sets of observations side by side, as
        in `fantasize`, always condition the network that is there. Each prediction then takes a joint covariance with
        the n' new points: after many of them, fit again.

        Args:
            X: (*batch, n', d).
            Y: (*batch, n', m), with batch dimensions that broadcast with those of X.
            noise: The variances of Y, on the scale of transformed outcomes. Those of the likelihood if left out.
            **kwargs: Not used.

        Raises:
            InputError: X and Y do not fit, or Y is not finite.
            UnsupportedError: this model has some of the outcomes only, or its likelihood does not know the noise.
        """
        if self._outputs is not None:
            raise UnsupportedError("condition the model of all outcomes, and then take subset_output of the result.")
        require_data(X, Y, self.num_outputs, "X", "Y")
        if self._refit is not None and not self.laplace.posterior.fit.linear and X.dim() == Y.dim() == 2:
            return self._refit(*self._with(X, Y))
        self.eval()
        x, y = self._network_inputs(X), Y
        if hasattr(self, "outcome_transform"):
            y, _ = self.outcome_transform(Y, None, X=X)
        variances = self._noise(x, True if noise is None else noise)
        new = Observations(x, y.to(x.dtype), variances.to(x).expand(*variances.shape[:-2], *y.shape[-2:]))
        out = copy.copy(self)
        out._observed = new if self._observed is None else self._observed.and_then(new)
        if hasattr(self, "train_inputs") and X.dim() == Y.dim() == 2:
            out._keep(*self._with(X, Y))
        return out

    def path(self, generator: torch.Generator | None = None, pred_type: str = "glm") -> LaplacePath:
        """Draw a function from the posterior: a network with one draw of its weights. For Thompson sampling.

        Maximise it with `optimize_acqf(PosteriorMean(model.path()), ...)`. If the model was conditioned on
        observations, so is the draw, by Matheron's rule: f(x) + C (K + noise)^-1 (y - f(X) - e).

        Args:
            generator: The random generator. torch's global one if left out.
            pred_type: 'glm' draws from the linearised network, as `posterior` is. 'nn' runs the network with the drawn
                weights; not after conditioning.

        Returns:
            A deterministic model: X (*batch, q, d) to outcomes (*batch, q, m), the same in every call.

        Raises:
            UnsupportedError: the posterior is a 'gp' without weights; or the model holds several sets of observations
                side by side.
        """
        pred_type, generator = choice(pred_type, ["glm", "nn"], "pred_type"), generator_or_none(generator)
        seen = self._observed
        if seen is not None and (pred_type == "nn" or self.batch_shape):
            raise UnsupportedError(
                "a path of a conditioned model needs pred_type='glm' and one set of observations, without batch "
                "dimensions."
            )
        drawn = draw_functions(self.laplace, 1, pred_type, generator)
        error = None if seen is None else seen.noise.sqrt() * normals(len(seen.y), seen.y.shape[1], seen.y, generator)
        return LaplacePath(self, drawn, error)

    def evaluate(self, drawn: DrawnFunctions, error: Tensor | None, X: Tensor) -> Tensor:  # (*batch, q, m)
        """Return the outcomes of a drawn function, given the observations. `LaplacePath` calls it.

        Args:
            drawn: One function of the network's own inputs.
            error: Drawn noise of the observations, (n, m). None if there are none.
            X: (*batch, q, d).
        """
        self.eval()
        x, seen = self._network_inputs(X), self._observed
        view, rows = self.view(x), x.flatten(0, -2)
        function = replace(drawn, source=view)
        if seen is None or error is None:
            f = self._located(function(rows))
        else:
            f = drawn_given(view, lambda rows: self._located(function(rows)), rows, seen, error)
        f = f.unflatten(0, x.shape[:-1]).to(X.dtype)
        f = f if self._outputs is None else f[..., self._outputs]
        return self.outcome_transform.untransform(f, X=X)[0] if hasattr(self, "outcome_transform") else f

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _located(self, drawn: Tensor) -> Tensor:  # (1, N, ...) -> (N, m)
        """Return those of the drawn outputs that are outcomes."""
        n = self.laplace.n_outputs
        return drawn.reshape(-1, n)[:, self.likelihood.response.location_outputs(n)]

    @property
    def _n_located(self) -> int:
        """Return how many of the network's outputs are outcomes, before a subset is taken."""
        n = self.laplace.n_outputs
        return len(range(n)[self.likelihood.response.location_outputs(n)])

    def _network_inputs(self, X: Tensor) -> Tensor:  # (*batch, q, d)
        """Return the inputs as the network takes them: transformed, in its dtype and on its device."""
        if not isinstance(X, Tensor) or X.dim() < 2:
            came = tuple(X.shape) if isinstance(X, Tensor) else type(X).__name__
            raise InputError(f"X is {came}; (*batch, q, d) is needed. Write X.unsqueeze(0) for one point (d,).")
        x = self.transform_inputs(X)
        weight = next((p for p in self.laplace.model.parameters() if p.is_floating_point()), x)
        return x.to(weight.device, weight.dtype)

    def view(self, *inputs: Tensor) -> Laplace:
        """Return the posterior that lets gradients through, if an input needs them, or else the one that does not."""
        return self._views[torch.is_grad_enabled() and any(x.requires_grad for x in inputs)]

    def _noise(self, x: Tensor, noise: bool | Tensor) -> Tensor:  # (*batch, q, m)
        """Return the variances of the observation noise at some inputs. Zero if none is asked for."""
        if isinstance(noise, Tensor):
            if noise.dim() < 2 or noise.shape[-1] not in (1, self.num_outputs) or not (noise >= 0).all():
                raise InputError(
                    f"the noise {tuple(noise.shape)} must hold variances (*batch, q, {self.num_outputs}), not negative."
                )
            return noise
        if not noise:
            return x.new_zeros(())
        found = noise_variance(self.view(x), x.flatten(0, -2), _GIVE_NOISE)
        return found.unflatten(0, x.shape[:-1])

    def _keep(self, X: Tensor, Y: Tensor) -> None:  # (n, d), (n, m)
        """Hold the training data under BoTorch's names: targets are (n,) for one outcome, and (m, n) for several."""
        self.train_inputs, self._train_Y = (X,), Y
        self.train_targets = Y.squeeze(-1) if Y.shape[-1] == 1 else Y.mT

    def _with(self, X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
        """Return all data, old and new."""
        (old,) = self.train_inputs
        return torch.cat([old, X.to(old)]), torch.cat([self._train_Y, Y.to(self._train_Y)])


def normal(mean: Tensor, covariance: Tensor) -> MultivariateNormal:  # (*batch, q, m), (*batch, q m, q m)
    """Return the distribution, whose roots are computed when they are needed."""
    lazy = to_linear_operator(covariance)
    if mean.shape[-1] == 1:
        return MultivariateNormal(mean.squeeze(-1), lazy)
    return MultitaskMultivariateNormal(mean, lazy, interleaved=True)
