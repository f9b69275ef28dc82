"""`Laplace`: a network, what was asked for, what the data left, and the hyperparameters. All else is done elsewhere.

It holds two things, a `Runner` (the network with its options) and `Values` (all that may change), and delegates: a
method is a function of the room that it belongs to, and takes whatever has a `runner` and `values`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laplace.checkpoints import fitting
from laplace.checkpoints import posteriors as files
from laplace.checkpoints import state as states
from laplace.checks import did_you_mean, flag, shown
from laplace.conformal import calls as conformalising
from laplace.curvature import Estimator
from laplace.errors import OptionError, UnknownAttributeError, UnsupportedError
from laplace.inference import continual, drawing, inspection, options
from laplace.inference import predict as predicting
from laplace.inference import values as holding
from laplace.inference.attributes import holds, reads
from laplace.inference.runner import Runner
from laplace.inference.source import outputs_of
from laplace.inference.summary import summary
from laplace.inference.values import Values
from laplace.keywords import checked_before
from laplace.likelihoods import Likelihood
from laplace.network.replica import require_values
from laplace.network.wrappers import unwrapped
from laplace.posterior.posterior import Fit
from laplace.posterior.task_prior import prior_of
from laplace.priors import Prior
from laplace.serving import module as serving
from laplace.spec import STRUCTURE_OPTIONS, Spec, name_of_backend
from laplace.structures import Structure
from laplace.tuning import calibration as calibrating
from laplace.tuning import calls as tuning
from laplace.weights import Subset

if TYPE_CHECKING:
    from typing_extensions import Self


FURTHER: dict[str, Any] = {}  # descriptors of names for other libraries' scripts; see `laplace.compat`


class Laplace:
    """Approximates the posterior over some weights of a trained network by N(mean, (s H + prior precision)^-1).

    Nothing is computed before `fit`. Unknown options, and options that do not go together, are refused here. Each
    option can be read under its own name, with a value that this constructor accepts. Parts are given by name with
    keywords, or as objects with their own options: "kron" with damping=True is the same as Kron(damping=True).

    Args:
        model: the trained network; it is never changed. A `DistributedDataParallel` wrapper is removed.
        likelihood: what the outputs mean: 'classification', 'regression', 'binary', 'multilabel', 'poisson',
            'heteroscedastic', 'given_noise', 'reward_modeling', or an object of `laplace.likelihoods`.
        subset_of_weights: which weights are uncertain: 'last_layer', 'all' (parameters with requires_grad),
            'subnetwork' (with `subnetwork_indices`), globs over names of parameters and modules, a predicate
            (name, parameter) -> bool, or an object of `laplace.weights`.
        hessian_structure: what is kept of the curvature, by name or as an object of `laplace.structures`: 'full';
            'lowrank' (the largest eigenpairs of all weights together); a block per tensor: 'block', 'inf', 'ekfac',
            'kron'; 'diag'; 'matrix_free' (the posterior of 'full' without its matrix, by solves over the training
            data); or 'gp', a posterior over functions from `n_subset` of the points.
        curvature: 'ggn' (exact), 'sketch' or 'mc' (unbiased estimates), 'ef' (empirical Fisher), 'hessian', or an
            object of `laplace.curvature`. By default 'ggn', or 'sketch' (with a warning) if outputs at many positions
            make 'ggn' too expensive.
        curvature_samples: for 'sketch' and 'mc', the number of vectors per example.
        sigma_noise: standard deviation of the observation noise of a regression: one number, or one per output.
        prior_precision: one number, one per parameter tensor, or one per weight; None beside a `prior` that has none.
        prior_mean: one number, or one per weight; None likewise.
        prior: instead of prior_precision and prior_mean, a prior of `laplace.priors`, as StudentT(df=4, scale=0.1), or
            the posterior of earlier tasks, `earlier.as_prior()`.
        temperature: T of the tempered likelihood p(data given theta)^(1/T), for a colder or warmer posterior.
        softmax_temperature: T of p(y given f / T), by which predictions divide the logits; 1 for likelihoods without
            logits. The posterior does not depend on it. `calibrate` finds it.
        enable_backprop: whether gradients flow from predictions to the inputs.
        dict_key_x: for batches that are mappings, the key of the main input.
        dict_key_y: for batches that are mappings, the key of the labels.
        last_layer_name: for 'last_layer', the name of the module. By default it is found by running the network.
        feature_reduction: for 'last_layer', how the network reduces a sequence after this layer: 'pick_first',
            'pick_last' or 'average'. By default it is found by running the network, with a warning.
        subnetwork_indices: for 'subnetwork', indices into the flat vector of all trainable weights.
        damping: for 'kron': False adds the prior exactly; True splits it over the two factors, as in the paper;
            'balanced' splits it in proportion to the factors' sizes, which is closer to the exact sum.
        weight_sharing: for 'kron', 'ekfac' and 'inf', how weights used at many positions are treated: 'expand' or
            'reduce'.
        rank: for 'inf', the number of eigenpairs kept per tensor (100), or a float up to 1: the share of the trace to
            keep; for 'lowrank', the number of eigenpairs of all weights together (20); for 'kron', the number of
            columns kept of each wider factor (all); for 'gp' with 'nystrom', the number of directions (100);
            for 'matrix_free', the number of leading directions of the preconditioner (100).
        tol: for 'lowrank', instead of `rank`: keep the eigenpairs above tol times the largest.
        n_subset: for 'gp', how many points are kept (None: all, up to 256).
        seed: for 'gp', the seed for drawing the points; for 'matrix_free', for drawing the probes.
        independent_outputs: for 'gp' with 'sod', whether outputs are treated as independent.
        functional_approximation: for 'gp': 'sod' (the subset alone), 'nystrom' (all data in `rank` directions) or
            'variational' (all data given `n_subset` inducing points).
        inducing: for 'gp' with 'variational', the inducing points: 'random' (drawn from the data), 'kmeans', or the
            points themselves, in the form of the inputs.
        inducing_steps: for 'gp' with 'variational', how many gradient steps move the inducing points.
        memory_budget: the number of bytes that may be used. By default the free memory.
        class_dim: which dimension of the outputs holds the classes: -1 for (N, C) and (N, T, C), 1 for (N, C, H, W);
            None for one number at each position, (N, T).
        backend: a backend class of laplace-torch; it means the curvature that this backend computes.
        backend_kwargs: options of `backend`; `stochastic=True` means curvature 'mc'.

    Attributes:
        runner: the network with its options.
        values: the sums over the data, the prior, the noise and the temperatures.

    Raises:
        OptionError: an option is unknown, or its value is out of range.
        UnsupportedError: options do not go together; the message says what does.
    """

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
        prior_precision: float | Tensor | None = 1.0,
        prior_mean: float | Tensor | None = 0.0,
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
        inducing: Any = "random",
        inducing_steps: int = 0,
        memory_budget: int | None = None,
        class_dim: int | None = -1,
        backend: Any = None,
        backend_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"model is a {type(model).__name__}; a torch.nn.Module is needed.")
        model, wrapped = unwrapped(model)
        require_values(model)
        self.damping, self.weight_sharing, self.rank, self.tol = damping, weight_sharing, rank, tol
        self.n_subset, self.seed, self.independent_outputs = n_subset, seed, independent_outputs
        self.functional_approximation, self.memory_budget = functional_approximation, memory_budget
        self.inducing, self.inducing_steps = inducing, inducing_steps
        self.subset_of_weights, self.hessian_structure = subset_of_weights, hessian_structure
        self.last_layer_name, self.feature_reduction = last_layer_name, feature_reduction
        self.backend_name, self.backend_kwargs = name_of_backend(backend), backend_kwargs
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
        self.runner = Runner(model, spec, flag(enable_backprop, "enable_backprop"), wrapped)
        made = prior_of(prior, prior_precision, prior_mean, spec.structure.described)
        self.values = Values.of(self.runner, made, sigma_noise, temperature, softmax_temperature)

    if not TYPE_CHECKING:
        __new__ = checked_before(__init__)

    # ---- what was asked for ---------------------------------------------------------------------------------------

    model = reads(options.model)
    likelihood = reads(options.likelihood)
    structure = reads(options.structure)
    curvature = reads(options.curvature)
    curvature_samples = reads(options.curvature_samples)
    subnetwork_indices = reads(options.subnetwork_indices)
    class_dim = reads(options.class_dim)
    dict_key_x = reads(options.dict_key_x)
    dict_key_y = reads(options.dict_key_y)
    enable_backprop = reads(options.enable_backprop, options.set_enable_backprop)

    # ---- the values -------------------------------------------------------------------------------------------------

    prior_precision = holds(holding.prior_precision, holding.set_prior_precision)
    prior_mean = holds(holding.prior_mean, holding.set_prior_mean)
    prior = reads(holding.prior, holding.set_prior)
    sigma_noise = holds(holding.sigma_noise, holding.set_sigma_noise)
    noise_level = reads(holding.noise_level)
    temperature = reads(holding.temperature, holding.set_temperature)
    softmax_temperature = reads(holding.softmax_temperature, holding.set_softmax_temperature)
    is_fitted = reads(holding.is_fitted)
    training_data = reads(holding.training_data)
    posterior = reads(holding.posterior)
    attach_data = holding.attach_data
    log_marginal_likelihood = holding.log_marginal_likelihood
    marglik = log_marginal_likelihood
    """The paper's name of `log_marginal_likelihood`."""

    # ---- what is done with it: functions of other rooms -------------------------------------------------------------

    fit = fitting.fit
    frame = reads(options.frame)
    outputs = outputs_of
    warn_once = options.warn_once
    __call__ = predicting.call
    predict = predicting.predict
    functional_samples = drawing.functional_samples
    predictive_samples = drawing.predictive_samples
    preference = predicting.preference
    sample = drawing.sample
    tune = tuning.tune
    calibrate = calibrating.calibrate
    optimize_prior_precision = tuning.optimize_prior_precision
    as_prior = continual.as_prior
    module = serving.module
    conformal = conformalising.conformal

    coverage = inspection.coverage
    mean = reads(inspection.mean)
    n_params = reads(inspection.n_params)
    n_layers = reads(inspection.n_layers)
    n_data = reads(inspection.n_data)
    n_outputs = reads(inspection.n_outputs)
    loss = reads(inspection.loss)
    H = reads(inspection.H)
    spectrum = reads(inspection.spectrum)
    solves = reads(inspection.solves)
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

    # ---- keeping and joining ----------------------------------------------------------------------------------------

    state_dict = states.state_dict
    load_state_dict = states.load_state_dict
    save = files.save
    load = classmethod(files.load)

    def to(self, device: torch.device | str) -> Self:
        """Move the posterior; the network is yours to move.

        Args:
            device: as `torch.Tensor.to` takes it.

        Returns:
            The object itself.
        """
        self.values = self.values.to(holding.device_named(device))
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

    def _with(self, fit: Fit) -> Self:
        """Return a copy with other sums."""
        out = copy.copy(self)
        out.runner, out.values = self.runner.with_structure_of(fit), replace(out.values, fit=fit)
        return out

    def __repr__(self) -> str:
        return summary(self)

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            """Refuse options and misspelt hyperparameters, which would be kept and change nothing."""
            known = name in self.__dict__ or name in FURTHER or hasattr(type(self), name)
            made = "values" in self.__dict__  # the constructor may set what it likes
            settable = getattr(getattr(type(self), name, None), "fset", None)  # by a subclass, as those of compat
            if made and name in _FIXED and not settable:
                raise UnsupportedError(
                    f"{name} is fixed. Write another Laplace(..., {name}={shown(value)}), and fit it."
                )
            if not known and made and not name.startswith("_") and (hint := did_you_mean(name, _SET, 0.8)):
                raise UnknownAttributeError(f"a Laplace object has no attribute {name!r}.{hint}")
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Look up a name in `FURTHER`. If it is a property of this class that raised, raise its error again."""
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        if name not in FURTHER:
            hint = "" if name.startswith("_") else did_you_mean(name, dir(type(self)), 0.8)
            raise AttributeError(f"a Laplace object has no attribute {name!r}.{hint or ' See dir(la).'}")
        return FURTHER[name].__get__(self, type(self))

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickles and copies take over: a copy learns about its network by itself."""
        return self.__dict__ | {"runner": copy.copy(self.runner), "values": self.values.copied()}


_SET = [name for name, kind in vars(Laplace).items() if isinstance(kind, property) and kind.fset is not None]
_FIXED = {*inspect.signature(Laplace).parameters} - {*_SET}
