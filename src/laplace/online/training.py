"""Train a network while a schedule moves prior and noise. The state can be saved and restored."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laplace.checkpoints import training as files
from laplace.checks import how_many, positive
from laplace.distributed import Reduce, alone
from laplace.distributed.shards import samplers_of
from laplace.errors import CheckpointError, InputError, LaplaceError, NumericalError, within
from laplace.inference.targets import checked, labelled_rows
from laplace.laplace import Laplace
from laplace.network.batches import Batch, device_of, on_device
from laplace.network.inputs import Inputs
from laplace.network.progress import bar
from laplace.online.gradients import send_back
from laplace.online.schedule import Schedule
from laplace.posterior.schema import require_alike
from laplace.posterior.task_prior import vector_of
from laplace.predictive.positions import Positions
from laplace.priors import Prior
from laplace.priors.gaussian import GaussianPrior
from laplace.weights.layout import Layout

_DIVERGED = "Has training diverged? Take a smaller learning rate, as in optimizer_kwargs={'lr': 1e-3}."


class TrainingData:
    """Holds the training data. Reads it once to count the examples, those of all ranks."""

    def __init__(self, loader: Iterable[Any], la: Laplace, reduce: Reduce = alone) -> None:
        self.loader, self.la = loader, la
        self.spare: Batch | None = None  # what a rank runs while others have more batches
        self.batches = 0  # in one epoch of this rank
        counts = reduce.agree(self._count)
        self.n = sum(counts)
        if not self.n:
            raise InputError("the training loader gave no example. It must yield batches (x, y), at least one.")
        self.source = next(rank for rank, count in enumerate(counts) if count)  # the first rank that has data
        if not all(counts):
            own = self.spare if reduce.rank == self.source else None
            first = reduce.share(self.source, None if own is None else on_device(own, torch.device("cpu")))
            assert first is not None
            self.spare = self.spare or on_device(first, device_of(la.model))

    def _count(self) -> int:
        n = 0
        for batch in self:
            if self.spare is None:
                self.spare = replace(batch, inputs=batch.inputs.copied())
            n += len(batch.y)
            self.batches += 1
        return n

    @property
    def first(self) -> Inputs:
        """Return the inputs of the first batch."""
        assert self.spare is not None
        return self.spare.inputs

    def begin(self, epoch: int) -> None:
        """Tell samplers that shuffle the number of the epoch, so that each has an order of its own."""
        for sampler in samplers_of(self.loader):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        return self.la.runner.batches(self.loader, False, "train")


@dataclass
class Training:
    """Holds everything that changes from epoch to epoch."""

    la: Laplace
    data: TrainingData
    optimizer: Optimizer
    scheduler: Any
    schedule: Schedule
    generator: torch.Generator | None
    compared: Mapping[str, Any]  # the user's other settings, to compare with a checkpoint's
    network: nn.Module  # what is called: the network, or the wrapper that adds its gradients over ranks
    reduce: Reduce = alone
    group: Any = None
    margliks: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    best: dict[str, Any] | None = None

    def run(self, n_epochs: int, checkpoint: Any, progress_bar: bool | None, keep_best: bool) -> None:
        """Run the remaining epochs, and keep the last or the best weights and hyperparameters."""
        layout = self.la.runner.find_weights(self.data.first).layout
        self.la.prior.check(layout, self.la.structure.takes)
        generators = files.generators_of(self.data.loader, self.generator)
        settings = self._settings(layout, keep_best)
        if checkpoint is not None:
            state = files.load(checkpoint, settings, device_of(self.la.model))
            self._require_same_epoch(state, checkpoint)
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
                self._restore(state, layout)
        with bar(progress_bar, total=n_epochs, initial=len(self.losses), unit="epoch") as progress:
            while len(self.losses) < n_epochs:
                self.losses.append(self._epoch(layout))
                evidence = self.schedule.after_epoch(len(self.losses), self.fit)
                if evidence is not None:
                    self.margliks.append(evidence)
                    if keep_best and self.margliks[-1] == max(self.margliks):
                        self.best = copy.deepcopy(self._where())
                if checkpoint is not None and self.reduce.rank == 0:
                    state = self._state() | {"settings": settings, "random": files.random_state(generators)}
                    files.save(state, checkpoint)
                shown = {"loss": self.losses, "evidence": self.margliks}
                progress.set_postfix({key: values[-1] for key, values in shown.items() if values}, refresh=False)
                progress.update()
        if self.best is not None:
            self._go_to(self.best)

    def fit(self) -> None:
        """Fit the posterior at the current weights."""
        self._share_buffers()
        try:
            self.la.fit(self.data.loader, generator=self.generator, group=self.group)
        except NumericalError as error:
            raise NumericalError(f"after epoch {len(self.losses)}: {error} {_DIVERGED}") from error

    def _epoch(self, layout: Layout) -> float:
        """Run one epoch, and return the negative log joint per example, averaged over its batches."""
        la, total = self.la, 0.0
        prior, sigma, unit = self._terms()
        self.data.begin(len(self.losses))
        self.network.train()
        for batch, n, everywhere in self._steps():
            if self._moved(batch):
                prior, sigma, unit = self._terms()
            self.optimizer.zero_grad()
            with torch.inference_mode(False), torch.enable_grad():
                loss = self._together(batch, sigma)
                penalty = prior.penalty(vector_of(la.model, layout), layout).to(loss) / self.data.n
                share = n * self.reduce.size / everywhere  # the mean over ranks is then that over their examples
                objective = (share * loss + penalty) / unit.to(loss)
                where = f"epoch {len(self.losses) + 1}, batch {batch.index}"
                send_back(objective, la.model, self.network, self.reduce, where)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            total += float(loss.detach() + penalty.detach()) * n
        return sum(self.reduce.agree(lambda: total)) / self.data.n

    def _terms(self) -> tuple[Prior, Tensor, Tensor]:
        """Return prior and noise, and the scale of the loss.

        The loss is divided by it, so that a learning rate means the same for every noise and temperature.
        """
        prior, sigma = self.la.prior.detached(), self.la.noise_level.detach()
        return prior, sigma, self.la.likelihood.curvature_scale("ggn", sigma) / self.la.temperature

    def _moved(self, batch: Batch) -> bool:
        """Let the schedule move prior and noise before this batch. Return whether it did."""
        epoch = len(self.losses) + 1
        try:
            return self.schedule.before_batch(batch, epoch, self.data.n)
        except (InputError, NumericalError) as error:
            where = f"epoch {epoch}, batch {batch.index}: "
            fine = isinstance(error, InputError) and all(p.isfinite().all() for p in self.la.model.parameters())
            hint = "" if fine else " " + _DIVERGED
            raise type(error)(where + str(error).removeprefix(f"batch {batch.index}: ") + hint) from error

    def _steps(self) -> Iterator[tuple[Batch, int, int]]:
        """Yield batches, with their size and that on all ranks. A rank without more runs a spare one that counts 0."""
        unread = iter(self.data)
        while True:
            read: list[Batch | None] = []

            def count(read: list[Batch | None] = read) -> int:
                read.append(next(unread, None))
                return 0 if read[0] is None else len(read[0].y)

            counts = self.reduce.agree(count)
            if not sum(counts):
                return
            batch = read[0] or self.data.spare
            assert batch is not None
            yield batch, counts[self.reduce.rank], sum(counts)

    def _together(self, batch: Batch, sigma: Tensor) -> Tensor:
        """Return the loss of a batch. A rank that cannot compute it tells the others, before they wait for it."""
        found: list[Tensor] = []

        def compute() -> None:
            loss = -self._log_likelihood(batch, sigma) / self.la.temperature
            if not loss.detach().isfinite():
                raise NumericalError(
                    f"epoch {len(self.losses) + 1}, batch {batch.index}: the loss is {float(loss.detach())}. "
                    + _DIVERGED
                )
            found.append(loss)

        self.reduce.agree(compute)
        return found[0]

    def _share_buffers(self) -> None:
        """Give all ranks the buffers of the first that has data: running statistics are of a rank's own batches."""
        buffers = [*self.la.model.buffers()]
        if self.reduce.size > 1 and buffers:
            of_first = self.reduce.share(self.data.source, [b.cpu() for b in buffers])
            for own, first in zip(buffers, of_first, strict=True):
                own.copy_(first)

    def _log_likelihood(self, batch: Batch, sigma: Tensor) -> Tensor:
        """Return log p(y given f), the mean over a batch."""
        likelihood = self.la.likelihood
        with within(f"epoch {len(self.losses) + 1}, batch {batch.index}"):
            f = batch.inputs.call(self.network)
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
        found["schedule"] = self.schedule.state()
        return {**self._where(), "optimizer": self.optimizer.state_dict(), "scheduler": scheduler, **found}

    def _restore(self, state: Mapping[str, Any], layout: Layout) -> None:
        self._go_to(state)
        self.schedule.restore(state.get("schedule", {}), layout)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.margliks, self.losses, self.best = list(state["margliks"]), list(state["losses"]), state["best"]

    def _require_same_epoch(self, state: Mapping[str, Any] | None, path: Any) -> None:
        """Refuse ranks that find different files: the first rank writes one, which all must be able to read."""
        there = self.reduce.agree(lambda: None if state is None else len(state["losses"]))
        if len(set(there)) > 1:
            found = ["no file" if n is None else f"one of {how_many(n, 'epoch')}" for n in there]
            told = ", ".join(f"rank {rank} finds {what}" for rank, what in enumerate(found))
            raise CheckpointError(
                f"checkpoint={str(path)!r}: {told}. The first rank writes it, and all read it: give a path on a disk "
                "that all ranks share, or copy the file to each machine."
            )

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
            copy.copy(self.schedule).restore(state.get("schedule", {}), layout)
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
        la, schedule = self.la, self.schedule
        return {
            "likelihood": la.likelihood.described,
            "hessian_structure": la.structure.described,
            "curvature": la.runner.spec.estimator.name,
            "weights": list(layout.names),
            "examples": self.data.n,
            "optimizer_cls": type(self.optimizer).__name__,
            "scheduler_cls": None if self.scheduler is None else type(self.scheduler).__name__,
            "evidence": schedule.name,
            "prior_structure": schedule.groups,
            "marglik_frequency": schedule.frequency,
            "n_epochs_burnin": schedule.burnin,
            "temperature": la.temperature,
            "n_hypersteps": schedule.max_steps,
            "reach": schedule.reach,
            "keep_best": keep_best,
            "ranks": self.reduce.size,
            **({} if isinstance(la.prior, GaussianPrior) else {"prior": la.prior.described}),
            **self.compared,
        }
