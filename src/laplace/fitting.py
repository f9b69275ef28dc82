"""One pass over the data: every batch is run through the network once, and leaves its sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from laplace.algebra import GramSum, Rows, gram, in_sums
from laplace.backprop.gradients import Forward, Moments
from laplace.batches import Batch, Inputs
from laplace.budget import Budget, in_bytes
from laplace.curvature import CURVATURES, OutputCurvature
from laplace.errors import FormChangedError, InputError
from laplace.gathering import Group, gathered
from laplace.likelihoods.base import Likelihood
from laplace.posterior import Fit
from laplace.structures import STRUCTURES, Pass, Structure, Sums
from laplace.weights.layout import Layout

_RESTARTS = 20  # readings of the data after which a network is given up that shows another side in every one
_HELD = 2**23  # numbers held back before their moments are taken


class Engine(Protocol):
    """What fitting and predicting need of a network: runs on batches."""

    linear: bool  # whether the outputs are linear in the weights

    def room(self) -> int:
        """Up to how many examples small batches are run together."""
        ...

    def chunks(self, inputs: Inputs, n_outputs: int) -> Iterator[Inputs]:
        """The inputs cut so that the gradients of so many vectors fit into memory."""
        ...

    def forward(self, inputs: Inputs, with_grad: bool = False) -> Forward:
        """Run the network."""
        ...


class Accumulator:
    """Sums of the curvature and of the log-likelihood, batch by batch."""

    def __init__(
        self,
        engine: Engine,
        likelihood: Likelihood,
        structure: Structure,
        layout: Layout,
        kind: str,
        samples: int,
        generator: torch.Generator | None,
        budget: Budget,
    ) -> None:
        self.engine, self.likelihood, self.structure, self.layout = engine, likelihood, structure, layout
        self.kind, self.samples, self.generator, self.budget = kind, samples, generator, budget
        self.sums: dict[str, Any] = {}  # of this run over the data
        self.totals: Sums = {}  # after all runs so far
        self.data: Sums = {}
        self.n_data = self.n_outputs = 0
        self._pending: list[Moments] = []
        self._held = 0
        self._like = torch.empty(0)  # of the outputs' dtype and device
        self.pass_: Pass = structure
        self._before: Sums = {}
        self._n_before = 0
        self._forms: list[str] = []
        self._restarts = 0
        self._state = None if generator is None else generator.get_state()
        self._compared = False  # whether joined batches were seen to give the outputs of single ones
        self._together = True  # until a network does not run on joined batches

    def run(self, batches: Iterable[Batch], again: Callable[[], Iterable[Batch]] | None) -> None:
        """Run over all batches, and over those of `again` as often as the structure asks for."""
        while True:
            try:
                self._add(batches)
                break
            except FormChangedError:  # a later batch showed more of the network: count anew, knowing that
                self._restarts += 1
                if again is None or self._restarts > _RESTARTS:
                    raise
                self.sums, self.data, self.n_data, self._pending, self._held = {}, {}, 0, [], 0
                self._restore_generator()
                batches = again()
        self._finish()
        dtype = self._like.dtype
        while (further := self.structure.further(self.totals, self.layout, dtype)) is not None:
            assert again is not None
            self._rewind(further)
            self._add(again())
            if self.n_data != self._n_before:
                raise InputError(
                    f"the training loader gave {self._n_before} examples at first and {self.n_data} when read again; "
                    f"hessian_structure={self.structure.name!r} needs the same ones. Leave out samplers that vary."
                )
            self._finish()

    def _rewind(self, further: Pass) -> None:
        """Count the same data once more, with the same draws, for another run's sums."""
        self.pass_, self._before, self._n_before = further, self.totals, self.n_data
        self.sums, self.data, self.n_data = {}, {}, 0
        self._restore_generator()

    def _restore_generator(self) -> None:
        if self.generator is not None and self._state is not None:
            self.generator.set_state(self._state)

    def _finish(self) -> None:
        """Make of the run over the data what the structure makes of it."""
        if not self.data:
            raise InputError("no label counts: every one is masked, or -100.")
        with torch.no_grad():
            self._take()
            found = {key: _tensor(value, self._like) for key, value in self.sums.items()}
            self.totals = self.pass_.finish(self._before, found)

    def _add(self, batches: Iterable[Batch]) -> None:
        """Run all batches, small ones together, and add what they leave."""
        for group in gathered(batches, lambda: self.engine.room() if self.n_data and self._together else 0):
            if isinstance(group, Batch):
                self._count(group.inputs, *self._run(group))
                continue
            run = self._run_as_one(group)
            if run is not None:
                self._count(group.joined().inputs, *run)
                continue
            for batch in group.batches():  # one by one: either it runs, or the error names its batch
                self._count(batch.inputs, *self._run(batch))

    def _run_as_one(self, group: Group) -> tuple[Forward, Tensor] | None:
        """None where the network does not run on joined batches, or gives other outputs there; then none are joined."""
        run = None
        try:
            run = self._run(group.joined())
            if not self._compared:
                self._compared = True
                alone = self._run(group.batches()[0])[0].outputs
                self._together = _alike(run[0].outputs[: len(alone)], alone)
        except Exception:
            self._together = False
        return run if self._together else None

    def _run(self, batch: Batch) -> tuple[Forward, Tensor]:
        """Run a batch; what is refused is refused here, before anything is added."""
        try:
            forward, y = counted(self.engine.forward(batch.inputs), batch, self.likelihood)
        except InputError as error:
            raise InputError(f"batch {batch.index}: {error}") from None
        f = forward.outputs
        if self.n_outputs not in (0, f.shape[1]):
            raise InputError(
                f"batch {batch.index}: the network has {f.shape[1]} outputs here and had {self.n_outputs} before."
            )
        return forward, y

    def _count(self, inputs: Inputs, forward: Forward, y: Tensor) -> None:
        f = forward.outputs
        self._like = f[:0]
        if len(f):
            with torch.no_grad():
                self._keep(inputs, forward, y)
                _add(self.data, self.likelihood.sums(f, y))
        self.n_data, self.n_outputs = self.n_data + forward.positions.n, f.shape[1]

    def _keep(self, inputs: Inputs, forward: Forward, y: Tensor) -> None:
        """What the structure keeps of a batch: its moments, taken now or with those of the next ones."""
        for moments in self._moments(forward, y):
            self._pending.append(moments)
            self._held += moments.held
            if self._held > _HELD:
                self._take()

    def fit(self, mean: Tensor) -> Fit:
        """What has been added, at the weights `mean`."""
        counts = (self.n_data, self.n_outputs)
        parts = (self.structure, self.likelihood, self.kind, self.layout, mean, self.totals, self.data)
        return Fit(*parts, *counts, linear=self.engine.linear)

    def _moments(self, forward: Forward, y: Tensor) -> Iterator[Moments]:
        if self.kind == "hessian":
            exact = forward.hessian(lambda f: -self.likelihood.log_prob(f, y).sum())
            if exact is not None:
                yield exact
                return
        yield from forward.moments(self._curvature(forward, y))

    def _curvature(self, forward: Forward, y: Tensor) -> OutputCurvature:
        return CURVATURES[self.kind](self.likelihood, forward.outputs, y, self.samples, self.generator)

    def _take(self) -> None:
        """Take the moments of the batches that were held back: one large product instead of many small ones."""
        if self._pending:
            first, *others = self._pending
            self._notice_forms(first)
            if not self.sums and not self._before:
                self._require_memory(first, self._like)
            _add(self.sums, self.pass_.sums(first.merged(others) if others else first, self.layout))
            self._pending, self._held = [], 0

    def _notice_forms(self, moments: Moments) -> None:
        """A tensor whose gradients are outer products in one batch and not in another has no common sums."""
        forms = [m.form for m in moments.parameters]
        if self._forms and forms != self._forms:
            changed = [name for name, a, b in zip(self.layout.names, self._forms, forms, strict=True) if a != b]
            self._forms = forms
            raise FormChangedError(
                f"a later batch used {', '.join(changed[:3])} in another way than the first (examples without a fixed "
                "number of rows?), and this loader can be read once. Give a DataLoader or a list of batches."
            )
        self._forms = forms

    def _require_memory(self, moments: Moments, like: Tensor) -> None:
        """Refuse a structure that cannot fit, with those that would."""
        needed = self.structure.memory(moments, self.layout, like.element_size())
        if self.budget.has(needed, like.device):
            return
        able = {name: make for name, make in STRUCTURES.items() if make.scattered or not self.layout.scattered}
        others = {name: make().memory(moments, self.layout, like.element_size()) for name, make in able.items()}
        fitting = [f"{name!r} ({in_bytes(n)})" for name, n in others.items() if self.budget.has(n, like.device)]
        self.budget.refuse(
            needed,
            like.device,
            f"hessian_structure={self.structure.name!r} of {self.layout.n_params:,} weights",
            f"What would fit: {', '.join(fitting) or 'no structure; take fewer weights'}.",
        )


