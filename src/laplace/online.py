"""Online evidence: the network is trained, and its prior and noise are tuned by the evidence while it is.

Each epoch takes steps down the negative log joint, - (1/T) log p(D given theta) - log p(theta), at the current prior
and noise; every few epochs a Laplace approximation is fitted at the current weights, and prior and noise move towards
the optimum of its evidence (Immer et al. 2021, the paper's algorithm "Online Laplace").
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from tqdm.auto import tqdm

from laplace.batches import Batch, Keys, device_of, training_batches
from laplace.checkpoints import training as files
from laplace.checks import choice, generator_or_none, positive, whole_number
from laplace.counting import checked, labelled_rows
from laplace.curved_prior import CurvedPrior, vector_of
from laplace.errors import CheckpointError, InputError, NumericalError, OptionError, UnsupportedError, warn
from laplace.laplace import Laplace
from laplace.likelihoods import Likelihood
from laplace.positions import Positions
from laplace.structures import per_weight
from laplace.tuning.evidence import climb
from laplace.tuning.space import Space
from laplace.weights.layout import Layout

_DIVERGED = "Has training diverged? Take a smaller learning rate, as in optimizer_kwargs={'lr': 1e-3}."


def marglik_training(
    model: nn.Module,
    train_loader: Iterable[Any],
    likelihood: Likelihood | str = "classification",
    hessian_structure: str = "kron",
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
    subset_of_weights: Any = "all",
    curvature: str | None = None,
    prior: CurvedPrior | None = None,
    keep_best: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> tuple[Laplace, nn.Module, list[float], list[float]]:
    """Train `model` in place, and tune prior precision and noise by the evidence on the way.

    Every `marglik_frequency` epochs after the first `n_epochs_burnin`, Newton's method finds the best prior precision
    and noise in at most `n_hypersteps` steps; they move there, but in the logarithm by no more than
    `lr_hyp * n_hypersteps`, as far as so many steps of Adam would.

    Args:
        model: the network; all weights that require grad are trained.
        train_loader: batches, as `Laplace.fit` takes them; read once an epoch, and once each time for the evidence.
        likelihood: as of `Laplace`.
        hessian_structure: as of `Laplace`.
        backend: a backend class of laplace-torch, understood as the curvature that it stands for.
        optimizer_cls: makes the optimizer of the weights.
        optimizer_kwargs: its options; a `weight_decay` is not passed on, with a warning: the prior is the decay.
        scheduler_cls: makes a scheduler, which takes a step after each batch.
        scheduler_kwargs: its options.
        n_epochs: runs over the data.
        lr_hyp: see above.
        prior_structure: 'scalar', 'layerwise' or 'diag'.
        n_epochs_burnin: see above.
        n_hypersteps: see above.
        marglik_frequency: see above.
        prior_prec_init: the prior precision to start with.
        sigma_noise_init: the noise of a regression to start with.
        temperature: as of `Laplace`.
        fix_sigma_noise: leave the noise where it starts.
        progress_bar: whether one is shown.
        enable_backprop: as of `Laplace`.
        dict_key_x: as of `Laplace`.
        dict_key_y: as of `Laplace`.
        subset_of_weights: which weights have a prior and a posterior.
        curvature: as of `Laplace`.
        prior: what earlier tasks left; training starts from its precision, and `prior_prec_init` may not be given.
        keep_best: end with the weights of the highest evidence instead of the last ones.
        checkpoint: a file that is written after each epoch; where it exists, the same call goes on from it. Other
            settings are refused; of the data the number of examples is compared.
        generator: what curvature 'mc' and 'sketch' draw from.
        **options: further ones of `Laplace`.

    Returns:
        The posterior at the trained weights, the network, the log evidences (one each time that it was looked at,
            larger is better) and the epochs' losses (the negative log joint per example).

    Raises:
        OptionError: an option that does not exist, or a value outside its range.
        InputError: data that does not fit, or that can be read once only.
        CheckpointError: a file `checkpoint` of another training.
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
    tuning = _Tuning(
        _served(prior_structure, la),
        not fix_sigma_noise and la.likelihood.has_noise,
        whole_number(n_hypersteps, "n_hypersteps"),
        float(positive(lr_hyp, "lr_hyp")) * n_hypersteps,
        whole_number(marglik_frequency, "marglik_frequency"),
        whole_number(n_epochs_burnin, "n_epochs_burnin", 0),
    )
    if isinstance(train_loader, Iterator):
        raise InputError(
            f"training reads the data once an epoch, and a {type(train_loader).__name__} can be read once. Give a "
            "DataLoader or a list of batches."
        )
    if scheduler_cls is torch.optim.lr_scheduler.ReduceLROnPlateau:
        raise OptionError(
            "scheduler_cls=ReduceLROnPlateau waits for a loss; here a scheduler takes a step after each batch, without "
            "one. Take another, such as CosineAnnealingLR with T_max= the number of batches in all epochs."
        )
    if not any(map(tuning.is_due, range(1, whole_number(n_epochs, "n_epochs") + 1))):
        warn(
            f"the evidence is never looked at: {n_epochs} epochs with n_epochs_burnin={tuning.burnin} and "
            f"marglik_frequency={tuning.frequency}. Prior and noise stay where they start."
        )
    optimizer = optimizer_cls((p for p in model.parameters() if p.requires_grad), **_without_decay(optimizer_kwargs))
    scheduler = scheduler_cls(optimizer, **dict(scheduler_kwargs or {})) if scheduler_cls is not None else None
    data = _Data(train_loader, model, la._keys)
    told = _told(optimizer_kwargs, "optimizer") | _told(scheduler_kwargs, "scheduler")
    told |= {"prior_prec_init": torch.as_tensor(prior_prec_init).tolist(), "fix_sigma_noise": bool(fix_sigma_noise)}
    told |= {"sigma_noise_init": torch.as_tensor(sigma_noise_init).tolist()}
    training = _Training(la, data, optimizer, scheduler, tuning, generator_or_none(generator), told)
    was_training = model.training
    try:
        training.run(whole_number(n_epochs, "n_epochs"), checkpoint, progress_bar, keep_best)
    finally:
        model.train(was_training)
    la.fit(train_loader, generator=generator)
    return la, model, training.margliks, training.losses


