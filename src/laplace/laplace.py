"""`Laplace`: the four components put together.

Which weights, what curvature and structure, which hyperparameters, which predictive: each is a part of its own, and
any of them combine. Here they are put together. What users call, and laplace-torch's names for it, is on the sides
that `Laplace` is made of (`calls.py` of their rooms); nothing inside knows these names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laplace.backprop import Plan
from laplace.batches import Keys
from laplace.budget import Budget
from laplace.checkpoints.calls import Storable
from laplace.checkpoints.progress import progress_of
from laplace.checks import generator_or_none, positive, shown
from laplace.coverage import Coverage, coverage_of, not_kron
from laplace.curved_prior import CurvedPrior, prior_of
from laplace.errors import (
    InputError,
    LaplaceError,
    NotFittedError,
    OptionError,
    UnsupportedError,
)
from laplace.fitting import Accumulator
from laplace.functional.fitting import SubsetAccumulator
from laplace.likelihoods import Likelihood, likelihood_named
from laplace.options import curvature_named, refuse_others, require_served, samples_of, structure_named
from laplace.over_time import OverTime
from laplace.positions import class_dim_of
from laplace.posterior import Fit, Posterior
from laplace.precision import plainly
from laplace.predictive.calls import Predictable
from laplace.prior import Prior, own
from laplace.reading import Readable
from laplace.replica import require_shapes
from laplace.running import Running
from laplace.structures.kron import Kron
from laplace.summary import summary
from laplace.tuning.calls import Tunable
from laplace.weights import Choice, Last, LastLayer, Selection, Snapshot, Subnetwork, subset_named

if TYPE_CHECKING:
    pass


class Laplace(Running, Predictable, Tunable, Readable, Storable, OverTime):
    """A Laplace approximation of a trained network: N(mean, (s H + prior precision)^-1) over some of its weights.

    Nothing is computed before `fit`. Options that do not exist, or do not go together, are refused here.

    Args:
        model: the trained network; it is never changed.
        likelihood: what the outputs mean: 'classification', 'regression', 'binary', 'multilabel', 'poisson',
            'heteroscedastic', 'given_noise', 'reward_modeling', or an object, as of `laplace.likelihoods`.
        subset_of_weights: which weights are uncertain: 'last_layer', 'all' (parameters with requires_grad),
            'subnetwork' (with `subnetwork_indices`), globs over names of parameters and modules, or a predicate
            (name, parameter) -> bool.
        hessian_structure: what is kept of the curvature: 'full'; 'lowrank' (the largest eigenpairs of all weights
            together); a block per tensor: 'block', 'inf', 'ekfac', 'kron'; 'diag'; or 'gp', a posterior over functions
            from `n_subset` of the points.
        curvature: 'ggn' (exact), 'sketch' or 'mc' (unbiased estimates), 'ef' (empirical Fisher), 'hessian'. If left
            out, 'ggn', and 'sketch' where outputs at many positions make that too costly (with a warning).
        curvature_samples: of 'sketch' and 'mc', vectors per example.
        sigma_noise: standard deviation of the observation noise of a regression: one number, or one per output.
        prior_precision: one number, one per parameter tensor, or one per weight.
        prior_mean: one number, or one per weight.
        prior: what earlier tasks left, `earlier.as_prior()`, instead of prior_precision and prior_mean.
        temperature: T of p(D given theta)^(1/T).
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
        **others: refused, by name.

    Attributes:
        model: the network, as given.
        likelihood: the likelihood, as an object.
        subset_of_weights: as given.
        structure: the structure, as an object.
        curvature: the kind of curvature, by name.
        curvature_samples: as given.
        class_dim: as given.
        enable_backprop: as given; may be set.

    Raises:
        OptionError: an option that does not exist, or a value outside its range.
        UnsupportedError: options that do not go together; the message says what does.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        subset_of_weights: str | Sequence[str] | Callable[[str, nn.Parameter], bool] = "last_layer",
        hessian_structure: str = "kron",
        *,
        curvature: str | None = None,
        curvature_samples: int = 1,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        prior: CurvedPrior | None = None,
        temperature: float = 1.0,
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
        **others: Any,
    ) -> None:
        refuse_others(others)
        if not isinstance(model, nn.Module):
            raise OptionError(f"model is a {type(model).__name__}; a torch.nn.Module is needed.")
        require_shapes(model)
        self.model = model
        self.likelihood = likelihood_named(likelihood)
        last = Last(last_layer_name, feature_reduction)
        self._subset = subset_named(subset_of_weights, subnetwork_indices, last, model)
        self.subset_of_weights = subset_of_weights
        self.curvature = curvature_named(curvature, backend, backend_kwargs)
        self._curvature_given = curvature is not None or backend is not None
        self.class_dim = class_dim_of(class_dim)
        options = {"damping": damping, "weight_sharing": weight_sharing, "rank": rank, "tol": tol}
        options |= {"n_subset": n_subset, "seed": seed, "independent_outputs": independent_outputs}
        self.structure = structure_named(
            hessian_structure, functional_approximation, options, self.curvature, self._subset.label
        )
        if self.curvature == "hessian" and self._subset.label == "last_layer" and not self.likelihood.hessian_is_fisher:
            raise UnsupportedError(
                f"the exact Hessian of a last layer with {self.likelihood.name!r} depends on the labels and may be "
                "indefinite. Take curvature='ggn', or subset_of_weights= the last layer's name, whose Hessian is exact."
            )
        if isinstance(self._subset, Choice):
            require_served(self.structure, self._subset.select(model).layout)
        self.curvature_samples = samples_of(self.curvature, curvature_samples)
        self._temperature = _checked_temperature(temperature)
        if not isinstance(enable_backprop, bool):
            raise OptionError(f"enable_backprop={shown(enable_backprop)} must be True or False.")
        self.enable_backprop = enable_backprop
        self._keys = Keys(dict_key_x, dict_key_y, self.likelihood.further, self.likelihood.pairs)
        self._weights: LastLayer | Selection | None = None
        self._plan: Plan | None = None
        self._budget = self.structure.budget = Budget(memory_budget)
        self._fitted: Fit | None = None
        self._cached: tuple[tuple[Any, ...], tuple[int, ...], Posterior] | None = None
        self._snapshot: Snapshot | None = None
        self._warned: set[str] = set()
        self._prior = prior_of(prior, prior_precision, prior_mean, self.structure.described)
        self._sigma = self._take_noise(sigma_noise)

    # ---- hyperparameters ---------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> Tensor:
        """A scalar, one value per parameter tensor, or one per weight. Setting it needs no refit."""
        return self._prior.precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        self._set_prior(self._prior.with_precision(value))

    @property
    def prior_mean(self) -> Tensor:
        """A scalar or one value per weight."""
        return self._prior.mean

    @prior_mean.setter
    def prior_mean(self, value: float | Tensor) -> None:
        self._set_prior(self._prior.with_mean(value))

    @property
    def prior(self) -> Prior:
        """Mean and precision together: the prior as a whole, with what earlier tasks left."""
        return self._prior

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
    def temperature(self) -> float:
        """T of p(D given theta)^(1/T). Setting it needs no refit."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._temperature = _checked_temperature(value)

    # ---- fit ---------------------------------------------------------------------------------------------------

    @plainly
    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        generator: torch.Generator | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int = 100,
    ) -> Laplace:
        """Run the network over the data and keep the sums of its curvature, at the weights that it has now.

        Where a batch is refused, the error names it, and the posterior stays as it was.

        Args:
            train_loader: batches, read once or as often as the structure needs: pairs `(x, y)`, or `(x, y, weights)`
                with one weight per example, or mappings. A DataLoader, a list, or (for one run) an iterator.
            override: False adds the data to what was seen before.
            progress_bar: whether one is shown.
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
        self._require_rereading(train_loader, override)
        stream = self._training(train_loader, progress_bar)
        first = next(stream, None)
        if first is None:
            raise InputError("the training loader gave no example. A loader yields batches (x, y) with at least one.")
        weights = self._find_weights(first.inputs, keep=not override)
        if not override and self._fitted is not None:
            self._require_unchanged()
        before = None if override else self._fitted
        engine = self._engine(weights, self._plan if before is not None else None)
        if override:
            self._require_steady(first.inputs, engine.linear)
        kind = self.curvature if before is not None else self._chosen_curvature(engine, first.inputs)
        generator = generator_or_none(generator)
        progress = None if checkpoint is None else progress_of(self, weights, kind, generator, checkpoint, every)
        if generator is None and (self.structure.passes > 1 or progress is not None):
            generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))  # every run draws the same
        sums = (SubsetAccumulator if self.structure.functional else Accumulator)(
            engine,
            self.likelihood,
            self.structure,
            weights.layout,
            kind,
            self.curvature_samples,
            generator,
            self._budget,
            progress,
        )
        sums.n_outputs = 0 if before is None else before.n_outputs
        mean = weights.layout.join(weights.tensors(self.model))
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32), copy=True)
        self._prior.check(weights.layout, self.structure.prior_structures)
        self.structure.check(weights.layout)
        again = None if isinstance(train_loader, Iterator) else lambda: self._training(train_loader, progress_bar)
        sums.run(chain([first], stream), again)
        fitted = sums.fit(mean) if before is None else before.plus(sums.fit(mean))
        covered = coverage_of(fitted, engine.plan)
        if isinstance(self.structure, Kron) and (others := not_kron(covered, self.structure.name)):
            self._warn_once("coverage", others)
        for note in self.structure.notes(fitted.sums):
            self._warn_once(note, note)
        self._weights, self._plan, self.curvature, self._fitted = weights, engine.plan, kind, fitted
        self._snapshot = Snapshot.of(self.model)
        if progress is not None:
            progress.remove()
        self._warned.discard("stale")
        return self

    # ---- evidence ----------------------------------------------------------------------------------------------

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

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def posterior(self) -> Posterior:
        """The Gaussian at the current hyperparameters, kept until one of them changes."""
        if self._fitted is None:
            raise NotFittedError("this posterior has seen no data. Call la.fit(train_loader) first.")
        posterior = Posterior(self._fitted, self._prior, self._sigma, self._temperature)
        if posterior.needs_grad and torch.is_grad_enabled():
            return posterior  # its graph belongs to the caller
        values = (posterior.fit, posterior.prior, posterior.sigma, posterior.temperature)
        versions = tuple(t._version for t in (posterior.prior.precision, posterior.prior.mean, posterior.sigma))
        cached = self._cached
        if cached is None or cached[1] != versions or any(a is not b for a, b in zip(cached[0], values, strict=True)):
            cached = self._cached = (values, versions, posterior.detached())
        return cached[2]

    @property
    def subnetwork_indices(self) -> Tensor | None:
        """Of subset_of_weights='subnetwork': the indices into all trainable weights, ascending."""
        return self._subset.indices.clone() if isinstance(self._subset, Subnetwork) else None

    @property
    def is_fitted(self) -> bool:
        """Whether the posterior has seen data."""
        return self._fitted is not None

    def coverage(self) -> Coverage:
        """A table of all uncertain tensors: the rule that explains each, what is kept of it, and the bytes.

        Raises:
            NotFittedError: before `fit`.
        """
        return coverage_of(self.posterior.fit, self._plan)

    def to(self, device: torch.device | str) -> Laplace:
        """Move the posterior; the network is yours to move.

        Args:
            device: as `torch.Tensor.to` takes it.

        Returns:
            The object itself.
        """
        if self._fitted is not None:
            self._fitted = self._fitted.to(device)
        self._prior, self._sigma = self._prior.to(device), self._sigma.to(device)
        return self

    def __repr__(self) -> str:
        return summary(self)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _restore(
        self, fit: Fit, weights: LastLayer | Selection, prior: Prior, sigma: Tensor, temperature: float
    ) -> None:
        self._sigma, self._temperature = self._take_noise(sigma), _checked_temperature(temperature)
        self._fitted, self._weights, self._prior, self._snapshot = fit, weights, prior, Snapshot.of(self.model)
        self.curvature = fit.kind
        self._warned.discard("stale")

    def _set_prior(self, prior: Prior) -> None:
        if self._fitted is not None:
            prior.check(self._fitted.layout, self.structure.prior_structures)
        self._prior = prior

    def _take_noise(self, value: float | Tensor) -> Tensor:
        """One level of noise, (); what the outputs' noise is relative to each other is the likelihood's."""
        likelihood, level = self.likelihood.with_noise(own(positive(value, "sigma_noise")))
        if likelihood is not self.likelihood and self._fitted is not None:
            raise OptionError(
                "the noise of the outputs relative to each other is part of the curvature; after fit, sigma_noise can "
                "be scaled as a whole: give one number. For another relation make a new Laplace(..., sigma_noise=...)."
            )
        self.likelihood = likelihood
        return level


def _checked_temperature(value: float) -> float:
    temperature = positive(value, "temperature")
    if temperature.numel() != 1:
        raise OptionError(f"temperature has {temperature.numel()} values; it is one number.")
    return float(temperature)
