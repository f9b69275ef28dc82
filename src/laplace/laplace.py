"""`Laplace`: the four components put together.

Which weights, what curvature and structure, which hyperparameters, which predictive: each is a part of its own, and
any of them combine. This file only puts them together; laplace-torch's names are accepted here and nowhere inside.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laplace import checkpoint
from laplace.backprop import Forward, Head, Network, Plan
from laplace.backprop.audit import EXAMPLES
from laplace.batches import Batch, Inputs, Keys, device_of, training_batches
from laplace.budget import Budget
from laplace.checkpoints import posteriors as checkpoints
from laplace.checkpoints.progress import progress_of
from laplace.counting import check_finite
from laplace.coverage import Coverage, coverage_of, not_kron
from laplace.curved_prior import CurvedPrior, prior_of
from laplace.errors import (
    InputError,
    LaplaceWarning,
    NotFittedError,
    OptionError,
    StaleWarning,
    UnsupportedError,
    warn,
)
from laplace.fitting import Accumulator
from laplace.functional.fitting import SubsetAccumulator
from laplace.likelihoods import Likelihood, likelihood_named
from laplace.options import (
    MOST_VECTORS,
    curvature_named,
    generator_or_none,
    refuse_others,
    require_served,
    samples_of,
    structure_named,
)
from laplace.over_time import OverTime
from laplace.positions import Positions, class_dim_of
from laplace.posterior import Fit, Posterior
from laplace.precision import plainly
from laplace.predictive.calls import Predictable
from laplace.prior import Prior, own, positive
from laplace.reading import Readable
from laplace.replica import replicate, require_shapes
from laplace.structures.kron import Kron
from laplace.summary import summary
from laplace.tuning.calls import Tunable
from laplace.weights import Choice, Last, LastLayer, Selection, Snapshot, Subnetwork, subset_named, what_changed

if TYPE_CHECKING:
    from typing_extensions import Self


class Laplace(Predictable, Tunable, Readable, OverTime):
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
        weight_sharing: of 'kron', for weights used at many positions: 'expand' or 'reduce'.
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
        self._sigma = self._checked_sigma(sigma_noise)

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
        self._sigma = self._checked_sigma(value)

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
            UnsupportedError: `override=False` of a structure whose sums do not add.
            CheckpointError: a file `checkpoint` of another fit.
        """
        self._require_rereading(train_loader, override)
        stream = self._training(train_loader, progress_bar)
        first = next(stream, None)
        if first is None:
            raise InputError("the training loader gave no example. A loader yields batches (x, y) with at least one.")
        weights = self._find_weights(first.inputs, keep=not override)
        if not override and self._fitted is not None:
            self._notice_changes()
        before = None if override else self._fitted
        engine = self._engine(weights, self._plan if before is not None else None)
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
        self._weights, self._plan, self.curvature = weights, getattr(engine, "plan", None), kind
        self._fitted = sums.fit(mean) if before is None else before.plus(sums.fit(mean))
        self._snapshot = Snapshot.of(self.model)
        if progress is not None:
            progress.remove()
        self._warned.discard("stale")
        if isinstance(self.structure, Kron) and (others := not_kron(self.coverage(), self.structure.name)):
            self._warn_once("coverage", others)
        for note in self.structure.notes(self._fitted.sums):
            self._warn_once(note, note)
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
        sigma = self._sigma if sigma_noise is None else self._checked_sigma(sigma_noise)
        if prior_precision is not None:
            self.prior_precision = prior_precision
        self._sigma = sigma
        return self.posterior.log_evidence

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

    def state_dict(self, with_data: bool = False) -> dict[str, Any]:
        """Everything of a fitted posterior as tensors, numbers and strings: no code, and no training data.

        Args:
            with_data: needed for a 'gp', which is made of some points of the data.

        Raises:
            NotFittedError: before `fit`.
            UnsupportedError: a 'gp' without `with_data`.
        """
        return checkpoint.state_dict(self, with_data)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, on the same network with the same options.

        Args:
            state: what it gave, straight or through `torch.save` and `torch.load(path, weights_only=True)`.

        Raises:
            InputError: a state of other options, or of other parameters.
        """
        checkpoint.load_state_dict(self, state)

    def save(self, path: str | os.PathLike[str], with_data: bool = False) -> None:
        """Write a fitted posterior to a file of safetensors: no code, and no training data.

        Args:
            path: the file; one of that name is replaced once the new one is whole.
            with_data: of a 'gp', which is made of some points of the data, write their inputs as well; without, the
                file has their numbers and a digest, and `load` needs the data.

        Raises:
            NotFittedError: before `fit`.
            UnsupportedError: a network whose weights have changed since.
        """
        checkpoints.save(self, path, with_data)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        likelihood: Likelihood | str | None = None,
        names: Mapping[str, str] | None = None,
        data: Iterable[Any] | None = None,
    ) -> Self:
        """The posterior that `save` wrote, on the same network with the same weights; all options are in the file.

        Args:
            path: the file.
            model: the network, with the weights at which the posterior was fitted.
            likelihood: one of your own, if it was fitted with one.
            names: {old: new} where parameters or modules have other names now.
            data: for a 'gp' that was saved without its data: the batches, in the order in which it was fitted.

        Raises:
            CheckpointError: a file that is damaged or foreign, or a network or data that differ; it says in what.
        """
        return checkpoints.load(cls, path, model, likelihood, names, data)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_snapshot": None}  # addresses mean nothing in a copy

    def __repr__(self) -> str:
        return summary(self)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _restore(
        self, fit: Fit, weights: LastLayer | Selection, prior: Prior, sigma: Tensor, temperature: float
    ) -> None:
        self._sigma, self._temperature = self._checked_sigma(sigma), _checked_temperature(temperature)
        self._fitted, self._weights, self._prior, self._snapshot = fit, weights, prior, Snapshot.of(self.model)
        self.curvature = fit.kind

    def _find_weights(self, inputs: Inputs, keep: bool) -> LastLayer | Selection:
        if keep and self._weights is not None:
            return self._weights
        weights = self._subset.find(self.model, inputs)
        require_served(self.structure, weights.layout)
        if isinstance(weights, LastLayer) and self.curvature == "ef" and self._positions(inputs).several:
            return Selection(weights.layout)  # an example's score is one vector for all its positions
        return weights

    def _positions(self, inputs: Inputs) -> Positions:
        """The shape of the outputs, from a run on a few examples."""
        with torch.inference_mode(False), torch.no_grad():
            f = inputs.part(0, EXAMPLES).map(torch.clone).call(replicate(self.model))  # which may write to them
        return Positions.of(f, self.class_dim)

    def _may_have_chosen(self, curvature: str) -> bool:
        """Whether a fit may have taken this curvature unasked."""
        return not self._curvature_given and curvature in ("ggn", "sketch")

    def _chosen_curvature(self, engine: Head | Network, inputs: Inputs) -> str:
        """Where nobody said which: exact, unless that takes too many vectors to be sent back from all positions."""
        if self._curvature_given:
            return self.curvature
        if isinstance(engine, Head):
            return "ggn"
        found = engine.planned_positions(inputs)
        vectors = found.count * found.c
        if not found.several or vectors <= MOST_VECTORS:
            return "ggn"
        self._warn_once(
            "sketch",
            f"the exact GGN sends back a vector for each of {found.c} outputs at {found.count} positions; above "
            f"{MOST_VECTORS} in all, an unbiased estimate is taken: curvature='sketch', one vector. Write "
            "curvature='ggn' for the exact one, or curvature='sketch' with curvature_samples= to say it yourself.",
        )
        return "sketch"

    def _training(self, loader: Iterable[Any], progress_bar: bool) -> Iterator[Batch]:
        return iter(training_batches(loader, self.model, self._keys, progress_bar, "fit"))

    def _require_rereading(self, loader: Iterable[Any], override: bool) -> None:
        """What a structure that reads the data more than once, or keeps some of it, cannot do."""
        name = self.structure.name
        if self.structure.passes > 1 and isinstance(loader, Iterator):
            raise InputError(
                f"hessian_structure={name!r} reads the data {self.structure.passes} times or more, and a "
                f"{type(loader).__name__} can be read once. Give a DataLoader or a list of batches."
            )
        if not self.structure.adds and not override and self._fitted is not None:
            raise UnsupportedError(
                f"override=False: what {name!r} keeps depends on all data and cannot be added to. Fit it on all data "
                "at once, or take 'kron', 'diag', 'block' or 'full', whose sums add."
            )

    def _engine(self, weights: LastLayer | Selection, plan: Plan | None = None) -> Head | Network:
        """What runs the network; the `plan` of a network is kept from one call to the next."""
        if isinstance(weights, LastLayer):
            return Head(self.model, weights, self._budget, self.class_dim)
        reduce = getattr(self.structure, "weight_sharing", "expand") == "reduce"
        exact = self.curvature == "hessian"
        return Network(self.model, weights, self._budget, plan, reduce, exact, self.class_dim)

    def _runs(self, inputs: Inputs, whole: bool = False) -> Iterator[Forward]:
        if whole:
            yield from self._uncut(inputs, whole)
            return
        for forward in self._uncut(inputs):
            yield from (part for part, _ in forward.cut())

    def _uncut(self, inputs: Inputs, whole: bool = False) -> Iterator[Forward]:
        """Runs on consecutive parts of the inputs, with all positions of each example."""
        posterior = self.posterior
        self._notice_changes()
        assert self._weights is not None
        engine, inputs = self._engine(self._weights, self._plan), inputs.to(device_of(self.model))
        seen = 0  # examples of the parts before
        for part in [inputs] if whole else engine.chunks(inputs, posterior.fit.n_outputs):
            forward = engine.forward(part, self.enable_backprop)
            if forward.positions.c != posterior.fit.n_outputs:
                raise InputError(
                    f"the outputs have {forward.positions.c} classes or outputs each; fitted on "
                    f"(N, {posterior.fit.n_outputs})."
                )
            check_finite(forward.outputs, "the network's outputs hold", forward.positions.count, seen)
            seen += forward.positions.n
            yield posterior.fit.beside(forward, engine, self._budget.chunk)
        if isinstance(engine, Network):
            self._plan = engine.plan

    def _set_prior(self, prior: Prior) -> None:
        if self._fitted is not None:
            prior.check(self._fitted.layout, self.structure.prior_structures)
        self._prior = prior

    def _checked_sigma(self, value: float | Tensor) -> Tensor:
        """One level of noise, (); what the outputs' noise is relative to each other is the likelihood's."""
        likelihood, level = self.likelihood.with_noise(own(positive(value, "sigma_noise")))
        if likelihood is not self.likelihood and self._fitted is not None:
            raise OptionError(
                "the noise of the outputs relative to each other is part of the curvature; after fit, sigma_noise can "
                "be scaled as a whole: give one number. For another relation make a new Laplace(..., sigma_noise=...)."
            )
        self.likelihood = likelihood
        return level

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


def _checked_temperature(value: float) -> float:
    temperature = positive(value, "temperature")
    if temperature.numel() != 1:
        raise OptionError(f"temperature has {temperature.numel()} values; it is one number.")
    return float(temperature)
