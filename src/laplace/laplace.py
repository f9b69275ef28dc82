"""`Laplace`: a network, what was asked for, what the data left, and the hyperparameters. All else is done elsewhere.

It holds two things, a `Runner` (the network with its options) and `Values` (all that may change), and delegates: a
method is a function of the room that it belongs to, and takes whatever has a `runner` and `values`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from laplace.checkpoints import posteriors as files
from laplace.checkpoints import state as states
from laplace.checkpoints.progress import progress_of
from laplace.checks import did_you_mean, flag, flag_or_none
from laplace.conformal import calls as conformalising
from laplace.curvature import Estimator
from laplace.distributed import OWN, Group, reduce_over
from laplace.errors import OptionError, UnknownAttributeError
from laplace.inference import continual, inspection, options
from laplace.inference import predict as predicting
from laplace.inference import values as holding
from laplace.inference.fit import fit as sums_of
from laplace.inference.runner import Runner
from laplace.inference.source import outputs_of
from laplace.inference.summary import summary
from laplace.inference.values import Values
from laplace.likelihoods import Likelihood
from laplace.linalg.autocast import plainly
from laplace.network.loaders import training_data
from laplace.network.replica import require_values
from laplace.network.wrappers import unwrapped
from laplace.posterior.posterior import Fit
from laplace.posterior.task_prior import prior_of
from laplace.priors import Prior
from laplace.serving import module as serving
from laplace.spec import STRUCTURE_OPTIONS, Spec, checked_before, name_of_backend, refuse_unknown_keywords
from laplace.structures import Structure
from laplace.tuning import calibration as calibrating
from laplace.tuning import calls as tuning
from laplace.weights import Subset

if TYPE_CHECKING:
    from typing_extensions import Self

    Value = TypeVar("Value")

    def reads(function: Callable[[Any], Value], change: Callable[[Any, Value], None] | None = None) -> Value:
        """Show type checkers `property(function, change)` as an attribute with the type of its value."""
        ...

    class holds(Generic[Value]):
        """Shows type checkers a property that is read as a tensor, and may be set to a number."""

        def __init__(self, function: Callable[[Any], Value], change: Callable[[Any, Any], None]) -> None: ...

        def __get__(self, la: Any, owner: Any) -> Value: ...

        def __set__(self, la: Any, value: float | Value) -> None: ...

else:
    reads = holds = property


FURTHER: dict[str, Any] = {}  # descriptors of names for other libraries' scripts; see `laplace.compat`


class Laplace:
    """A Laplace approximation of a trained network: N(mean, (s H + prior precision)^-1) over some of its weights.

    Nothing is computed before `fit`. Options that do not exist, or do not go together, are refused here. Each option is
    readable under its own name, with a value that this call takes. Parts are given by name with keywords, or as objects
    with options of their own: "kron" with damping=True is Kron(damping=True).

    Args:
        model: the trained network; it is never changed. One in `DistributedDataParallel` is taken out of it.
        likelihood: what the outputs mean: 'classification', 'regression', 'binary', 'multilabel', 'poisson',
            'heteroscedastic', 'given_noise', 'reward_modeling', or an object, as of `laplace.likelihoods`.
        subset_of_weights: which weights are uncertain: 'last_layer', 'all' (parameters with requires_grad),
            'subnetwork' (with `subnetwork_indices`), globs over names of parameters and modules, a predicate
            (name, parameter) -> bool, or an object of `laplace.weights`.
        hessian_structure: what is kept of the curvature, by name or as an object of `laplace.structures`: 'full';
            'lowrank' (the largest eigenpairs of all weights together); a block per tensor: 'block', 'inf', 'ekfac',
            'kron'; 'diag'; 'matrix_free' (the posterior of 'full' without its matrix, by solves over the training
            data); or 'gp', a posterior over functions from `n_subset` of the points.
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
            'lowrank', eigenpairs of all weights together (20); of 'gp' with 'nystrom', directions (100); of
            'matrix_free', leading directions as a preconditioner (100).
        tol: of 'lowrank', instead of `rank`: the eigenpairs above tol times the largest.
        n_subset: of 'gp', how many points are kept (None: all, up to 256).
        seed: of 'gp', what the points are drawn by; of 'matrix_free', what the probes are drawn by.
        independent_outputs: of 'gp' with 'sod', each output by itself.
        functional_approximation: of 'gp', 'sod' (the subset alone), 'nystrom' (all data in `rank` directions) or
            'variational' (all data given `n_subset` inducing points).
        inducing: of 'gp' with 'variational', where the inducing points are: 'random' (drawn from the data), 'kmeans',
            or the points themselves, in the form of the inputs.
        inducing_steps: of 'gp' with 'variational', how many steps to move the inducing points by.
        memory_budget: bytes that may be taken; what is free, if left out.
        class_dim: which dimension of the outputs has the classes: -1 of (N, C) and (N, T, C), 1 of (N, C, H, W); None
            for one number at each position, (N, T).
        backend: a backend class of laplace-torch, understood as the curvature that it stands for.
        backend_kwargs: of `backend`; `stochastic=True` stands for curvature 'mc'.

    Attributes:
        runner: the network with the parts that it is treated by.
        values: what the data left, the prior, the noise and the temperatures.

    Raises:
        OptionError: an option is unknown, or its value is outside its range.
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

    @refuse_unknown_keywords
    @plainly
    def fit(
        self,
        train_loader: Any,
        override: Any = True,
        progress_bar: bool | None = None,
        *,
        y: Any = None,
        generator: torch.Generator | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int = 100,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        batch_size: int | None = None,
        group: Group = OWN,
    ) -> Self:
        """Run the network over the data and keep the sums of its curvature, at the weights that it has now.

        Where a batch is refused, the error names it, and the posterior stays as it was.

        Args:
            train_loader: batches, read once or as often as the structure needs: pairs `(x, y)`, or `(x, y, weights)`
                with one weight per example, or mappings. A DataLoader, a list, or (for one run) an iterator. Or the
                inputs of all data, as arrays, DataFrames or tensors, with labels beside them: `la.fit(x, y)`. Or a
                dataset of single examples, a Lightning DataModule, or a `transformers.Trainer`, whose training data is
                read in order.
            override: False adds the data to what was seen before. In `la.fit(x, y)`, the labels.
            progress_bar: whether one is shown; None shows one in a terminal after a few seconds.
            y: the labels, if `train_loader` is the inputs of all data; the same as a second argument.
            generator: what curvature 'mc' and 'sketch' draw from; torch's own if left out.
            checkpoint: a file to which the sums so far are written; after an interruption the same call goes on from
                there, and removes it.
            every: how many batches apart that is.
            collate_fn: of a dataset, makes a batch of a list of examples, as a data collator of transformers does.
            batch_size: of a dataset or of `la.fit(x, y)`, examples in a batch; 32 or 128 if left out.
            group: the process group whose ranks fit one posterior together, each reading its own part of the data, as
                `torch.distributed.group.WORLD`. None keeps the posterior of this process's own batches.

        Returns:
            The object itself.

        Raises:
            InputError: a batch that does not fit, or a loader without an example.
            ModelError: a network that cannot be treated as asked.
            MemoryBudgetError: sums that would not fit into memory.
            UnsupportedError: `override=False` of a structure whose sums do not add, or of a network that has changed.
            CheckpointError: a file `checkpoint` of another fit.
            RankError: another rank of `group` has failed; the message names it and its error.
        """
        train_loader, override = training_data(train_loader, override, y, batch_size, collate_fn)
        before = None if flag(override, "override") else self.values.fit
        reduce = reduce_over(group, self.runner.spread, train_loader)
        if group is OWN:
            self.runner.notice_processes()
        journal = None
        if checkpoint is not None:
            journal = partial(progress_of, self.runner, path=checkpoint, every=every, reduce=reduce)
        fit = sums_of(
            self.runner,
            train_loader,
            self.prior,
            before,
            progress_bar=flag_or_none(progress_bar, "progress_bar"),
            generator=generator,
            journal=journal,
            reduce=reduce,
        )
        again = before is None and not isinstance(train_loader, Iterator)
        self.values = replace(self.values, fit=fit, training_data=train_loader if again else None)
        return self

    # ---- what is done with it: functions of other rooms -------------------------------------------------------------

    frame = reads(options.frame)
    outputs = outputs_of
    warn_once = options.warn_once
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
            """Refuse a misspelt hyperparameter, which would be kept and change nothing."""
            known = name in self.__dict__ or name in FURTHER or hasattr(type(self), name)
            made = "values" in self.__dict__  # the constructor may set what it likes
            if not known and made and not name.startswith("_") and (hint := did_you_mean(name, _SET, 0.8)):
                raise UnknownAttributeError(f"a Laplace object has no attribute {name!r}.{hint}")
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Look up a name that is not here among the further ones; what a property raised is raised again."""
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        if name not in FURTHER:
            raise AttributeError(f"a Laplace object has no attribute {name!r}. See dir(la).")
        return FURTHER[name].__get__(self, type(self))

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickles and copies take over: a copy learns about its network by itself."""
        return self.__dict__ | {"runner": copy.copy(self.runner), "values": self.values.copied()}


_SET = [name for name, kind in vars(Laplace).items() if isinstance(kind, property) and kind.fset is not None]
