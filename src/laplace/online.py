"""Online evidence: tune prior and noise by the evidence while the network is trained.

Each epoch takes steps down the negative log joint, - (1/T) log p(D given theta) - log p(theta), at the current prior
and noise. Every few epochs a Laplace approximation is fitted at the current weights, and prior and noise move towards
the optimum of its evidence (Immer et al. 2021, the paper's algorithm "Online Laplace").
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from tqdm.auto import tqdm

from laplace.checkpoints import training as files
from laplace.checks import choice, flag, generator_or_none, one_positive, path_of, positive, shown, whole_number
from laplace.curvature import Estimator
from laplace.errors import (
    CheckpointError,
    InputError,
    LaplaceError,
    NumericalError,
    OptionError,
    UnsupportedError,
    warn,
    within,
)
from laplace.inference.targets import checked, labelled_rows
from laplace.laplace import Laplace
from laplace.likelihoods import Likelihood
from laplace.network.batches import Batch, device_of
from laplace.posterior.schema import require_alike
from laplace.posterior.task_prior import vector_of
from laplace.predictive.positions import Positions
from laplace.priors import Prior
from laplace.priors.gaussian import GaussianPrior
from laplace.spec import TrainingOptions, refuse_unknown_keywords
from laplace.structures import Structure, per_weight
from laplace.tuning.evidence import climb
from laplace.tuning.space import Space
from laplace.weights import Subset
from laplace.weights.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DIVERGED = "Has training diverged? Take a smaller learning rate, as in optimizer_kwargs={'lr': 1e-3}."


@refuse_unknown_keywords
def marglik_training(
    model: nn.Module,
    train_loader: Iterable[Any],
    likelihood: Likelihood | str = "classification",
    hessian_structure: Structure | str = "kron",
    backend: Any = None,
    optimizer_cls: Callable[..., Optimizer] = Adam,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    scheduler_cls: Callable[..., Any] | None = None,
    scheduler_kwargs: Mapping[str, Any] | None = None,
    n_epochs: int = 300,
    lr_hyp: float = 0.1,
    prior_structure: str = "layerwise",
    n_epochs_burnin: int = 0,
    n_hypersteps: int = 10,
    marglik_frequency: int = 1,
    prior_prec_init: float | Tensor = 1.0,
    sigma_noise_init: float | Tensor = 1.0,
    temperature: float = 1.0,
    fix_sigma_noise: bool = False,
    progress_bar: bool = False,
    enable_backprop: bool = False,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
    *,
    subset_of_weights: Subset | str | Sequence[str] | Callable[[str, nn.Parameter], bool] = "all",
    curvature: Estimator | str | None = None,
    prior: Prior | None = None,
    keep_best: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[TrainingOptions],
) -> tuple[Laplace, nn.Module, list[float], list[float]]:
    """Train `model` in place, and tune prior precision and noise by the evidence during training.

    The first `n_epochs_burnin` epochs only train. After them, every `marglik_frequency` epochs, Newton's method finds
    the best prior precision and noise in at most `n_hypersteps` steps. They move towards it, but their logarithms by no
    more than `lr_hyp * n_hypersteps`: as far as that many steps of Adam would move them.

    Args:
        model: The network. All weights that require grad are trained.
        train_loader: Batches, as `Laplace.fit` takes them. Read once per epoch, and once more whenever the evidence is
            computed.
        likelihood: A likelihood object or name, as in `Laplace`.
        hessian_structure: The structure of the posterior, as in `Laplace`.
        backend: A backend class of laplace-torch; it selects the matching curvature.
        optimizer_cls: Makes the optimizer of the weights.
        optimizer_kwargs: Options of the optimizer. A `weight_decay` is dropped with a warning, because the prior
            already decays the weights.
        scheduler_cls: Makes a scheduler, which takes a step after each batch.
        scheduler_kwargs: Options of the scheduler.
        n_epochs: How many times training runs over the data.
        lr_hyp: Limits how far prior and noise move at a time; see above.
        prior_structure: 'scalar', 'layerwise' or 'diag': one prior precision for all weights, per parameter tensor, or
            per weight.
        n_epochs_burnin: How many epochs train before the evidence is first used.
        n_hypersteps: How many Newton steps are taken at most each time; see above.
        marglik_frequency: How many epochs lie between two uses of the evidence.
        prior_prec_init: The prior precision to start with.
        sigma_noise_init: The noise to start with, for regression.
        temperature: The temperature of the likelihood, as in `Laplace`.
        fix_sigma_noise: Whether the noise stays at its start value.
        progress_bar: Whether to show a progress bar.
        enable_backprop: Whether gradients flow from predictions to the inputs, as in `Laplace`.
        dict_key_x: The key of the inputs in batches that are mappings, as in `Laplace`.
        dict_key_y: The key of the labels in batches that are mappings, as in `Laplace`.
        subset_of_weights: Which weights have a prior and a posterior.
        curvature: The curvature, as in `Laplace`.
        prior: A prior of `laplace.priors`, or the one from earlier tasks, `earlier.as_prior()`. Training starts from
            its values, so `prior_prec_init` must be left out.
        keep_best: Whether to end with the weights of the highest evidence instead of the last ones.
        checkpoint: A file that is written after each epoch. If it exists, the same call continues from it. Other
            settings are refused; for the data, only the number of examples is compared.
        generator: The random generator of curvature 'mc' and 'sketch'.
        **options: Further options of `Laplace`: those of the structure, of the curvature and of the weights,
            `prior_mean`, `class_dim` and `memory_budget`.

    Returns:
        The posterior at the trained weights, the network, the log evidences (one for each time it was computed; larger
            is better), and the loss of each epoch (the negative log joint per example).

    Raises:
        OptionError: an option does not exist, or a value is outside its range.
        InputError: the data does not fit the network, or can be read only once.
        CheckpointError: the file `checkpoint` belongs to another training.
    """
    la = Laplace(
        model,
        likelihood,
        subset_of_weights,
        hessian_structure,
        backend=backend,
        curvature=curvature,
        prior_precision=prior_prec_init,
        prior=prior,
        sigma_noise=sigma_noise_init,
        temperature=temperature,
        enable_backprop=enable_backprop,
        dict_key_x=dict_key_x,
        dict_key_y=dict_key_y,
        **options,
    )
    keep_best, fix_sigma_noise = flag(keep_best, "keep_best"), flag(fix_sigma_noise, "fix_sigma_noise")
    progress_bar = flag(progress_bar, "progress_bar")
    checkpoint = None if checkpoint is None else path_of(checkpoint, "checkpoint")
    tuning = _Tuning(
        _checked_prior_structure(prior_structure, la),
        not fix_sigma_noise and la.likelihood.has_noise,
        whole_number(n_hypersteps, "n_hypersteps"),
        one_positive(lr_hyp, "lr_hyp") * n_hypersteps,
        whole_number(marglik_frequency, "marglik_frequency"),
        whole_number(n_epochs_burnin, "n_epochs_burnin", 0),
    )
    if isinstance(train_loader, Iterator):
        raise InputError(
            f"training reads the data once per epoch, and a {type(train_loader).__name__} can be read only once. Give "
            "a DataLoader or a list of batches."
        )
    la.runner.notice_processes(training=True)
    if scheduler_cls is torch.optim.lr_scheduler.ReduceLROnPlateau:
        raise OptionError(
            "scheduler_cls=ReduceLROnPlateau needs a loss; here a scheduler takes a step after each batch, without "
            "one. Take another, such as CosineAnnealingLR with T_max= the number of batches in all epochs."
        )
    if not any(map(tuning.is_due, range(1, whole_number(n_epochs, "n_epochs") + 1))):
        warn(
            f"the evidence is never computed: {n_epochs} epochs with n_epochs_burnin={tuning.burnin} and "
            f"marglik_frequency={tuning.frequency}. Prior and noise stay where they start."
        )
    for name, make in {
        "optimizer_cls": optimizer_cls,
        "scheduler_cls": Adam if scheduler_cls is None else scheduler_cls,
    }.items():
        if not callable(make):
            raise OptionError(f"{name}={shown(make)} must be a class of torch.optim, or a function that makes one.")
    for name, given in {"optimizer_kwargs": optimizer_kwargs, "scheduler_kwargs": scheduler_kwargs}.items():
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(f"{name}={shown(given)} must be a mapping, as in {name}={{'lr': 1e-3}}.")
    optimizer = optimizer_cls((p for p in model.parameters() if p.requires_grad), **_without_decay(optimizer_kwargs))
    scheduler = scheduler_cls(optimizer, **dict(scheduler_kwargs or {})) if scheduler_cls is not None else None
    data = _Data(train_loader, la)
    compared = _comparable(optimizer_kwargs, "optimizer") | _comparable(scheduler_kwargs, "scheduler")
    compared |= {"prior_prec_init": _listed(prior_prec_init), "fix_sigma_noise": bool(fix_sigma_noise)}
    compared |= {"sigma_noise_init": _listed(sigma_noise_init)}
    training = _Training(la, data, optimizer, scheduler, tuning, generator_or_none(generator), compared)
    was_training = model.training
    try:
        training.run(whole_number(n_epochs, "n_epochs"), checkpoint, progress_bar, keep_best)
    finally:
        model.train(was_training)
    la.fit(train_loader, generator=generator)
    return la, model, training.margliks, training.losses


@dataclass(frozen=True)
class _Tuning:
    """Says how and when the hyperparameters move."""

    groups: str
    noise: bool
    max_steps: int
    reach: float  # the longest step of a logarithm
    frequency: int
    burnin: int

    def is_due(self, epoch: int) -> bool:
        """Return whether they move after this epoch, counted from 1."""
        return epoch > self.burnin and epoch % self.frequency == 0

    def move(self, la: Laplace) -> float:
        """Move towards the optimum of the evidence, and return the log evidence there."""
        with torch.no_grad():
            posterior = la.posterior.detached()
            prior = posterior.prior
            gaussian = isinstance(prior, GaussianPrior)
            names = () if gaussian else prior.tuned
            space = Space(posterior, self.groups if gaussian or names else None, self.noise, names=names)
            if space.kinds:
                found = climb(space, space.start(prior.precision if gaussian else 1.0), self.max_steps, self.reach)
                la.prior, la.sigma_noise = found.prior, found.sigma
            return float(la.posterior.log_evidence)


class _Data:
    """Holds the training data. Reads it once to count the examples."""

    def __init__(self, loader: Iterable[Any], la: Laplace) -> None:
        self.loader, self.la = loader, la
        self.n, self.first = 0, None
        for batch in self:
            self.first = self.first or batch.inputs.copied()
            self.n += len(batch.y)
        if self.first is None:
            raise InputError("the training loader gave no example. It must yield batches (x, y), at least one.")

    def __iter__(self) -> Iterator[Batch]:
        return self.la.runner.batches(self.loader, False, "train")


@dataclass
class _Training:
    """Holds everything that changes from epoch to epoch."""

    la: Laplace
    data: _Data
    optimizer: Optimizer
    scheduler: Any
    tuning: _Tuning
    generator: torch.Generator | None
    compared: Mapping[str, Any]  # the user's other settings, to compare with a checkpoint's
    margliks: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    best: dict[str, Any] | None = None

    def run(self, n_epochs: int, checkpoint: Any, progress_bar: bool, keep_best: bool) -> None:
        """Run the remaining epochs, and keep the last or the best weights and hyperparameters."""
        assert self.data.first is not None
        layout = self.la.runner.find_weights(self.data.first).layout
        self.la.prior.check(layout, self.la.structure.takes)
        generators = files.generators_of(self.data.loader, self.generator)
        settings = self._settings(layout, keep_best)
        if checkpoint is not None:
            state = files.load(checkpoint, settings, device_of(self.la.model))
            if state is not None:
                self._require_whole(state, layout, checkpoint)
                if len(state["losses"]) > n_epochs:
                    raise CheckpointError(
                        f"checkpoint={str(checkpoint)!r} already has {len(state['losses'])} epochs; "
                        f"n_epochs={n_epochs} is fewer. Give at least as many, or another file."
                    )
                try:
                    files.set_random_state(state["random"], generators)
                except Exception as error:  # a file that was made by hand
                    raise files.damaged(checkpoint, f"its random state cannot be set ({error!r})") from error
                self._restore(state)
        with tqdm(total=n_epochs, initial=len(self.losses), disable=not progress_bar, unit="epoch") as bar:
            while len(self.losses) < n_epochs:
                self.losses.append(self._epoch(layout))
                if self.tuning.is_due(len(self.losses)):
                    self._fit()
                    self.margliks.append(self.tuning.move(self.la))
                    if keep_best and self.margliks[-1] == max(self.margliks):
                        self.best = copy.deepcopy(self._where())
                if checkpoint is not None:
                    state = self._state() | {"settings": settings, "random": files.random_state(generators)}
                    files.save(state, checkpoint)
                shown = {"loss": self.losses, "evidence": self.margliks}
                bar.set_postfix({key: values[-1] for key, values in shown.items() if values})
                bar.update()
        if self.best is not None:
            self._go_to(self.best)

    def _fit(self) -> None:
        """Fit the posterior at the current weights."""
        try:
            self.la.fit(self.data.loader, generator=self.generator)
        except NumericalError as error:
            raise NumericalError(f"after epoch {len(self.losses)}: {error} {_DIVERGED}") from error

    def _epoch(self, layout: Layout) -> float:
        """Run one epoch, and return the negative log joint per example, averaged over its batches."""
        la, total = self.la, 0.0
        prior, sigma = la.prior.detached(), la.noise_level.detach()
        # Divide by the scale of the loss, so that a learning rate means the same for every noise and temperature.
        unit = la.likelihood.curvature_scale("ggn", sigma) / la.temperature
        la.model.train()
        for batch in self.data:
            self.optimizer.zero_grad()
            with torch.inference_mode(False), torch.enable_grad():
                loss = -self._log_likelihood(batch, sigma) / la.temperature
                if not loss.detach().isfinite():
                    raise NumericalError(
                        f"epoch {len(self.losses) + 1}, batch {batch.index}: the loss is {float(loss.detach())}. "
                        + _DIVERGED
                    )
                loss = loss + prior.penalty(vector_of(la.model, layout), layout).to(loss) / self.data.n
                (loss / unit.to(loss)).backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            total += float(loss.detach()) * len(batch.y)
        return total / self.data.n

    def _log_likelihood(self, batch: Batch, sigma: Tensor) -> Tensor:
        """Return log p(y given f), the mean over a batch."""
        likelihood = self.la.likelihood
        with within(f"epoch {len(self.losses) + 1}, batch {batch.index}"):
            f = batch.inputs.call(self.la.model)
        try:
            positions = Positions.of(f, self.la.class_dim)
            labels, kept = labelled_rows(positions, batch, likelihood, f.device)
            f = positions.rows(f) if kept is None else positions.rows(f)[kept]
            targets = checked(f, labels, likelihood)
        except InputError as error:
            hint = "" if f.detach().isfinite().all() else " " + _DIVERGED
            raise InputError(f"epoch {len(self.losses) + 1}, batch {batch.index}: {error}{hint}") from None
        return targets.total(likelihood.log_prob(f, targets.y, sigma.to(f))) / positions.n

    def _where(self) -> dict[str, Any]:
        """Return weights and hyperparameters."""
        own = self.la.prior.detached().hyperparameters
        values = own if isinstance(self.la.prior, GaussianPrior) else {"prior": own}
        return {"model": self.la.model.state_dict(), **values, "sigma": self.la.sigma_noise.detach()}

    def _go_to(self, where: Mapping[str, Any]) -> None:
        self.la.model.load_state_dict(where["model"])
        self.la.prior, self.la.sigma_noise = self._prior(where), where["sigma"]

    def _prior(self, where: Mapping[str, Any]) -> Prior:
        values = {"precision": where["precision"]} if isinstance(self.la.prior, GaussianPrior) else where["prior"]
        return self.la.prior.with_hyperparameters(**values)

    def _state(self) -> dict[str, Any]:
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        found = {"margliks": self.margliks, "losses": self.losses, "best": self.best}
        return {**self._where(), "optimizer": self.optimizer.state_dict(), "scheduler": scheduler, **found}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._go_to(state)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.margliks, self.losses, self.best = list(state["margliks"]), list(state["losses"]), state["best"]

    def _require_whole(self, state: Mapping[str, Any], layout: Layout, path: Any) -> None:
        """Refuse a state that training cannot continue from, before any of it is used."""
        try:
            own = self.la.model.state_dict()
            for where in (state, *([state["best"]] if state["best"] is not None else [])):
                require_alike(where["model"], own, "the network")
                self._prior(where).check(layout, self.la.structure.takes)
                if positive(where["sigma"], "sigma").shape != self.la.sigma_noise.shape:
                    raise InputError(f"sigma is {where['sigma']}")
            for key in ("losses", "margliks"):
                if not isinstance(state[key], list) or not all(isinstance(v, float) for v in state[key]):
                    raise InputError(f"{key} are not a list of numbers")
            self._try(state["optimizer"], state["scheduler"])
        except Exception as error:  # a file that was made by hand
            raise files.damaged(path, error if isinstance(error, LaplaceError) else repr(error)) from error

    def _try(self, of_optimizer: Any, of_scheduler: Any) -> None:
        """Take a step on copies, because optimizers check their state only when they use it."""
        optimizer, scheduler = copy.deepcopy((self.optimizer, self.scheduler))
        optimizer.load_state_dict(copy.deepcopy(of_optimizer))  # a copy: it writes to the tensors that it gets
        if scheduler is not None:
            scheduler.load_state_dict(copy.deepcopy(of_scheduler))
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if not all(p.isfinite().all() for group in optimizer.param_groups for p in group["params"]):
            raise InputError("a step of the optimizer leads to weights that are NaN or infinite")

    def _settings(self, layout: Layout, keep_best: bool) -> dict[str, Any]:
        """Return what must be equal for a training to continue."""
        la, tuning = self.la, self.tuning
        return {
            "likelihood": la.likelihood.described,
            "hessian_structure": la.structure.described,
            "curvature": la.runner.spec.estimator.name,
            "weights": list(layout.names),
            "examples": self.data.n,
            "optimizer_cls": type(self.optimizer).__name__,
            "scheduler_cls": None if self.scheduler is None else type(self.scheduler).__name__,
            "prior_structure": tuning.groups,
            "marglik_frequency": tuning.frequency,
            "n_epochs_burnin": tuning.burnin,
            "temperature": la.temperature,
            "n_hypersteps": tuning.max_steps,
            "reach": tuning.reach,
            "keep_best": keep_best,
            **({} if isinstance(la.prior, GaussianPrior) else {"prior": la.prior.described}),
            **self.compared,
        }


def _checked_prior_structure(groups: Any, la: Laplace) -> str:
    """Return the prior structure. Refuse one that the posterior's structure cannot use."""
    groups = choice(groups, ("scalar", "layerwise", "diag"), "prior_structure")
    if groups == "diag" and not isinstance(la.prior, GaussianPrior):
        raise UnsupportedError(
            f"prior_structure='diag' is a precision per weight; {la.prior} has none. Take 'scalar' or 'layerwise'."
        )
    if groups not in la.structure.prior_structures:
        raise UnsupportedError(
            f"{la.structure.name} cannot use prior_structure={groups!r}. Take 'scalar' or 'layerwise', or "
            f"hessian_structure={per_weight()}."
        )
    return groups


def _listed(value: Any) -> Any:
    """Return numbers in the form in which a checkpoint compares them."""
    return torch.as_tensor(float(value) if isinstance(value, int) else value).tolist()


def _comparable(options: Mapping[str, Any] | None, of: str) -> dict[str, Any]:
    """Return the options that a checkpoint can compare: numbers, words, and lists of them."""
    plain = (bool, int, float, str, type(None))
    listed = {key: list(v) if isinstance(v, (tuple, list)) else v for key, v in dict(options or {}).items()}
    return {
        f"{key} of the {of}": v
        for key, v in listed.items()
        if isinstance(v, plain) or (isinstance(v, list) and all(isinstance(item, plain) for item in v))
    }


def _without_decay(options: Mapping[str, Any] | None) -> dict[str, Any]:
    options = dict(options or {})
    if options.pop("weight_decay", 0):
        warn("weight_decay is left out: the prior already decays the weights here, and the evidence tunes it.")
    return options
