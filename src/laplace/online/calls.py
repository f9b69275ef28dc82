"""Online evidence: tune prior and noise by the evidence while the network is trained.

Each epoch takes steps down the negative log joint, - (1/T) log p(D given theta) - log p(theta), at the current prior
and noise. Every few epochs a Laplace approximation is fitted at the current weights, and prior and noise move towards
the optimum of its evidence (Immer et al. 2021, the paper's algorithm "Online Laplace"). Or they move at every few
batches, by running averages of the same sums (running.py) or by a lower bound of the evidence (bound.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from laplace.checks import choice, flag, flag_or_none, generator_or_none, one_positive, path_of, shown, whole_number
from laplace.curvature import Estimator
from laplace.distributed import OWN, Group, reduce_over
from laplace.distributed.groups import PIECES
from laplace.distributed.together import jointly
from laplace.errors import InputError, OptionError, UnsupportedError, warn
from laplace.inference.settings import require_same_settings
from laplace.inference.shared import divided, require_same_values
from laplace.keywords import refuse_unknown_keywords
from laplace.laplace import Laplace
from laplace.likelihoods import Likelihood
from laplace.online.bound import Bound
from laplace.online.running import Running
from laplace.online.schedule import Epochs, Schedule
from laplace.online.training import Training, TrainingData
from laplace.priors import Prior
from laplace.priors.gaussian import GaussianPrior
from laplace.spec import TrainingOptions
from laplace.structures import Structure, per_weight
from laplace.weights import Subset

if TYPE_CHECKING:
    from typing_extensions import Unpack

SCHEDULES: dict[str, type[Schedule]] = {each.name: each for each in (Epochs, Running, Bound)}


@jointly("marglik_training")
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
    progress_bar: bool | None = None,
    enable_backprop: bool = False,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
    *,
    subset_of_weights: Subset | str | Sequence[str] | Callable[[str, nn.Parameter], bool] = "all",
    curvature: Estimator | str | None = None,
    evidence: str = "epochs",
    prior: Prior | None = None,
    keep_best: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    generator: torch.Generator | None = None,
    group: Group = OWN,
    **options: Unpack[TrainingOptions],
) -> tuple[Laplace, nn.Module, list[float], list[float]]:
    """Train `model` in place, and tune prior precision and noise by the evidence during training.

    The first `n_epochs_burnin` epochs only train. After them, every `marglik_frequency` epochs, Newton's method finds
    the best prior precision and noise in at most `n_hypersteps` steps. They move towards it, but their logarithms by no
    more than `lr_hyp * n_hypersteps`: as far as that many steps of Adam would move them.

    Args:
        model: The network. All weights that require grad are trained.
        train_loader: Batches, as `Laplace.fit` takes them. Read once per epoch, and once more whenever a posterior is
            fitted.
        likelihood: A likelihood object or name, as in `Laplace`.
        hessian_structure: The structure of the posterior, as in `Laplace`.
        backend: A backend class of laplace-torch; it selects the matching curvature.
        optimizer_cls: Makes the optimizer of the weights.
        optimizer_kwargs: Options of the optimizer. A `weight_decay` is dropped with a warning, because the prior
            already decays the weights.
        scheduler_cls: Makes a scheduler, which takes a step after each batch.
        scheduler_kwargs: Options of the scheduler.
        n_epochs: How many times training runs over the data.
        lr_hyp: Limits how far prior and noise move at a time; see above. With `evidence='bound'` it is Adam's step.
        prior_structure: 'scalar', 'layerwise' or 'diag': one prior precision for all weights, per parameter tensor, or
            per weight.
        n_epochs_burnin: How many epochs train before the evidence is first used.
        n_hypersteps: How many Newton steps are taken at most each time; see above.
        marglik_frequency: How many epochs lie between two uses of the evidence. Batches, unless `evidence='epochs'`.
        prior_prec_init: The prior precision to start with.
        sigma_noise_init: The noise to start with, for regression.
        temperature: The temperature of the likelihood, as in `Laplace`.
        fix_sigma_noise: Whether the noise stays at its start value.
        progress_bar: Whether to show a progress bar; None shows one in a terminal after a few seconds.
        enable_backprop: Whether gradients flow from predictions to the inputs, as in `Laplace`.
        dict_key_x: The key of the inputs in batches that are mappings, as in `Laplace`.
        dict_key_y: The key of the labels in batches that are mappings, as in `Laplace`.
        subset_of_weights: Which weights have a prior and a posterior.
        curvature: The curvature, as in `Laplace`.
        evidence: Which evidence tunes prior and noise. 'epochs': that of a posterior fitted to all data, after whole
            epochs. 'running': that of the same sums, averaged over the batches of about the last epoch; at rest it has
            the same optimum. 'bound': a lower bound of the evidence of `hessian_structure='full'`, estimated from one
            batch without bias, whatever the structure. It is tighter for larger batches, and exact for all data in one.
            `curvature='sketch'` makes it cheaper and looser: it sends back one vector per example.
        prior: A prior of `laplace.priors`, or the one from earlier tasks, `earlier.as_prior()`. Training starts from
            its values, so `prior_prec_init` must be left out.
        keep_best: Whether to end with the weights of the highest evidence instead of the last ones.
        checkpoint: A file that is written after each epoch. If it exists, the same call continues from it. Other
            settings are refused; for the data, only the number of examples is compared.
        generator: The random generator of curvature 'mc' and 'sketch'.
        group: The process group whose ranks train together, each on its own part of the data: gradients are averaged
            over the examples of all ranks (by `DistributedDataParallel`, if the network is in it), and the evidence is
            that of all data. None trains on this process alone.
        **options: Further options of `Laplace`: those of the structure, of the curvature and of the weights,
            `prior_mean`, `class_dim` and `memory_budget`.

    Returns:
        The posterior at the trained weights, the network, the log evidences (one for each time it was computed, or one
            per epoch if that is at every few batches; larger is better), and the loss of each epoch (the negative log
            joint per example).

    Raises:
        OptionError: an option is unknown, or a value is out of range.
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
    progress_bar = flag_or_none(progress_bar, "progress_bar")
    checkpoint = None if checkpoint is None else path_of(checkpoint, "checkpoint")
    make = SCHEDULES[choice(evidence, SCHEDULES, "evidence")]
    groups = _checked_prior_structure(prior_structure, la)
    make.require(la, groups)
    n_hypersteps, lr_hyp = whole_number(n_hypersteps, "n_hypersteps"), one_positive(lr_hyp, "lr_hyp")
    schedule = make(
        la,
        groups,
        not fix_sigma_noise and la.likelihood.has_noise,
        n_hypersteps,
        lr_hyp * (n_hypersteps if make is Epochs else 1),
        whole_number(marglik_frequency, "marglik_frequency"),
        whole_number(n_epochs_burnin, "n_epochs_burnin", 0),
        generator_or_none(generator),
    )
    if isinstance(train_loader, Iterator):
        raise InputError(
            f"training reads the data once per epoch, and a {type(train_loader).__name__} can be read only once. Give "
            "a DataLoader or a list of batches."
        )
    if la.runner.wrapped == PIECES:
        raise UnsupportedError(
            "marglik_training moves whole weights on every rank, and a network of fully_shard is in pieces. Train it "
            "in DistributedDataParallel; or with FSDP first, and write Laplace(model, ...).fit(loader, group=...)."
        )
    reduce = reduce_over(group, la.runner.spread, train_loader)
    if group is OWN:
        la.runner.notice_processes(training=True)
    _check_makers(optimizer_cls, optimizer_kwargs, scheduler_cls, scheduler_kwargs)
    n_epochs = whole_number(n_epochs, "n_epochs")
    if reduce.size > 1 and make is not Epochs:
        raise UnsupportedError(
            f"evidence={evidence!r} reads the batches of one process; group= has {reduce.size}. Take "
            "evidence='epochs', which is that of all data on all processes."
        )
    optimizer = optimizer_cls((p for p in model.parameters() if p.requires_grad), **_without_decay(optimizer_kwargs))
    scheduler = scheduler_cls(optimizer, **dict(scheduler_kwargs or {})) if scheduler_cls is not None else None
    was_training = model.training
    group = None if group is OWN else group
    with reduce.session():
        if reduce.size > 1:
            train_loader = divided(train_loader, reduce, la.runner).loader
            require_same_values(la.model, None, reduce)
            require_same_settings(la, reduce)
        data = TrainingData(train_loader, la, reduce)
        if not schedule.is_ever_due(n_epochs, data.batches):
            warn(
                f"the evidence is never computed: {n_epochs} epochs with n_epochs_burnin={schedule.burnin} and "
                f"marglik_frequency={schedule.frequency}. Prior and noise stay where they start."
            )
        compared = _comparable(optimizer_kwargs, "optimizer") | _comparable(scheduler_kwargs, "scheduler")
        compared |= {"prior_prec_init": _listed(prior_prec_init), "fix_sigma_noise": bool(fix_sigma_noise)}
        compared |= {"sigma_noise_init": _listed(sigma_noise_init)}
        network = la.model if la.runner.wrapped is None else model
        parts = (schedule, schedule.generator, compared, network, reduce, group)
        training = Training(la, data, optimizer, scheduler, *parts)
        try:
            training.run(n_epochs, checkpoint, progress_bar, keep_best)
        finally:
            model.train(was_training)
        training.fit()
    return la, model, training.margliks, training.losses


def _check_makers(
    optimizer_cls: object, optimizer_kwargs: object, scheduler_cls: object, scheduler_kwargs: object
) -> None:
    """Refuse wrong types of the optimizer's and scheduler's arguments, and a scheduler that needs a loss."""
    if scheduler_cls is torch.optim.lr_scheduler.ReduceLROnPlateau:
        raise OptionError(
            "scheduler_cls=ReduceLROnPlateau needs a loss; here a scheduler takes a step after each batch, without "
            "one. Take another, such as CosineAnnealingLR with T_max= the number of batches in all epochs."
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
