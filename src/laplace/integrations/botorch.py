"""A Laplace posterior as a model of BoTorch: posteriors over q points jointly, conditioning, fantasies, drawn paths.

    model = LaplaceModel(la, input_transform=normalize, outcome_transform=standardize)
    candidate, value = optimize_acqf(qLogExpectedImprovement(model, best_f), bounds, q=1, ...)

The outputs are Gaussian at any inputs, f ~ N(m, K) with K = J Sigma J^T, so new observations y = f + noise condition
them as in a Gaussian process: with the covariance C of f(x) and f(X) at new inputs X,

    m(x) + C (K(X, X) + noise)^-1 (y - m(X)),    K(x, x) - C (K(X, X) + noise)^-1 C^T.

For a last layer with Gaussian noise this is Bayesian linear regression on its features, with all data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Size, Tensor, nn

from laplace.checks import choice, generator_or_none, shown
from laplace.decisions.functions import DrawnFunctions, draw_functions
from laplace.errors import InputError, OptionError, UnsupportedError
from laplace.inference.blocks import joint_blocks, noise_variance
from laplace.laplace import Laplace
from laplace.likelihoods import Likelihood
from laplace.linalg.sampling import normals

try:
    from botorch.models.deterministic import DeterministicModel
    from botorch.models.model import FantasizeMixin, Model
    from botorch.posteriors import GPyTorchPosterior, Posterior
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator import to_linear_operator
    from linear_operator.utils.cholesky import psd_safe_cholesky
except ImportError as error:
    raise ImportError("laplace.integrations.botorch needs BoTorch: pip install 'laplace-redux[botorch]'") from error

__all__ = ["LaplaceModel", "LaplacePath"]

_GIVE_NOISE = "Give the variances as a tensor: observation_noise= (posterior), noise= (condition_on_observations)."


@dataclass(frozen=True)
class Observations:
    """What a model is conditioned on, as the network takes and gives it, after the transforms.

    Batch dimensions are those of BoTorch: several sets of observations side by side.
    """

    x: Tensor  # (*batch, n, d)
    y: Tensor  # (*batch, n, m)
    noise: Tensor  # variances, (*batch, n, m)

    def and_then(self, other: Observations) -> Observations:
        """Return the observations of both."""
        pairs = (self.x, other.x), (self.y, other.y), (self.noise, other.noise)
        return Observations(*(_stacked(a, b) for a, b in pairs))


class LaplaceModel(Model, FantasizeMixin):
    """A regression posterior as a BoTorch model. Differentiable in X, whatever `la.enable_backprop` is.

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
            _require_data(train_X, train_Y, self.num_outputs, "train_X", "train_Y")
            self.train_inputs, self.train_targets = (train_X,), train_Y.squeeze(-1)
            self._train_Y = train_Y

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
        seen = self._observed
        return Size() if seen is None else torch.broadcast_shapes(seen.x.shape[:-2], seen.y.shape[:-2])

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
        mean, covariance = self._joint(x)
        noise = self._noise(x, observation_noise).to(mean)
        if self._outputs is not None:
            q, index = mean.shape[-2], torch.as_tensor(self._outputs, device=mean.device)
            rows = (torch.arange(q, device=mean.device)[:, None] * mean.shape[-1] + index).flatten()
            mean, covariance = mean[..., index], covariance[..., rows, :][..., rows]
            given = isinstance(observation_noise, Tensor)  # for these outcomes, in their order
            noise = noise if given or noise.dim() == 0 or noise.shape[-1] != self._n_located else noise[..., index]
        if observation_noise is not False:
            covariance = covariance + noise.expand_as(mean).flatten(-2).diag_embed()
        posterior: Posterior = GPyTorchPosterior(_normal(mean.to(X.dtype), covariance.to(X.dtype)))
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
        _require_data(X, Y, self.num_outputs, "X", "Y")
        if self._refit is not None and not self.laplace.posterior.fit.linear and X.dim() == Y.dim() == 2:
            return self._refit(torch.cat([self.train_inputs[0], X.to(self.train_inputs[0])]), self._with(Y))
        self.eval()
        x, y = self._network_inputs(X), Y
        if hasattr(self, "outcome_transform"):
            y, _ = self.outcome_transform(Y, None, X=X)
        variances = self._noise(x, True if noise is None else noise)
        new = Observations(x, y.to(x.dtype), variances.to(x).expand(*variances.shape[:-2], *y.shape[-2:]))
        out = copy.copy(self)
        out._observed = new if self._observed is None else self._observed.and_then(new)
        if hasattr(self, "train_inputs") and X.dim() == Y.dim() == 2:
            out.train_inputs = (torch.cat([self.train_inputs[0], X.to(self.train_inputs[0])]),)
            out._train_Y = self._with(Y)
            out.train_targets = out._train_Y.squeeze(-1)
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
        if seen is None or error is None:
            f = self._located(replace(drawn, source=view)(rows))
        else:
            f, at_seen = self._located(replace(drawn, source=view)(torch.cat([rows, seen.x]))).split(
                [len(rows), len(seen.x)]
            )
            blocks = joint_blocks(view, rows.unsqueeze(1), seen.x)
            assert blocks.cross is not None
            assert blocks.further_covariance is not None
            factor = psd_safe_cholesky(blocks.further_covariance + seen.noise.flatten().diag_embed())
            pull = torch.cholesky_solve((seen.y - at_seen - error).reshape(-1, 1), factor)
            f = f + (blocks.cross @ pull).squeeze(-1)
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

    def _joint(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (*batch, q, d) -> (*batch, q, m), (*batch, q m, q m)
        """Return mean and covariance of all outcomes, given the observations."""
        batch, q, seen = x.shape[:-2], x.shape[-2], self._observed
        if seen is None:
            blocks = joint_blocks(self.view(x), x.flatten(0, -3) if batch else x[None])
            mean, covariance = _unflattened(batch, blocks.mean, blocks.covariance)
            return mean, covariance
        if seen.x.dim() == 2:
            blocks = joint_blocks(self.view(x, seen.x), x.flatten(0, -3) if batch else x[None], seen.x)
            assert blocks.cross is not None
            mean, covariance, cross = _unflattened(batch, blocks.mean, blocks.covariance, blocks.cross)
            own_mean, own = blocks.further_mean, blocks.further_covariance
            assert own_mean is not None
            assert own is not None
        else:
            both = _stacked(x, seen.x)
            batch = both.shape[:-2]
            blocks = joint_blocks(self.view(both), both.flatten(0, -3))
            mean, covariance = _unflattened(batch, blocks.mean, blocks.covariance)
            cut = q * mean.shape[-1]
            mean, own_mean = mean[..., :q, :], mean[..., q:, :]
            covariance, cross, own = (
                covariance[..., :cut, :cut], covariance[..., :cut, cut:], covariance[..., cut:, cut:]
            )  # fmt: skip
        factor = psd_safe_cholesky(own + seen.noise.flatten(-2).diag_embed())
        pulled = torch.linalg.solve_triangular(factor, cross.mT, upper=False)  # (*batch, n m, q m)
        residual = (seen.y - own_mean).flatten(-2).unsqueeze(-1)
        residual = torch.linalg.solve_triangular(factor, residual, upper=False)
        mean = mean + (pulled.mT @ residual).squeeze(-1).unflatten(-1, mean.shape[-2:])
        covariance = covariance - pulled.mT @ pulled
        return mean, covariance.expand(*mean.shape[:-2], *covariance.shape[-2:])

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

    def _with(self, Y: Tensor) -> Tensor:
        """Return all outcomes, old and new."""
        return torch.cat([self._train_Y, Y.to(self._train_Y)])


class LaplacePath(DeterministicModel):
    """One function drawn from a `LaplaceModel`, as a deterministic model. Made by `LaplaceModel.path`.

    Args:
        model: The model that it was drawn from.
        drawn: The function of the network's own inputs.
        error: Drawn noise of the observations that the model was conditioned on, (n, m).
    """

    def __init__(self, model: LaplaceModel, drawn: DrawnFunctions, error: Tensor | None = None) -> None:
        super().__init__()
        self._model, self._drawn, self._error = (model,), drawn, error  # a tuple: the model is no part of this one
        self._num_outputs = model.num_outputs

    @property
    def batch_shape(self) -> Size:
        """Return the empty batch shape."""
        return Size()

    def forward(self, X: Tensor) -> Tensor:
        """Return the outcomes of the drawn function, (*batch, q, m).

        Args:
            X: (*batch, q, d).
        """
        (model,) = self._model
        return model.evaluate(self._drawn, self._error, X)

    def subset_output(self, idcs: list[int]) -> LaplacePath:
        """Return the same function with some of its outcomes.

        Args:
            idcs: Their indices.
        """
        (model,) = self._model
        return LaplacePath(model.subset_output(idcs), self._drawn, self._error)


def _normal(mean: Tensor, covariance: Tensor) -> MultivariateNormal:  # (*batch, q, m), (*batch, q m, q m)
    """Return the distribution, whose roots are computed when they are needed."""
    lazy = to_linear_operator(covariance)
    if mean.shape[-1] == 1:
        return MultivariateNormal(mean.squeeze(-1), lazy)
    return MultitaskMultivariateNormal(mean, lazy, interleaved=True)


def _unflattened(batch: Size, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.reshape(*batch, *t.shape[1:]) for t in tensors)


def _stacked(a: Tensor, b: Tensor) -> Tensor:  # (*batch, n, d), (*batch, n', d) -> (*batch, n + n', d)
    """Return the rows of both, for every batch."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return torch.cat([t.expand(*batch, *t.shape[-2:]) for t in (a, b)], -2)


def _require_data(X: Tensor, Y: Tensor, m: int, x_name: str, y_name: str) -> None:
    """Refuse observations whose shapes do not fit, and outcomes that are not finite."""
    if not isinstance(X, Tensor) or not isinstance(Y, Tensor) or X.dim() < 2 or Y.dim() < 2:
        came = " and ".join(str(tuple(t.shape)) if isinstance(t, Tensor) else type(t).__name__ for t in (X, Y))
        raise InputError(f"{x_name} and {y_name} are {came}; tensors (*batch, n, d) and (*batch, n, {m}) are needed.")
    if Y.shape[-2:] != (X.shape[-2], m):
        hint = f" Write {y_name}.unsqueeze(-1)." if m == 1 and Y.shape[-1] == X.shape[-2] else ""
        raise InputError(
            f"{y_name} is {tuple(Y.shape)} for {x_name} {tuple(X.shape)}; (*batch, {X.shape[-2]}, {m}) is needed.{hint}"
        )
    if not Y.isfinite().all():
        raise InputError(f"{y_name} holds NaN or infinite values.")
