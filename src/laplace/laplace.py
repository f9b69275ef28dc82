"""`Laplace`: a network, what was asked for, what the data left, and the hyperparameters. All else is done elsewhere.

It holds values and delegates: a method is a function of the room that it belongs to, and takes whatever has a
`posterior` and a `runner`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from laplace.checkpoints import posteriors as files
from laplace.checkpoints import state as states
from laplace.checkpoints.progress import progress_of
from laplace.checks import flag, one_positive, path_of, positive, shown
from laplace.curvature import CURVATURES, Estimator
from laplace.errors import LaplaceError, NotFittedError, OptionError, UnsupportedError
from laplace.inference import continual, inspection
from laplace.inference import predict as predicting
from laplace.inference.coverage import Coverage, coverage_of
from laplace.inference.fit import fit as sums_of
from laplace.inference.runner import Runner
from laplace.inference.source import Frame, outputs_of
from laplace.inference.summary import summary
from laplace.likelihoods import Likelihood
from laplace.linalg.autocast import plainly
from laplace.network.loaders import training_data
from laplace.network.replica import require_values
from laplace.posterior.posterior import Fit, Posterior
from laplace.posterior.task_prior import prior_of
from laplace.priors import Prior
from laplace.priors.gaussian import GaussianPrior, own
from laplace.spec import STRUCTURE_OPTIONS, Spec, refuse_unknown_keywords
from laplace.structures import Structure
from laplace.tuning import calibration as calibrating
from laplace.tuning import calls as tuning
from laplace.weights import Subnetwork, Subset

if TYPE_CHECKING:
    from typing_extensions import Self

    Value = TypeVar("Value")

    class reads(Generic[Value]):
        """What type checkers see of `property(function)`: the type of the value."""

        def __init__(self, function: Callable[[Any], Value]) -> None: ...

        def __get__(self, la: Any, owner: Any) -> Value: ...

else:
    reads = property


class Laplace:
    """A Laplace approximation of a trained network: N(mean, (s H + prior precision)^-1) over some of its weights.

    Nothing is computed before `fit`. Options that do not exist, or do not go together, are refused here. Each option is
    readable under its own name, with a value that this call takes. Parts are given by name with keywords, or as objects
    with options of their own: "kron" with damping=True is Kron(damping=True).

    Args:
        model: the trained network; it is never changed.
        likelihood: what the outputs mean: 'classification', 'regression', 'binary', 'multilabel', 'poisson',
            'heteroscedastic', 'given_noise', 'reward_modeling', or an object, as of `laplace.likelihoods`.
        subset_of_weights: which weights are uncertain: 'last_layer', 'all' (parameters with requires_grad),
            'subnetwork' (with `subnetwork_indices`), globs over names of parameters and modules, a predicate
            (name, parameter) -> bool, or an object of `laplace.weights`.
        hessian_structure: what is kept of the curvature, by name or as an object of `laplace.structures`: 'full';
            'lowrank' (the largest eigenpairs of all weights together); a block per tensor: 'block', 'inf', 'ekfac',
            'kron'; 'diag'; or 'gp', a posterior over functions from `n_subset` of the points.
        curvature: 'ggn' (exact), 'sketch' or 'mc' (unbiased estimates), 'ef' (empirical Fisher), 'hessian', or an
            object of `laplace.curvature`. If left out, 'ggn', and 'sketch' where outputs at many positions make that
            too costly (with a warning).
        curvature_samples: of 'sketch' and 'mc', vectors per example.
        sigma_noise: standard deviation of the observation noise of a regression: one number, or one per output.
        prior_precision: one number, one per parameter tensor, or one per weight.
        prior_mean: one number, or one per weight.
        prior: instead of prior_precision and prior_mean, one of `laplace.priors`, as StudentT(df=4, scale=0.1), or
            what earlier tasks left, `earlier.as_prior()`.
        temperature: T of p(D given theta)^(1/T): the likelihood's, for a colder or warmer posterior.
        softmax_temperature: T of p(y given f / T), by which predictions divide the logits; 1 if there are none. The
            posterior does not depend on it. `calibrate` finds it.
        enable_backprop: whether gradients flow from predictions to the inputs.
        dict_key_x: of batches that are mappings, the key of the main input.
        dict_key_y: of batches that are mappings, the key of the labels.
        last_layer_name: of 'last_layer', which module it is; found by running the network if left out.
        feature_reduction: of 'last_layer', where the network reduces a sequence behind it: 'pick_first', 'pick_last',
            'average'; found out if left out, with a warning.
        subnetwork_indices: of 'subnetwork', indices into the flat vector of all trainable weights.
        damping: of 'kron': True splits the prior over the two factors as in the paper, 'balanced' splits it well.
        weight_sharing: of 'kron', 'ekfac' and 'inf', for weights used at many positions: 'expand' or 'reduce'.
        rank: of 'inf', eigenpairs kept per tensor (100), or a float up to 1: the share of the trace to keep; of
            'lowrank', eigenpairs of all weights together (20); of 'gp' with 'nystrom', directions (100).
        tol: of 'lowrank', instead of `rank`: the eigenpairs above tol times the largest.
        n_subset: of 'gp', how many points are kept (None: all, up to 256).
        seed: of 'gp', what the points are drawn by.
        independent_outputs: of 'gp' with 'sod', each output by itself.
        functional_approximation: of 'gp', 'sod' (the subset alone) or 'nystrom' (all data in `rank` directions).
        memory_budget: bytes that may be taken; what is free, if left out.
        class_dim: which dimension of the outputs has the classes: -1 of (N, C) and (N, T, C), 1 of (N, C, H, W); None
            for one number at each position, (N, T).
        backend: a backend class of laplace-torch, understood as the curvature that it stands for.
        backend_kwargs: of `backend`; `stochastic=True` stands for curvature 'mc'.

    Attributes:
        runner: the network with the parts that it is treated by.

    Raises:
        OptionError: an option is unknown, or its value is outside its range.
        UnsupportedError: options do not go together; the message says what does.
    """

    @refuse_unknown_keywords
    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        subset_of_weights: Subset | str | Sequence[str] | Callable[[str, nn.Parameter], bool] = "last_layer",
        hessian_structure: Structure | str = "kron",
        *,
        curvature: Estimator | str | None = None,
        curvature_samples: int = 1,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        prior: Prior | None = None,
        temperature: float = 1.0,
        softmax_temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        last_layer_name: str | None = None,
        feature_reduction: str | None = None,
        subnetwork_indices: Tensor | None = None,
        damping: bool | str = False,
        weight_sharing: str = "expand",
        rank: int | float | None = None,
        tol: float | None = None,
        n_subset: int | None = None,
        seed: int = 0,
        independent_outputs: bool = False,
        functional_approximation: str = "sod",
        memory_budget: int | None = None,
        class_dim: int | None = -1,
        backend: Any = None,
        backend_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"model is a {type(model).__name__}; a torch.nn.Module is needed.")
        require_values(model)
        self.damping, self.weight_sharing, self.rank, self.tol = damping, weight_sharing, rank, tol
        self.n_subset, self.seed, self.independent_outputs = n_subset, seed, independent_outputs
        self.functional_approximation, self.memory_budget = functional_approximation, memory_budget
        self.subset_of_weights, self.hessian_structure = subset_of_weights, hessian_structure
        self.last_layer_name, self.feature_reduction = last_layer_name, feature_reduction
        self.backend, self.backend_kwargs = backend, backend_kwargs
        spec = Spec.of(
            model,
            likelihood,
            subset_of_weights,
            hessian_structure,
            curvature=curvature,
            curvature_samples=curvature_samples,
            last_layer_name=last_layer_name,
            feature_reduction=feature_reduction,
            subnetwork_indices=subnetwork_indices,
            structure_options={name: getattr(self, name) for name in STRUCTURE_OPTIONS},
            dict_key_x=dict_key_x,
            dict_key_y=dict_key_y,
            class_dim=class_dim,
            memory_budget=memory_budget,
            backend=backend,
            backend_kwargs=backend_kwargs,
        )
        self.runner = Runner(model, spec, flag(enable_backprop, "enable_backprop"))
        self._fit: Fit | None = None
        self._training_data: Iterable[Any] | None = None
        self._cached: tuple[tuple[Any, ...], tuple[int, ...], Posterior] | None = None
        self._temperature = one_positive(temperature, "temperature")
        self._softmax_temperature = self._take_softmax_temperature(softmax_temperature)
        self._prior = prior_of(prior, prior_precision, prior_mean, spec.structure.described)
        self._prior.require_structure(spec.structure.takes)
        self._sigma = self._take_noise(sigma_noise)

    # ---- what was asked for ---------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The network, as given."""
        return self.runner.model

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, as an object."""
        return self.runner.spec.likelihood

    @property
    def structure(self) -> Structure:
        """The structure, as an object."""
        return self.runner.spec.structure

    @property
    def curvature(self) -> Estimator | str | None:
        """The curvature, by name; an estimator of your own as it is. None until `fit` chooses, if you did not."""
        asked = self.runner.spec.curvature
        if asked is not None and CURVATURES.get(asked.name) is not type(asked):
            return asked
        return self._fit.kind if self._fit is not None else None if asked is None else asked.name

    @property
    def curvature_samples(self) -> int:
        """Vectors per example that an estimated curvature draws."""
        return self.runner.spec.estimator.vectors

    @property
    def subnetwork_indices(self) -> Tensor | None:
        """Of subset_of_weights='subnetwork': the indices into all trainable weights, ascending."""
        subset = self.runner.spec.weights
        return subset.indices.clone() if isinstance(subset, Subnetwork) else None

    @property
    def class_dim(self) -> int | None:
        """Which dimension of the outputs has the classes."""
        return self.runner.spec.class_dim

    @property
    def dict_key_x(self) -> str:
        """The key of the main input in batches that are mappings."""
        return self.runner.spec.keys.x

    @property
    def dict_key_y(self) -> str:
        """The key of the labels in batches that are mappings."""
        return self.runner.spec.keys.y

    @property
    def enable_backprop(self) -> bool:
        """Whether gradients flow from predictions to the inputs; may be set."""
        return self.runner.enable_backprop

    @enable_backprop.setter
    def enable_backprop(self, value: bool) -> None:
        self.runner.enable_backprop = flag(value, "enable_backprop")

    # ---- hyperparameters ------------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> Tensor:
        """A scalar, one value per parameter tensor, or one per weight. Setting it needs no refit.

        Of a prior of another kind see `prior`, `prior.hyperparameters` and `prior_precision_diag`.
        """
        return self._gaussian_prior.precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        self._set_prior(self._gaussian_prior.with_precision(value))

    @property
    def prior_mean(self) -> Tensor:
        """A scalar or one value per weight."""
        mean = getattr(self._prior, "mean", None)
        if mean is None:
            raise UnsupportedError(f"the prior is {self._prior}, which has no mean of its own.")
        return mean

    @prior_mean.setter
    def prior_mean(self, value: float | Tensor) -> None:
        self._set_prior(self._prior.with_mean(value))

    @property
    def prior(self) -> Prior:
        """The prior as a whole, with what earlier tasks left. Setting it needs no refit."""
        return self._prior

    @prior.setter
    def prior(self, value: Prior) -> None:
        prior = prior_of(value, 1.0, 0.0, self.structure.described)
        prior.require_structure(self.structure.takes)
        self._set_prior(prior)

    @property
    def sigma_noise(self) -> Tensor:
        """Standard deviation of the observation noise (regression). Setting it needs no refit.

        One number, or one per output. Of a vector, fit takes in the relation of the outputs' noise to each other; after
        that, one number sets the level of all (their geometric mean), and so does tuning.
        """
        return self.likelihood.noise_at(self._sigma)

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        self._sigma = self._take_noise(value)

    @property
    def noise_level(self) -> Tensor:
        """The level of all outputs' noise, ()."""
        return self._sigma

    @property
    def temperature(self) -> float:
        """T of p(D given theta)^(1/T), the likelihood's: it changes the posterior. Setting it needs no refit."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._temperature = one_positive(value, "temperature")

    @property
    def softmax_temperature(self) -> float:
        """T of p(y given f / T): it divides the logits of predictions, N(f / T, S / T^2). Setting it needs no refit."""
        return self._softmax_temperature

    @softmax_temperature.setter
    def softmax_temperature(self, value: float) -> None:
        self._softmax_temperature = self._take_softmax_temperature(value)

    # ---- the posterior --------------------------------------------------------------------------------------------

    @refuse_unknown_keywords
    @plainly
    def fit(
        self,
        train_loader: Any,
        override: Any = True,
        progress_bar: bool = False,
        *,
        y: Any = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int = 100,
    ) -> Self:
        """Run the network over the data and keep the sums of its curvature, at the weights that it has now.

        Where a batch is refused, the error names it, and the posterior stays as it was.

        Args:
            train_loader: batches, read once or as often as the structure needs: pairs `(x, y)`, or `(x, y, weights)`
                with one weight per example, or mappings. A DataLoader, a list, or (for one run) an iterator.
                Or the inputs of all data, as arrays, DataFrames or tensors, with labels beside them: `la.fit(x, y)`. Or
                a Lightning DataModule.
            override: False adds the data to what was seen before. In `la.fit(x, y)`, the labels.
            progress_bar: whether one is shown.
            y: the labels, if `train_loader` is the inputs of all data; the same as a second argument.
            batch_size: of `la.fit(x, y)`, how many examples run at a time (128 if left out).
            generator: what curvature 'mc' and 'sketch' draw from; torch's own if left out.
            checkpoint: a file to which the sums so far are written; after an interruption the same call goes on from
                there, and removes it.
            every: how many batches apart that is.

        Returns:
            The object itself.

        Raises:
            InputError: a batch that does not fit, or a loader without an example.
            ModelError: a network that cannot be treated as asked.
            MemoryBudgetError: sums that would not fit into memory.
            UnsupportedError: `override=False` of a structure whose sums do not add, or of a network that has changed.
            CheckpointError: a file `checkpoint` of another fit.
        """
        train_loader, override = training_data(train_loader, override, y, batch_size)
        before = None if flag(override, "override") else self._fit
        journal = None if checkpoint is None else partial(progress_of, self.runner, path=checkpoint, every=every)
        self._fit = sums_of(
            self.runner,
            train_loader,
            self._prior,
            before,
            progress_bar=flag(progress_bar, "progress_bar"),
            generator=generator,
            journal=journal,
        )
        known = before is None and not isinstance(train_loader, Iterator)
        self._training_data = train_loader if known else None
        return self

    @refuse_unknown_keywords
    @plainly
    def log_marginal_likelihood(
        self, prior_precision: float | Tensor | None = None, sigma_noise: float | Tensor | None = None
    ) -> Tensor:
        """The log evidence, differentiable in both arguments; values that are given are kept, as if set.

        Args:
            prior_precision: one number, one per parameter tensor, or one per weight; the current one if left out.
            sigma_noise: of a regression; the current one if left out.

        Returns:
            A scalar, float64. Larger is better.

        Raises:
            NotFittedError: before `fit`.
            OptionError: a value that is not positive, or of another length.
            NumericalError: a posterior precision that is not positive definite.
        """
        before = self._prior, self._sigma
        try:
            sigma = self._sigma if sigma_noise is None else self._take_noise(sigma_noise)
            if prior_precision is not None:
                self.prior_precision = prior_precision
            self._sigma = sigma
            return self.posterior.log_evidence
        except LaplaceError:
            self._prior, self._sigma = before
            raise

    marglik = log_marginal_likelihood
    """The paper's name of `log_marginal_likelihood`."""

    @property
    def posterior(self) -> Posterior:
        """The Gaussian at the current hyperparameters, kept until one of them changes."""
        if self._fit is None:
            raise NotFittedError("this posterior has seen no data. Call la.fit(train_loader) first.")
        posterior = Posterior(self._fit, self._prior, self._sigma, self._temperature)
        if posterior.needs_grad and torch.is_grad_enabled():
            return posterior  # its graph belongs to the caller
        values = (posterior.fit, posterior.prior, posterior.sigma, posterior.temperature)
        versions = tuple(t._version for t in (*posterior.prior.tensors, posterior.sigma))
        cached = self._cached
        if cached is None or cached[1] != versions or any(a is not b for a, b in zip(cached[0], values, strict=True)):
            cached = self._cached = (values, versions, posterior.detached())
            self._notice_clipped(cached[2])
        return cached[2]

    @property
    def is_fitted(self) -> bool:
        """Whether the posterior has seen data."""
        return self._fit is not None

    @property
    def training_data(self) -> Iterable[Any] | None:
        """What `fit` was given, for tuning; a reference, which is not in files, pickles and copies.

        None if it was an iterator, or was added to earlier data.
        """
        return self._training_data

    @property
    def n_outputs(self) -> int:
        """Number of outputs, C."""
        return self.posterior.fit.n_outputs

    @property
    def frame(self) -> Frame:
        """How inputs come to it, for predictions."""
        spec = self.runner.spec
        return Frame(spec.keys, spec.class_dim, spec.budget, self.enable_backprop, spec.structure.functional)

    def coverage(self) -> Coverage:
        """A table of all uncertain tensors: the rule that explains each, what is kept of it, and the bytes.

        Raises:
            NotFittedError: before `fit`.
        """
        return coverage_of(self.posterior.fit, self.runner.plan)

    # ---- what is done with it: functions of other rooms -------------------------------------------------------------

    outputs = outputs_of
    __call__ = predicting.call
    predict = predicting.predict
    functional_samples = predicting.functional_samples
    predictive_samples = predicting.predictive_samples
    preference = predicting.preference
    sample = predicting.sample
    tune = tuning.tune
    calibrate = calibrating.calibrate
    optimize_prior_precision = tuning.optimize_prior_precision
    as_prior = continual.as_prior

    mean = reads(inspection.mean)
    n_params = reads(inspection.n_params)
    n_layers = reads(inspection.n_layers)
    n_data = reads(inspection.n_data)
    loss = reads(inspection.loss)
    H = reads(inspection.H)
    spectrum = reads(inspection.spectrum)
    clipped = reads(inspection.clipped)
    log_likelihood = reads(inspection.log_likelihood)
    log_prior = reads(inspection.log_prior)
    prior_clipped = reads(inspection.prior_clipped)
    scatter = reads(inspection.scatter)
    log_det_prior_precision = reads(inspection.log_det_prior_precision)
    log_det_posterior_precision = reads(inspection.log_det_posterior_precision)
    log_det_ratio = reads(inspection.log_det_ratio)
    prior_precision_diag = reads(inspection.prior_precision_diag)
    posterior_precision = reads(inspection.posterior_precision)
    posterior_covariance = reads(inspection.posterior_covariance)
    posterior_variance = reads(inspection.posterior_variance)
    posterior_scale = reads(inspection.posterior_scale)
    square_norm = inspection.square_norm
    log_prob = inspection.log_prob
    functional_variance = inspection.functional_variance
    functional_covariance = inspection.functional_covariance

    def warn_once(self, key: str, message: str) -> None:
        """Warn of something the first time that it happens.

        Args:
            key: what it is called; a second warning under the same key is left out.
            message: what is said.
        """
        self.runner.warn_once(key, message)

    # ---- keeping and joining ----------------------------------------------------------------------------------------

    def state_dict(self, with_data: bool = False) -> dict[str, Any]:
        """Everything of a fitted posterior as tensors, numbers and strings: no code, and no training data.

        Args:
            with_data: needed for a 'gp', which is made of some points of the data.

        Raises:
            NotFittedError: before `fit`.
            UnsupportedError: a 'gp' without `with_data`.
        """
        return states.state_dict(self, flag(with_data, "with_data"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, on the same network with the same options.

        Args:
            state: what it gave, straight or through `torch.save` and `torch.load(path, weights_only=True)`.

        Raises:
            InputError: a state of other options, or of other parameters.
        """
        found = states.restored(self.runner, state, self._prior)
        temperature = one_positive(found.temperature, "temperature")
        softmax_temperature = self._take_softmax_temperature(found.softmax_temperature)
        self._sigma, self._temperature = self._take_noise(found.sigma_noise), temperature
        self._softmax_temperature = softmax_temperature
        self._fit, self._prior, self._training_data = found.fit, found.prior, None
        self.runner.adopt(found.weights)

    @refuse_unknown_keywords
    def save(self, path: str | os.PathLike[str], with_data: bool = False) -> None:
        """Write a fitted posterior to a file of safetensors: no code, and no training data.

        Args:
            path: the file; one of that name is replaced once the new one is whole. Missing folders are made.
            with_data: of a 'gp', which is made of some points of the data, write their inputs as well; without, the
                file has their numbers and a digest, and `load` needs the data.

        Raises:
            NotFittedError: before `fit`.
            UnsupportedError: a network whose weights have changed since.
        """
        files.save(self, path_of(path, "path"), flag(with_data, "with_data"))

    @classmethod
    @refuse_unknown_keywords
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        likelihood: Likelihood | str | None = None,
        prior: Prior | None = None,
        hessian_structure: Structure | None = None,
        subset_of_weights: Subset | None = None,
        names: Mapping[str, str] | None = None,
        data: Iterable[Any] | None = None,
    ) -> Self:
        """The posterior that `save` wrote, on the same network with the same weights; all options are in the file.

        Args:
            path: the file.
            model: the network, with the weights at which the posterior was fitted.
            likelihood: one of your own, if it was fitted with one.
            prior: one of `from_log_density`, if it was fitted with one; its hyperparameters are taken from the file.
            hessian_structure: one of your own, if it was fitted with one.
            subset_of_weights: one of your own, if it was fitted with one.
            names: {old: new} where parameters or modules have other names now.
            data: for a 'gp' that was saved without its data: the batches, in the order in which it was fitted.

        Raises:
            CheckpointError: a file that is damaged or foreign, or a network or data that differ; it says in what.
        """
        parts = hessian_structure, subset_of_weights
        return files.load(cls, path_of(path, "path"), model, likelihood, prior, names, data, *parts)

    def to(self, device: torch.device | str) -> Self:
        """Move the posterior; the network is yours to move.

        Args:
            device: as `torch.Tensor.to` takes it.

        Returns:
            The object itself.
        """
        try:
            device = torch.device(device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptionError(f"device={shown(device)} is no device of torch here, as 'cpu' is: {error}") from None
        if self._fit is not None:
            self._fit = self._fit.to(device)
        self._prior, self._sigma = self._prior.to(device), self._sigma.to(device)
        return self

    def __add__(self, other: Any) -> Self:
        """Return the posterior of the data of both, with the prior, noise and temperatures of the left one."""
        if not isinstance(other, Laplace):
            return NotImplemented
        return self._with(continual.merged(self, other))

    def __sub__(self, other: Any) -> Self:
        """Return the posterior without the data of the right one, which must be among the data of the left one."""
        if not isinstance(other, Laplace):
            return NotImplemented
        return self._with(continual.subtracted(self, other))

    def __radd__(self, other: Any) -> Self:
        """Begin sum([a, b, c]), which starts with 0."""
        if not (isinstance(other, int) and other == 0):
            return NotImplemented
        return self._with(self.posterior.fit)

    def __repr__(self) -> str:
        posterior = None if self._fit is None else self.posterior
        temperatures = self._temperature, self._softmax_temperature
        return summary(self.runner, posterior, self._prior, self.sigma_noise, *temperatures)

    def __getstate__(self) -> dict[str, Any]:
        own = {"runner": copy.copy(self.runner), "_training_data": None}  # a copy learns about its network by itself
        return self.__dict__ | own

    def _with(self, fit: Fit) -> Self:
        out = copy.copy(self)
        out.runner, out._fit, out._cached = self.runner.with_structure_of(fit), fit, None
        return out

    def _set_prior(self, prior: Prior) -> None:
        if self._fit is not None:
            prior.check(self._fit.layout, self.structure.takes)
        self._prior = prior

    @property
    def _gaussian_prior(self) -> GaussianPrior:
        if isinstance(self._prior, GaussianPrior):
            return self._prior
        raise UnsupportedError(
            f"the prior is {self._prior}, which has no prior_precision. There is: la.prior.hyperparameters, "
            "la.prior_precision_diag (of -d2 log p at the weights), and la.prior = ... to set another."
        )

    def _notice_clipped(self, posterior: Posterior) -> None:
        """Warn once where the curvature of the prior was not positive."""
        if posterior.prior.quadratic or not posterior.prior_clipped.count:
            return
        clipped, prior = posterior.prior_clipped, posterior.prior
        named = ", ".join(prior.hyperparameters) or "its constants"
        remedy = "a larger scale has fewer" if "scale" in prior.hyperparameters else f"other values of {named} may help"
        self.warn_once(
            "prior_clipped",
            f"-d2 log p of {prior} has {clipped.count} negative eigenvalues at the weights, the lowest "
            f"{clipped.lowest:.2g} of the largest; they are set to zero, and these weights are held by the data alone. "
            f"See la.prior_clipped; {remedy}.",
        )

    def _take_softmax_temperature(self, value: float) -> float:
        number = one_positive(value, "softmax_temperature")
        self.likelihood.check_softmax_temperature(number)
        return number

    def _take_noise(self, value: float | Tensor) -> Tensor:
        """Return one level of noise, (); what the outputs' noise is relative to each other is the likelihood's."""
        likelihood, level = self.likelihood.with_noise(own(positive(value, "sigma_noise")))
        if likelihood is not self.likelihood and self._fit is not None:
            raise OptionError(
                "the noise of the outputs relative to each other is part of the curvature; after fit, sigma_noise can "
                "be scaled as a whole: give one number. For another relation make a new Laplace(..., sigma_noise=...)."
            )
        if likelihood is not self.likelihood:
            self.runner.spec = replace(self.runner.spec, likelihood=likelihood)
        return level
