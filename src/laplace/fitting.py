"""The runs over the data: every batch is run through the network, once in each, and leaves its sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from laplace.algebra import GramSum, Rows, gram, in_sums
from laplace.backprop.gradients import Engine, Forward, Moments
from laplace.batches import Batch, Inputs
from laplace.budget import Budget, in_bytes
from laplace.checkpoints.progress import Progress
from laplace.counting import counted
from laplace.curvature import CURVATURES, OutputCurvature
from laplace.errors import FormChangedError, InputError, ModelError, NumericalError, UnsupportedError, numbered
from laplace.gathering import Group, gathered
from laplace.likelihoods.base import Likelihood, Targets
from laplace.posterior import Fit
from laplace.structures import STRUCTURES, Pass, Structure, Sums
from laplace.weights.layout import Layout

_RESTARTS = 20  # readings of the data after which a network is given up that shows another side in every one
_STATE = (
    "_before",
    "_n_before",
    "data",
    "n_data",
    "n_outputs",
    "_forms",
    "_compared",
    "_together",
    "_counting",
    "_readings",
)
_HELD = 2**23  # numbers held back before their moments are taken


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
        progress: Progress | None = None,
    ) -> None:
        self.engine, self.likelihood, self.structure, self.layout = engine, likelihood, structure, layout
        self.kind, self.samples, self.generator, self.budget = kind, samples, generator, budget
        self.progress = progress
        self.sums: dict[str, Any] = {}  # of this run over the data
        self.totals: Sums = {}  # after all runs so far
        self.data: Sums = {}
        self.n_data = self.n_outputs = 0
        self._counting = False  # whether any example counts
        self._pending: list[Moments] = []
        self._held = 0
        self._like = torch.empty(0)  # of the outputs' dtype and device
        self.pass_: Pass = structure
        self._before: Sums = {}
        self._n_before = 0
        self._forms: list[tuple[str, tuple[int, ...]]] = []
        self._restarts = self._readings = 0  # of the data, behind this one
        self._state = None if generator is None else generator.get_state()
        self._compared = False  # whether joined batches were seen to give the outputs of single ones
        self._together = True  # until a network does not run on joined batches

    def run(self, batches: Iterable[Batch], again: Callable[[], Iterable[Batch]] | None) -> None:
        """Run over all batches, and over those of `again` as often as the structure asks for."""
        self._resume()
        for _ in range(self._readings if again is not None else 0):  # so that a shuffled loader is where it was
            for _ in batches:
                pass
            batches = again() if again is not None else batches
        while True:
            try:
                self._run_all(batches, again)
                break
            except FormChangedError:  # a later batch showed more of the network: count anew, knowing that
                self._restarts += 1
                if again is None or self._restarts > _RESTARTS:
                    raise
                self._forget()
                batches = again()

    def _run_all(self, batches: Iterable[Batch], again: Callable[[], Iterable[Batch]] | None) -> None:
        if self._before:  # in the midst of a later run, where an interrupted fit was
            self._run_further(batches)
        else:
            self._add(batches)
            self._finish()
        while (further := self.structure.further(self.totals, self.layout, self._like.dtype)) is not None:
            assert again is not None
            self._rewind(further)
            self._run_further(again())

    def _run_further(self, batches: Iterable[Batch]) -> None:
        self._add(batches)
        if self.n_data != self._n_before:
            raise InputError(
                f"the training loader gave {self._n_before} examples at first and {self.n_data} when read again; "
                f"hessian_structure={self.structure.name!r} needs the same ones. Leave out samplers that vary."
            )
        self._finish()

    def _forget(self) -> None:
        """Nothing was counted yet."""
        self.pass_, self._before, self._n_before = self.structure, {}, 0
        self._start_run()

    def _start_run(self) -> None:
        self._readings += 1
        self.sums, self.data, self.n_data, self._pending, self._held = {}, {}, 0, [], 0
        if self.progress is not None:
            self.progress.restart()
        self._restore_generator()

    def _rewind(self, further: Pass) -> None:
        """Count the same data once more, with the same draws, for another run's sums."""
        self.pass_, self._before, self._n_before = further, self.totals, self.n_data
        self._start_run()

    def _restore_generator(self) -> None:
        if self.generator is not None and self._state is not None:
            self.generator.set_state(self._state)

    def _finish(self) -> None:
        """Make of the run over the data what the structure makes of it."""
        if not self._counting:
            raise InputError(f"none of the {self.n_data} examples counts: all are ignored, masked, or have weight 0.")
        with torch.no_grad():
            self._take()
            found = {key: _tensor(value, self._like) for key, value in self.sums.items()}
            _require_finite(found | self.data)
            self.totals = self.pass_.finish(self._before, found)

    def _add(self, batches: Iterable[Batch]) -> None:
        """Run all batches, small ones together, and add what they leave."""
        if self.progress is not None:
            batches = self.progress.unread(batches, self.engine.forward)
        most = None if self.progress is None else self.progress.every
        for group in gathered(batches, lambda: self.engine.room() if self.n_data and self._together else 0, most):
            if isinstance(group, Batch):
                self._count(group.inputs, *self._run(group))
            elif (run := self._run_as_one(group)) is not None:
                self._count(group.joined().inputs, *run)
            else:
                for batch in group.batches():  # one by one: either it runs, or the error names its batch
                    self._count(batch.inputs, *self._run(batch))
            if self.progress is not None:
                self.progress.counted([group] if isinstance(group, Batch) else group.batches(), self._partial)

    def _run_as_one(self, group: Group) -> tuple[Forward, Targets] | None:
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

    def _run(self, batch: Batch) -> tuple[Forward, Targets]:
        """Run a batch; what is refused is refused here, before anything is added."""
        try:
            forward, targets = counted(self.engine.forward(batch.inputs), batch, self.likelihood)
        except (InputError, ModelError) as error:
            raise numbered(error, f"batch {batch.index}") from error.__cause__
        f = forward.outputs
        if self.n_outputs not in (0, f.shape[1]):
            raise InputError(
                f"batch {batch.index}: the network has {f.shape[1]} outputs here and had {self.n_outputs} before."
            )
        return forward, targets

    def _count(self, inputs: Inputs, forward: Forward, targets: Targets) -> None:
        f = forward.outputs
        self._like = f[:0]
        if len(f):
            with torch.no_grad():
                self._keep(inputs, forward, targets)
                _add(self.data, self.likelihood.sums(f, targets))
            self._counting = self._counting or targets.weights is None or bool(targets.weights.any())
        self.n_data, self.n_outputs = self.n_data + forward.positions.n, f.shape[1]

    def _keep(self, inputs: Inputs, forward: Forward, targets: Targets) -> None:
        """What the structure keeps of a batch: its moments, taken now or with those of the next ones."""
        for moments in self._moments(forward, targets):
            self._pending.append(moments)
            self._held += moments.held
            if self._held > _HELD:
                self._take()

    def _partial(self) -> dict[str, Any]:
        """All that a fit goes on from. This one goes on from it, too, so that both round alike."""
        with torch.no_grad():
            self._take()
        grams = {key: value.flush() for key, value in self.sums.items() if isinstance(value, GramSum)}
        others = {key: value for key, value in self.sums.items() if key not in grams}
        self.sums = {key: GramSum(grams[key]) if key in grams else others[key] for key in self.sums}
        generators = {} if self.generator is None else {"now": self.generator.get_state(), "at first": self._state}
        state = {"grams": grams, "others": others, "generators": generators, "like": self._like}
        return state | {key: getattr(self, key) for key in _STATE}

    def _resume(self) -> None:
        """Go on from where an interrupted fit was."""
        state = None if self.progress is None else self.progress.resumed()
        if state is None:
            return
        self.sums = {**state["others"], **{key: GramSum(gram) for key, gram in state["grams"].items()}}
        self._like = state["like"]
        for key in _STATE:
            setattr(self, key, state[key])
        if self.generator is not None:
            self._state = state["generators"]["at first"].cpu()
            self.generator.set_state(state["generators"]["now"].cpu())
        if self._before:
            further = self.structure.further(self._before, self.layout, self._like.dtype)
            assert further is not None
            self.totals, self.pass_ = self._before, further

    def fit(self, mean: Tensor) -> Fit:
        """What has been added, at the weights `mean`."""
        counts = (self.n_data, self.n_outputs)
        parts = (self.structure, self.likelihood, self.kind, self.layout, mean, self.totals, self.data)
        return Fit(*parts, *counts, linear=self.engine.linear)

    def _moments(self, forward: Forward, targets: Targets) -> Iterator[Moments]:
        if self.kind == "hessian":
            exact = forward.hessian(lambda f: -targets.total(self.likelihood.log_prob(f, targets.y)))
            if exact is not None:
                yield exact
                return
        yield from forward.moments(self._curvature(forward, targets))

    def _curvature(self, forward: Forward, targets: Targets) -> OutputCurvature:
        if self.kind == "ef" and forward.positions.several and targets.weights is not None:
            raise UnsupportedError(
                "curvature='ef' squares an example's whole score, of all positions together, in which weights have no "
                "meaning. Take curvature='ggn', 'sketch' or 'mc', or weights of 0 and 1."
            )
        made = CURVATURES[self.kind](self.likelihood, forward.outputs, targets.y, self.samples, self.generator)
        return made.weighted(targets.weights)

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
        forms = [(m.form, m.factors if m.form == "kron" else ()) for m in moments.parameters]
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


def _require_finite(sums: Sums) -> None:
    """Refuse sums in which a number has overflowed, or a gradient does not exist."""
    bad = [key for key, value in sums.items() if not value.isfinite().all()]
    if bad:
        raise NumericalError(
            f"the sums over the data hold NaN or infinite values in {', '.join(bad[:3])}; all outputs are finite. "
            "A product has overflowed, or the network has no derivative at some example (a root of 0, say). Scale the "
            "inputs and labels to about 1, or fit with model.double()."
        )


def _tensor(total: Tensor | GramSum | float, like: Tensor) -> Tensor:
    if isinstance(total, GramSum):
        return total.flush().unsqueeze(0)
    return total if isinstance(total, Tensor) else torch.tensor(total, dtype=torch.float64, device=like.device)
