"""`Laplace`: the four components put together.

Which weights, what curvature and structure, which hyperparameters, which predictive: each is a part of its own, and
any of them combine. This file only puts them together; laplace-torch's names are accepted here and nowhere inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from laplace import checkpoint
from laplace.backprop import Forward, Head
from laplace.batches import Inputs, Keys, device_of, prediction_batches, training_batches
from laplace.draws import Draws, normals
from laplace.errors import (
    InputError,
    LaplaceWarning,
    NotFittedError,
    OptionError,
    StaleWarning,
    UnsupportedError,
    choice,
    warn,
)
from laplace.fitting import Accumulator, check_finite
from laplace.likelihoods import Likelihood, likelihood_named
from laplace.options import (
    curvature_named,
    generator_or_none,
    method_named,
    pred_type_named,
    structure_named,
    subset_named,
    whole_number,
)
from laplace.posterior import Fit, Posterior
from laplace.predictive import OutputGaussian, OutputSamples, Prediction, joined
from laplace.predictive import predict as predicting
from laplace.prior import Prior, positive
from laplace.reading import Readable
from laplace.summary import summary
from laplace.tuning import How, log_grid, maximise_evidence, search_grid
from laplace.weights import LastLayer, Snapshot, find_last_layer, what_changed

_MAX_COVARIANCE = 32  # outputs up to which `predict` computes covariances unasked


class Laplace(Readable):
    """A Laplace approximation of a trained network: N(mean, (s H + prior precision)^-1) over some of its weights.

    model              the trained network; it is never changed
    likelihood         'classification', 'regression', or a likelihood object
    subset_of_weights  'last_layer'
    hessian_structure  'kron', 'diag' or 'full'
    curvature          'ggn' (exact), 'sketch' or 'mc' (unbiased estimates), 'ef' (empirical Fisher)
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        *,
        curvature: str | None = None,
        curvature_samples: int = 1,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        last_layer_name: str | None = None,
        feature_reduction: str | None = None,
        damping: bool | str = False,
        backend: Any = None,
        backend_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"model is a {type(model).__name__}; a torch.nn.Module is needed.")
        self.model = model
        self.likelihood = likelihood_named(likelihood)
        self.subset_of_weights = subset_named(subset_of_weights)
        self.structure = structure_named(hessian_structure, damping)
        self.curvature = curvature_named(curvature, backend, backend_kwargs)
        self.curvature_samples = whole_number(curvature_samples, "curvature_samples")
        self.temperature = float(positive(temperature, "temperature"))
        self.enable_backprop = enable_backprop
        self._keys = Keys(dict_key_x, dict_key_y)
        self._last_layer = (last_layer_name, feature_reduction)
        self._weights: LastLayer | None = None
        self._fitted: Fit | None = None
        self._cached: Posterior | None = None
        self._snapshot: Snapshot | None = None
        self._warned: set[str] = set()
        self._prior = Prior.of(prior_precision, prior_mean)
        self._sigma = self._checked_sigma(sigma_noise)

    # ---- hyperparameters ---------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> Tensor:
        """A scalar, one value per parameter tensor, or one per weight. Setting it needs no refit."""
        return self._prior.precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        self._set_prior(Prior.of(value, self._prior.mean))

    @property
    def prior_mean(self) -> Tensor:
        """A scalar or one value per weight."""
        return self._prior.mean

    @prior_mean.setter
    def prior_mean(self, value: float | Tensor) -> None:
        self._set_prior(Prior.of(self._prior.precision, value))

    @property
    def sigma_noise(self) -> Tensor:
        """Standard deviation of the observation noise (regression). Setting it needs no refit."""
        return self._sigma

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        self._sigma, self._cached = self._checked_sigma(value), None

    # ---- fit ---------------------------------------------------------------------------------------------------

    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        generator: torch.Generator | None = None,
    ) -> Laplace:
        """Run the network once over the data and keep the sums of its curvature; `override=False` adds to them.

        Batches are pairs `(x, y)` or mappings. `generator` is what curvature 'mc' and 'sketch' draw from. Where a batch
        is refused, the error names it and the posterior stays as it was.
        """
        stream = iter(training_batches(train_loader, self.model, self._keys, progress_bar, "fit"))
        first = next(stream, None)
        if first is None:
            raise InputError("the training loader gave no example. A loader yields batches (x, y) with at least one.")
        weights = self._find_weights(first[1], keep=not override)
        if not override and self._fitted is not None:
            self._notice_changes()
        before = None if override else self._fitted
        engine = Head(self.model, weights)
        sums = Accumulator(
            engine, self.likelihood, self.structure, weights.layout, self.curvature, self.curvature_samples, generator
        )
        sums.n_outputs = 0 if before is None else before.n_outputs
        mean = weights.layout.join(weights.tensors(self.model))
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32), copy=True)
        self._prior.check(weights.layout)
        for index, inputs, y in chain([first], stream):
            sums.add(inputs, y, index)
        self._weights = weights
        self._fitted = sums.fit(mean) if before is None else before.plus(sums.fit(mean))
        self._snapshot, self._cached = Snapshot.of(self.model), None
        self._warned.discard("stale")
        return self

    # ---- predict -----------------------------------------------------------------------------------------------

    def __call__(
        self,
        x: Any,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The predictive at `x`, in laplace-torch's form.

        Classification: probabilities (N, C), through `link_approx` ('probit', 'mc', 'bridge', 'bridge_norm', 'delta').
        Regression: mean (N, C) and covariance of f (N, C, C), without observation noise; variances (N, C) with
        `diagonal_output`; mean (N*C,) and covariance (N*C, N*C) over all inputs with `joint`.
        `pred_type='nn'` averages the network over `n_samples` draws of the weights instead of linearising it.
        """
        pred_type = pred_type_named(pred_type)
        classifies = not self.likelihood.has_noise
        whole_number(n_samples, "n_samples", 2 if pred_type == "nn" and not classifies else 1)
        if classifies:
            choice(link_approx, self.likelihood.links, "link_approx")
        if joint and (classifies or pred_type == "nn"):
            raise UnsupportedError(
                "joint=True is for regression with pred_type='glm'. For others: functional_samples(x)."
            )
        with torch.set_grad_enabled(self.enable_backprop):
            forward = self._run(Inputs(x, model_kwargs, self._keys))
            if pred_type == "nn":
                samples = self._weight_draws(forward, n_samples, generator)
                return samples.softmax(-1).mean(0) if classifies else (samples.mean(0), samples.var(0))
            if classifies:
                return self._probabilities(forward, link_approx, n_samples, diagonal_output, generator)
            if joint:
                covariance = self.posterior.gaussian.joint(forward.jacobian())
                return forward.outputs.flatten(), covariance.flatten(2).flatten(0, 1)
            outputs = predicting.linearised(self.posterior, forward, with_covariance=not diagonal_output)
            return outputs.mean, outputs.variance if outputs.covariance is None else outputs.covariance

    def predict(
        self,
        x: Any,
        pred_type: str = "glm",
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool | None = None,
        generator: torch.Generator | None = None,
        progress_bar: bool = True,
        **model_kwargs: Any,
    ) -> Prediction:
        """p(y given x, data) with observation noise, its summaries, and epistemic and aleatoric uncertainty apart.

        `x` is a tensor, a mapping, a tuple of inputs, or a DataLoader (labels in it are not looked at). Covariances
        between outputs are taken into account up to 32 outputs, or as `diagonal_output` says.
        """
        pred_type = pred_type_named(pred_type)
        draws = Draws(whole_number(n_samples, "n_samples", 2), generator_or_none(generator))
        with torch.set_grad_enabled(self.enable_backprop):
            parts = [
                self._predict(inputs, pred_type, link_approx, draws, diagonal_output)
                for inputs in prediction_batches(x, self._keys, model_kwargs, progress_bar)
            ]
            if not parts:
                raise InputError("the loader to predict on gave no batch.")
            outputs = joined([outputs for outputs, _ in parts])
            if self.likelihood.has_noise:
                return predicting.regression(outputs, self._sigma)
            p = torch.cat([p for _, p in parts if p is not None])
            return predicting.classification(p, outputs, link_approx, draws)

    def functional_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:  # (S, N, C)
        """Draws of the outputs before the link.

        One draw of the weights serves all inputs, so that each draw is a smooth function of x; `diagonal_output` draws
        every output on its own instead.
        """
        pred_type = pred_type_named(pred_type)
        whole_number(n_samples, "n_samples")
        with torch.set_grad_enabled(self.enable_backprop):
            forward = self._run(Inputs(x, model_kwargs, self._keys))
            if diagonal_output and pred_type == "glm":
                outputs = predicting.linearised(self.posterior, forward, with_covariance=False)
                return torch.cat(list(outputs.draws(Draws(n_samples, generator_or_none(generator)))), 1)
            return self._weight_draws(forward, n_samples, generator, exact=pred_type == "nn")

    def predictive_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:  # (S, N, C)
        """Draws of the predictive's parameters: outputs f for regression, class probabilities for classification."""
        f = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator, **model_kwargs)
        return self.likelihood.inverse_link(f)

    @torch.no_grad()
    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:  # (S, P)
        """Draws of the uncertain weights."""
        whole_number(n_samples, "n_samples")
        eps = normals((n_samples, self.n_params), self.mean, generator_or_none(generator))
        return self.mean + self.posterior.gaussian.color(eps)

    # ---- evidence and tuning -----------------------------------------------------------------------------------

    def log_marginal_likelihood(
        self, prior_precision: float | Tensor | None = None, sigma_noise: float | Tensor | None = None
    ) -> Tensor:
        """The log evidence, differentiable in both arguments; values that are given are kept, as if set."""
        if prior_precision is not None:
            self.prior_precision = prior_precision
        if sigma_noise is not None:
            self.sigma_noise = sigma_noise
        return self.posterior.log_evidence

    marglik = log_marginal_likelihood

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        n_steps: int = 100,
        lr: float = 0.1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: Iterable[Any] | None = None,
        loss: Any = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str = "probit",
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
        tune_sigma_noise: bool = False,
    ) -> None:
        """Set the prior precision to the one of maximal evidence, or of the lowest score on validation data.

        'marglik' needs no validation data. Newton's method finds its one optimum in a few of at most `n_steps` steps
        from `init_prior_prec`; `lr` is accepted and not needed. `tune_sigma_noise` finds the noise of regression too.
        'gridsearch' (or 'CV') scores a grid of scalars on `val_loader`, by the predictive negative log-likelihood or by
        `loss`: a callable of (probabilities, y) or (mean, variance, y), or a metric object of torchmetrics.
        """
        groups = choice(prior_structure, ["scalar", "layerwise", "diag"], "prior_structure")
        posterior = self.posterior
        with torch.no_grad():
            if method_named(method) == "marglik":
                start = positive(init_prior_prec, "init_prior_prec").double().log().mean().exp()
                precision, sigma = maximise_evidence(
                    posterior, groups, float(start), tune_sigma_noise, whole_number(n_steps, "n_steps"), verbose
                )
            else:
                if val_loader is None:
                    raise OptionError("method='gridsearch' needs val_loader=, batches (x, y) that were not trained on.")
                if groups != "scalar" or tune_sigma_noise:
                    raise UnsupportedError(
                        "gridsearch tunes one precision for all weights; for others: method='marglik'."
                    )
                how = How(pred_type_named(pred_type), link_approx, whole_number(n_samples, "n_samples", 2), loss)
                grid = log_grid(log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base)
                precision, _ = search_grid(posterior, self._labelled_runs(val_loader, progress_bar), grid, how)
                sigma = self._sigma
        self.prior_precision, self.sigma_noise = precision, sigma
        if verbose:
            print(f"prior precision {self.prior_precision.tolist()}, noise {float(self._sigma):.4g}")

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def posterior(self) -> Posterior:
        """The Gaussian at the current hyperparameters, kept until one of them changes."""
        if self._fitted is None:
            raise NotFittedError("this posterior has seen no data. Call la.fit(train_loader) first.")
        if self._cached is not None:
            return self._cached
        posterior = Posterior(self._fitted, self._prior, self._sigma, self.temperature)
        if not posterior.needs_grad:
            self._cached = posterior
        return posterior

    @property
    def is_fitted(self) -> bool:
        """Whether the posterior has seen data."""
        return self._fitted is not None

    def to(self, device: torch.device | str) -> Laplace:
        """Move the posterior; the network is yours to move."""
        if self._fitted is not None:
            self._fitted = self._fitted.to(device)
        self._prior, self._sigma, self._cached = self._prior.to(device), self._sigma.to(device), None
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything of a fitted posterior as tensors, numbers and strings: no training data, and no code."""
        return checkpoint.state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, on the same network with the same options."""
        checkpoint.load_state_dict(self, state)

    def __repr__(self) -> str:
        return summary(self)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _restore(self, fit: Fit, weights: LastLayer, prior: Prior, sigma: Tensor, temperature: float) -> None:
        self._sigma, self.temperature = self._checked_sigma(sigma), temperature
        self._fitted, self._weights, self._prior, self._cached, self._snapshot = fit, weights, prior, None, None

    def _find_weights(self, inputs: Inputs, keep: bool) -> LastLayer:
        if keep and self._weights is not None:
            return self._weights
        return find_last_layer(self.model, inputs.first(), *self._last_layer)

    def _run(self, inputs: Inputs) -> Forward:
        posterior = self.posterior
        self._notice_changes()
        assert self._weights is not None
        forward = Head(self.model, self._weights).forward(inputs.to(device_of(self.model)), self.enable_backprop)
        if forward.outputs.dim() != 2 or forward.outputs.shape[1] != posterior.fit.n_outputs:
            raise InputError(
                f"the outputs have shape {tuple(forward.outputs.shape)}; fitted on (N, {posterior.fit.n_outputs})."
            )
        check_finite(forward.outputs, "the network's outputs hold")
        return forward

    def _weight_draws(
        self, forward: Forward, n_samples: int, generator: torch.Generator | None, exact: bool = True
    ) -> Tensor:  # (S, N, C)
        gaussian, checked = self.posterior.gaussian, generator_or_none(generator)
        return predicting.sampled(gaussian, forward, self.n_params, n_samples, checked, exact)

    def _probabilities(
        self,
        forward: Forward,
        link: str,
        n_samples: int,
        independent: bool,
        generator: torch.Generator | None,
        variance: Tensor | None = None,
    ) -> Tensor:  # (N, C)
        draws = Draws(n_samples, generator_or_none(generator))
        f, jacobian = forward.outputs, forward.jacobian()
        p, outside = predicting.probabilities(self.posterior, link, f, jacobian, draws, independent, variance)
        if outside:
            self._warn_once(
                "simplex",
                f"the {link} approximation left the simplex for {outside} of {len(p)} inputs (its variances are "
                "too large); clipped and renormalised. link_approx='probit' and 'mc' have no such limit.",
            )
        return p

    def _predict(
        self, inputs: Inputs, pred_type: str, link: str, draws: Draws, independent: bool | None
    ) -> tuple[OutputGaussian | OutputSamples, Tensor | None]:
        """The outputs' distribution for one batch, and the class probabilities."""
        forward = self._run(inputs)
        if pred_type == "nn":
            samples = OutputSamples(self._weight_draws(forward, draws.n, draws.generator))
            return samples, None if self.likelihood.has_noise else samples.samples.softmax(-1).mean(0)
        if independent is None:
            independent = forward.outputs.shape[1] > _MAX_COVARIANCE
        outputs = predicting.linearised(self.posterior, forward, with_covariance=not independent)
        if self.likelihood.has_noise:
            return outputs, None
        return outputs, self._probabilities(forward, link, draws.n, independent, draws.generator, outputs.variance)

    def _labelled_runs(self, loader: Iterable[Any], progress_bar: bool) -> Iterable[tuple[Forward, Tensor]]:
        for index, inputs, y in training_batches(loader, self.model, self._keys, progress_bar, "gridsearch"):
            forward = self._run(inputs)
            try:
                yield forward, self.likelihood.check_targets(forward.outputs, y.to(forward.outputs.device))
            except InputError as error:
                raise InputError(f"validation batch {index}: {error}") from None

    def _set_prior(self, prior: Prior) -> None:
        if self._fitted is not None:
            prior.check(self._fitted.layout)
        self._prior, self._cached = prior, None

    def _checked_sigma(self, value: float | Tensor) -> Tensor:
        sigma = positive(value, "sigma_noise")
        if sigma.numel() != 1:
            raise OptionError(f"sigma_noise has {sigma.numel()} values; one for all outputs is needed.")
        if not self.likelihood.has_noise and float(sigma) != 1:
            raise OptionError(
                f"sigma_noise={float(sigma):g}: {self.likelihood.name} has no observation noise; leave it at 1."
            )
        return sigma.reshape(())

    def _notice_changes(self) -> None:
        """Warn once where the network is no longer the one that was fitted."""
        assert self._weights is not None
        assert self._fitted is not None
        changed = what_changed(self.model, self._weights, self._fitted.mean, self._snapshot)
        if changed:
            self._warn_once(
                "stale", f"{changed} since fit; the posterior belongs to the old ones. Call la.fit again.", StaleWarning
            )

    def _warn_once(self, key: str, message: str, category: type[LaplaceWarning] = LaplaceWarning) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(message, category)