@dataclass(frozen=True)
class _Tuning:
    """How and when the hyperparameters move."""

    groups: str
    noise: bool
    max_steps: int
    reach: float  # in the logarithm
    frequency: int
    burnin: int

    def is_due(self, epoch: int) -> bool:
        """Whether they move after this epoch, counted from 1."""
        return epoch > self.burnin and epoch % self.frequency == 0

    def move(self, la: Laplace) -> float:
        """Towards the optimum of the evidence; returns the log evidence there."""
        with torch.no_grad():
            space = Space(la.posterior.detached(), self.groups, self.noise)
            found = climb(space, space.start(la.prior_precision.detach()), self.max_steps, self.reach)
            la.prior_precision, la.sigma_noise = found.prior.precision, found.sigma
            return float(la.posterior.log_evidence)


class _Data:
    """The training data: its batches and how many examples there are, counted by reading it once."""

    def __init__(self, loader: Iterable[Any], model: nn.Module, keys: Keys) -> None:
        self.loader, self.model, self.keys = loader, model, keys
        self.n, self.first = 0, None
        for batch in self:
            self.first = self.first or batch.inputs
            self.n += len(batch.y)
        if self.first is None:
            raise InputError("the training loader gave no example. A loader yields batches (x, y) with at least one.")

    def __iter__(self) -> Iterator[Batch]:
        return training_batches(self.loader, self.model, self.keys, False, "train")


@dataclass
class _Training:
    """All that changes from epoch to epoch."""

    la: Laplace
    data: _Data
    optimizer: Optimizer
    scheduler: Any
    tuning: _Tuning
    generator: torch.Generator | None
    told: Mapping[str, Any]  # what else the user said
    margliks: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    best: dict[str, Any] | None = None

    def run(self, n_epochs: int, checkpoint: Any, progress_bar: bool, keep_best: bool) -> None:
        """The epochs that are left, and the weights and hyperparameters that are kept of them."""
        assert self.data.first is not None
        layout = self.la._find_weights(self.data.first, keep=False).layout
        self.la.prior.check(layout, self.la.structure.prior_structures)
        generators = files.generators_of(self.data.loader, self.generator)
        settings = self._settings(layout, keep_best)
        if checkpoint is not None:
            state = files.load(checkpoint, settings, device_of(self.la.model))
            if state is not None:
                if len(state["losses"]) > n_epochs:
                    raise CheckpointError(
                        f"checkpoint={str(checkpoint)!r} has {len(state['losses'])} epochs behind it; "
                        f"n_epochs={n_epochs} is fewer. Give as many or more, or another file."
                    )
                self._restore(state)
                files.set_random_state(state["random"], generators)
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
        """The posterior at the current weights."""
        try:
            self.la.fit(self.data.loader, generator=self.generator)
        except NumericalError as error:
            raise NumericalError(f"after epoch {len(self.losses)}: {error} {_DIVERGED}") from error

    def _epoch(self, layout: Layout) -> float:
        """One run over the data; returns the negative log joint per example, as it was on the way."""
        la, total = self.la, 0.0
        prior, sigma = la.prior.detached(), la._sigma.detach()
        unit = la.likelihood.curvature_scale("ggn", sigma) / la.temperature  # so that the step size means the same
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
                loss = loss + 0.5 * prior.scatter(vector_of(la.model, layout), layout).to(loss) / self.data.n
                (loss / unit.to(loss)).backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            total += float(loss.detach()) * len(batch.y)
        return total / self.data.n

    def _log_likelihood(self, batch: Batch, sigma: Tensor) -> Tensor:
        """log p(y given f), the mean over a batch."""
        likelihood, f = self.la.likelihood, batch.inputs.call(self.la.model)
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
        """Weights and hyperparameters."""
        hyperparameters = {"precision": self.la.prior_precision.detach(), "sigma": self.la.sigma_noise.detach()}
        return {"model": self.la.model.state_dict(), **hyperparameters}

    def _go_to(self, where: Mapping[str, Any]) -> None:
        self.la.model.load_state_dict(where["model"])
        self.la.prior_precision, self.la.sigma_noise = where["precision"], where["sigma"]

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

    def _settings(self, layout: Layout, keep_best: bool) -> dict[str, Any]:
        """What must be the same for a training to go on."""
        la, tuning = self.la, self.tuning
        return {
            "likelihood": la.likelihood.described,
            "hessian_structure": la.structure.described,
            "curvature": la.curvature,
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
            **self.told,
        }


def _served(groups: Any, la: Laplace) -> str:
    """The prior structure, if the structure can take it."""
    groups = choice(groups, ("scalar", "layerwise", "diag"), "prior_structure")
    if groups not in la.structure.prior_structures:
        raise UnsupportedError(
            f"{la.structure.name} has no form for prior_structure={groups!r}. Take 'scalar' or 'layerwise', or "
            f"hessian_structure={per_weight()}."
        )
    return groups


def _told(options: Mapping[str, Any] | None, of: str) -> dict[str, Any]:
    """Those options that can be compared when a training goes on: numbers, words, and lists of them."""
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
        warn("weight_decay is left out: the prior is what decays the weights here, and the evidence tunes it.")
    return options