def _alike(f: Tensor, other: Tensor) -> bool:
    """Equal up to rounding."""
    return f.shape == other.shape and bool((f - other).abs().max() <= torch.finfo(f.dtype).eps ** 0.5 * f.abs().max())


def counted(forward: Forward, batch: Batch, likelihood: Likelihood) -> tuple[Forward, Tensor]:
    """A run and its labels without what is masked, both checked."""
    y, kept = forward.positions.labels(batch.y.to(forward.outputs.device), batch.mask)
    forward = forward if kept is None else forward.counting(kept)
    likelihood.check_outputs(forward.outputs)
    check_finite(forward.outputs, "the network's outputs hold")
    return forward, likelihood.check_targets(forward.outputs, y) if len(y) else y


def check_finite(f: Tensor, what: str) -> None:
    """Refuse NaN and infinity."""
    if not f.sum().isfinite() and not f.isfinite().all():
        rows = (~f.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        raise InputError(
            f"{what} NaN or infinite values for {len(rows)} examples, the first is number {rows[0]} of the batch."
        )


def _add(total: dict[str, Any], part: Mapping[str, Tensor | Rows | float]) -> None:
    for key, value in part.items():
        so_far = total.get(key)
        if isinstance(value, Rows) and isinstance(so_far, Tensor):
            value = gram(value.rows).unsqueeze(0)  # a batch with one position after others with several
        if so_far is None and isinstance(value, Rows):
            total[key] = so_far = GramSum()
        if isinstance(so_far, GramSum):
            if isinstance(value, Rows):
                so_far.add(value.rows)
            elif isinstance(value, Tensor):
                so_far.add_gram(value.squeeze(0))
        elif so_far is None:
            total[key] = in_sums(value).clone() if isinstance(value, Tensor) else value
        else:
            total[key] += value


def _tensor(total: Tensor | GramSum | float, like: Tensor) -> Tensor:
    if isinstance(total, GramSum):
        return total.flush().unsqueeze(0)
    return total if isinstance(total, Tensor) else torch.tensor(total, dtype=torch.float64, device=like.device)
