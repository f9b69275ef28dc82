"""Run over the data. In each run, every batch passes through the network once and is added to the sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from laplace.backprop import Network
from laplace.backprop.gradients import Engine, Forward, Moments, is_absent
from laplace.backprop.plan import Learned
from laplace.budget import LARGE, Budget, give_back_freed_memory
from laplace.curvature import Estimator, OutputCurvature
from laplace.distributed import Reduce, alone
from laplace.distributed.shards import Shard, places
from laplace.errors import FormChangedError, InputError, UnsupportedError, noting, within
from laplace.inference.progress import Progress
from laplace.inference.reads import Form, Read, changed_form, require_each_once
from laplace.inference.sums import add_to, as_tensor, forms_of, require_finite_sums, require_memory
from laplace.inference.targets import counted
from laplace.likelihoods.base import Likelihood, Targets
from laplace.linalg.gram_sums import GramSum
from laplace.linalg.sampling import Keyed, rows_keyed, seed_from
from laplace.linalg.shared_sums import sums_from
from laplace.network.batch_merging import Group, cut, gathered
from laplace.network.batches import Batch
from laplace.network.inputs import Inputs
from laplace.posterior.posterior import Fit
from laplace.posterior.schema import require_forms, require_sums
from laplace.structures import Pass, Structure, Sums
from laplace.structures.dealing import dealt_out
from laplace.weights.layout import Layout

_RESTARTS = 20  # give up on a network that behaves differently in each of so many readings of the data
_STATE = (
    "_before",
    "_n_before",
    "data",
    "n_data",
    "n_outputs",
    "flat",
    "_forms",
    "_compared",
    "_together",
    "_counting",
    "_readings",
    "_runs",
    "_seed",
)
UNKNOWN = -1  # how many examples an earlier run gave, if another rank remembers its totals
_HELD = 2**21  # how many numbers to collect before their moments are computed. More is not faster,
_HELD_WIDE = 2**23  # unless there come to be so many rows by it that float32 is right for their product: see `gram`


class Accumulator:
    """Adds up the sums of the curvature and of the log-likelihood, batch by batch."""

    def __init__(
        self,
        engine: Engine,
        likelihood: Likelihood,
        structure: Structure,
        layout: Layout,
        estimator: Estimator,
        generator: torch.Generator | None,
        budget: Budget,
        progress: Progress | None = None,
        reduce: Reduce = alone,
        shard: Shard | None = None,
    ) -> None:
        self.reduce, self.shard = reduce, Shard(()) if shard is None else shard
        self.engine, self.likelihood, self.structure, self.layout = engine, likelihood, structure, layout
        self.estimator, self.generator, self.budget = estimator, generator, budget
        self.progress = progress
        self.sums: dict[str, Any] = {}  # of the current run over the data
        self._zeros: dict[str, Any] = {}  # the sums of tensors in batches that did not use them
        self.totals: Sums = {}  # after all runs so far
        self.data: Sums = {}
        self.n_data = self.n_outputs = 0
        self.flat = False  # whether outputs have no dimension for C
        self._counting = False  # whether any example counts
        self._pending: list[Moments] = []
        self._held = self._taken = 0  # numbers in them, and examples
        self._examples = 0  # how many the loader says that it gives; 0 if it does not say, or was wrong
        self._like = torch.empty(0)  # an empty tensor with the dtype and device of the outputs
        self.pass_: Pass = structure
        self._before: Sums = {}
        self._n_before = 0
        self._forms: list[Form] = []
        self._restarts = self._readings = 0  # complete readings of the data before this one
        self._runs = 0  # how many of them are in the sums before this run
        self._state = None if generator is None else generator.get_state()
        self._seed = self._drawn_seed()
        self._resumed = False
        self._first: Inputs | None = None  # a few examples that all ranks have
        self._marks: list[float] = []  # the sum of each batch's inputs and labels: the same data has the same
        self.n_all = 0  # examples on all ranks
        self._compared = False  # whether the outputs of joined batches were compared with those of single ones
        self._together = True  # until a network does not run on joined batches
        self._trusting: Callable[[], AbstractContextManager[None]] = nullcontext  # after a resume: `Progress.trusting`

    def run(self, batches: Iterable[Batch], again: Callable[[], Iterable[Batch]] | None, examples: int = 0) -> None:
        """Run over all batches, and over those of `again` as often as the structure asks for.

        `examples` is about how many there will be, 0 if nobody knows. If it is wrong, the run begins again without it.
        """
        self._examples = 0 if again is None else examples
        self._resume()
        if self.progress is not None and self.reduce.size > 1:
            self._catch_up()
        for _ in range(
            self._readings if again is not None else 0
        ):  # so that a shuffled loader is in the same state again
            for _ in batches:
                pass
            batches = again() if again is not None else batches
        while True:
            try:
                self._run_all(batches, again)
                break
            except FormChangedError:  # a later batch showed more of the network: start again with that knowledge
                self._restarts += 1
                if again is None or self._restarts > _RESTARTS:
                    raise
                self._forget()
                batches = again()

    def _run_all(self, batches: Iterable[Batch], again: Callable[[], Iterable[Batch]] | None) -> None:
        if self._before:  # an interrupted fit stopped in the middle of a later run
            self._run_further(batches)
        else:
            self._finish(self._read(batches))
        while (further := self._further()) is not None:
            assert again is not None
            self._rewind(further)
            self._run_further(again())

    def _further(self) -> Pass | None:
        return dealt_out(lambda: self.structure.further(self.totals, self.layout, self._like.dtype), self.reduce)

    def _run_further(self, batches: Iterable[Batch]) -> None:
        read = self._read(batches)
        if self._n_before not in (self.n_data, UNKNOWN):
            raise InputError(
                f"the training loader gave {self._n_before} examples at first and {self.n_data} when read again; "
                f"hessian_structure={self.structure.name!r} needs the same ones. Leave out samplers that vary."
            )
        self._finish(read)

    def _read(self, batches: Iterable[Batch]) -> list[Read]:
        """Add all batches, and return what each rank has read. Raise FormChangedError on all ranks, if one does."""
        reads = self.reduce.agree(lambda: self._attempt(batches))
        if changed := changed_form(reads, self.layout.names):
            if not reads[self.reduce.rank].changed:
                self._forms = []
            self._learn([read.learned for read in reads if read.learned is not None])
            raise FormChangedError(changed)
        return reads

    def _attempt(self, batches: Iterable[Batch]) -> Read:
        changed = None
        try:
            self._add(batches)
            with torch.no_grad():
                self._take()
            self._require_rows()
        except FormChangedError as error:
            if self.reduce.size == 1:
                raise
            changed = str(error)
        learned = None if self.engine.plan is None else self.engine.plan.learned
        used = self._used()
        many = self.reduce.size > 1
        marks = (sum(self._marks), {key: float(value.sum()) for key, value in self.data.items()} if many else {})
        return Read(self.n_data, self._counting, used, self._forms, changed, learned, marks)

    def _require_rows(self) -> None:
        """Start again if products were taken in float32 for rows that have not come."""
        if any(isinstance(value, GramSum) and value.mistaken for value in self.sums.values()):
            self._examples = 0
            raise FormChangedError("the loader gave fewer rows than its length and its first batch led to expect.")

    def _used(self) -> set[str]:
        """Return the names of the tensors that the batches of this rank have used."""
        return {key.rpartition("/")[0] for key in self.sums}

    def prepare(self, inputs: Inputs) -> None:
        """Run a few examples that all ranks have, so that all have the same plan, and those without data have one."""
        self._first = inputs
        forward = self.engine.forward(inputs)
        self._like, self.n_outputs = forward.outputs[:0], self.n_outputs or forward.outputs.shape[1]
        self.flat = forward.positions.dim is None
        self._seed = self.reduce.share(0, self._seed)

    def _learn(self, learned: Sequence[Learned]) -> None:
        """Make the plan again, on all ranks the same, from what all of them have seen of the network."""
        if isinstance(self.engine, Network) and self._first is not None and learned:
            self.engine.relearn(self._first, functools.reduce(Learned.joined, learned))

    def _forget(self) -> None:
        """Start the fit again: nothing was added yet."""
        self.pass_, self._before, self._n_before, self._runs = self.structure, {}, 0, 0
        self._start_run()

    def _start_run(self) -> None:
        self._readings += 1
        self.sums, self.data, self.n_data, self._pending, self._held, self._taken = {}, {}, 0, [], 0, 0
        self._zeros, self._marks = {}, []
        if self.progress is not None:
            self.progress.restart()

    def _rewind(self, further: Pass) -> None:
        """Read the same data again, for the sums of another run."""
        self.pass_, self._before, self._n_before = further, self.totals, self.n_data
        self._runs += 1
        self._start_run()

    def _drawn_seed(self) -> int:
        """Return the seed of all random numbers of this fit. Every run over the data draws the same."""
        return seed_from(self.generator, 2**62) if self.estimator.draws else 0

    def _finish(self, reads: Sequence[Read]) -> None:
        """Add up the sums of all ranks, and let the structure turn those of this run into its totals."""
        self.n_all = sum(read.n for read in reads)
        require_each_once(reads, self.shard.examples)
        if not any(read.counting for read in reads):
            raise InputError(f"none of the {self.n_all} examples counts: all are ignored, masked, or have weight 0.")
        with torch.no_grad(), self._trusting():
            if self.layout.n_params > LARGE:
                give_back_freed_memory()
            used = set().union(*(read.used for read in reads))
            found = self._finished_sums(used)
            require_finite_sums(found | self.data, self._like.dtype)
            found, self.data = self._reduced(found, self.data)
            made = self._from_points()
            require_finite_sums(made, self._like.dtype)
            self.totals = self.pass_.finish(self._before, found | made)

    def _finished_sums(self, used: set[str]) -> Sums:
        """Return the sums of this run over the data, with zeros of tensors that no rank has used."""
        add_to(self.sums, {key: value for key, value in self._zeros.items() if key.rpartition("/")[0] not in used})
        alone = self.reduce.size == 1  # other ranks have other rows: only whole products add up
        found: Sums = {}
        whole: dict[int, Tensor] = {}  # of sums with several names
        for key in list(self.sums):  # each is dropped as soon as it is finished: two copies of all would be large
            total = self.sums.pop(key)
            if not isinstance(total, GramSum):
                found[key] = as_tensor(total, self._like)
            elif alone:
                found[key] = total.close()
            else:
                if id(total) not in whole:
                    whole[id(total)] = total.flush().unsqueeze(0)
                found[key] = whole[id(total)]
        return found

    def _reduced(self, sums: Sums, data: Sums) -> tuple[Sums, Sums]:
        """Return both kinds of sums over all ranks, in one reduction."""
        named = {f"sums {key}": value for key, value in sums.items()} | {f"data {k}": v for k, v in data.items()}
        totals = self.reduce.total(named, self._like.device)
        parts = [(*key.partition(" ")[::2], value) for key, value in totals.items()]
        return {key: v for of, key, v in parts if of == "sums"}, {key: v for of, key, v in parts if of == "data"}

    def _from_points(self) -> Sums:
        """Return sums that do not come from moments. Only posteriors over functions have any."""
        return {}

    def _add(self, batches: Iterable[Batch]) -> None:
        """Run all batches, small ones together, and add their sums."""
        if self.progress is not None:
            batches = self.progress.unread(batches, self.engine.forward)
        if self.reduce.size > 1:
            batches = self._marked(batches)
        most = None if self.progress is None else self.progress.every
        last = None
        groups = gathered(batches, lambda: self.engine.room() if self.n_data and self._together else 0, most)
        for number, group in enumerate(groups, 1):
            if isinstance(group, Batch):
                for part in self._parts(group):
                    self._count(f"batch {part.index}", part.inputs, *self._run(part))
                last = group
            elif (run := self._run_as_one(group)) is not None:
                last = group.joined()
                self._count(group.where, last.inputs, *run)
            else:
                for batch in group.batches():  # one by one: each runs, or the error names the batch that fails
                    self._count(f"batch {batch.index}", batch.inputs, *self._run(batch))
                    last = batch
            if number & (number - 1) == 0:  # 1, 2, 4, ...: few of many
                self._confirm(last)
                last = None
            if self.progress is not None:
                self.progress.counted([group] if isinstance(group, Batch) else group.batches(), self._partial)
        self._confirm(last)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch in parts that the engine can run at once."""
        with within(f"batch {batch.index}"):
            most = self.engine.most(batch.inputs)
        yield from cut(batch, most)

    def _marked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Note a sum of each batch, by which ranks notice that they read the same data."""
        for batch in batches:
            self._marks.append(sum(float(t.double().sum()) for t in batch.tensors() if not t.is_complex()))
            yield batch

    def _confirm(self, batch: Batch | None) -> None:
        """Start again if the network behaves differently in a later batch than in the first one."""
        if batch is None:
            return
        with within(f"batch {batch.index}"):
            right = self.engine.confirmed(batch.inputs)
        if not right:
            self._forms = []
            raise FormChangedError(
                f"batch {batch.index}: a layer gives other gradients than it did in the first batch (a hook, or a "
                "replaced forward, that depends on the data?), and this loader can be read only once. Give a "
                "DataLoader or a list of batches."
            )

    def _run_as_one(self, group: Group) -> tuple[Forward, Targets, Tensor | None] | None:
        """Run a group of small batches as one.

        None if the network does not run on joined batches, or gives other outputs there; then none are joined any more.
        """
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

    def _run(self, batch: Batch) -> tuple[Forward, Targets, Tensor | None]:
        """Run a batch. Everything that is refused is refused here, before anything is added."""
        with within(f"batch {batch.index}"):
            forward, targets, of = counted(self.engine.forward(batch.inputs), batch, self.likelihood)
        f = forward.outputs
        if self.n_outputs not in (0, f.shape[1]):
            raise InputError(
                f"batch {batch.index}: the network has {f.shape[1]} outputs here and had {self.n_outputs} before. It "
                "must have the same number in every batch."
            )
        return forward, targets, of

    def _count(self, where: str, inputs: Inputs, forward: Forward, targets: Targets, of: Tensor | None) -> None:
        f = forward.outputs
        self._like = f[:0]
        if len(f):
            with torch.no_grad(), noting(where):
                self._keep(inputs, forward, targets, of)
                with self._trusting():
                    add_to(self.data, dict(self.likelihood.sums(f, targets)))
            self._counting = self._counting or targets.weights is None or bool(targets.weights.any())
        self.n_data, self.n_outputs = self.n_data + forward.positions.n, f.shape[1]
        self.flat = forward.positions.dim is None

    def _keep(self, inputs: Inputs, forward: Forward, targets: Targets, of: Tensor | None) -> None:
        """Collect the moments of a batch. They are computed now, or together with those of the next batches."""
        self._taken += forward.positions.n
        for moments in self._moments(forward, targets, of):
            self._pending.append(moments)
            self._held += moments.held
            width = moments.held // len(forward.outputs)
            if self._held > max(_HELD, min(_HELD_WIDE, 2 * width**2)):
                self._take()

    def _partial(self) -> dict[str, Any]:
        """Return everything that a resumed fit continues from.

        This fit continues from it too, so that both round alike.
        """
        with torch.no_grad():
            self._take()
        running = {key: value for key, value in self.sums.items() if isinstance(value, GramSum)}
        made = {id(value): value.flush() for value in running.values()}  # once for each, however many names it has
        grams = {key: made[id(value)] for key, value in running.items()}
        rows = {key: (value.seen, value.expected) for key, value in running.items()}
        others = {key: value for key, value in self.sums.items() if key not in grams}
        generators = {} if self.generator is None else {"now": self.generator.get_state(), "at first": self._state}
        state = {"grams": grams, "rows": rows, "others": others, "generators": generators, "like": self._like}
        return state | {key: getattr(self, key) for key in _STATE}

    def _resume(self) -> None:
        """Continue from where an interrupted fit stopped."""
        state = None if self.progress is None else self.progress.resumed()
        if state is None or self.progress is None:
            return
        with self.progress.trusting():
            self._go_on_from(state)
        self._trusting = self.progress.trusting

    def _go_on_from(self, state: Mapping[str, Any]) -> None:
        require_forms(state["_forms"], len(self.layout.names))
        if self.generator is not None:
            for key in ("now", "at first"):  # check both now: the second is used much later
                torch.Generator(self.generator.device).set_state(state["generators"][key].cpu())
        self.sums = {**state["others"], **sums_from(state["grams"], state["rows"])}
        self._like = state["like"]
        for key in _STATE:
            setattr(self, key, state[key])
        if self.generator is not None:
            self._state = state["generators"]["at first"].cpu()
            self.generator.set_state(state["generators"]["now"].cpu())
        self._resumed = True
        if self._before:
            self._go_on_after(self._before)

    def _go_on_after(self, before: Sums) -> None:
        """Continue with the run that follows these totals."""
        further = self.structure.further(before, self.layout, self._like.dtype)
        assert further is not None
        self._before = self.totals = before
        self.pass_ = further

    def _catch_up(self) -> None:
        """Bring all ranks to the same run over the data after an interruption.

        A rank may have stopped just before it wrote its first file of a run that another rank was already in. The
        totals before that run are the same on all ranks: it takes them over, and reads its data from the start.
        """
        where = self.reduce.agree(lambda: (self._runs, self._readings, self._seed if self._resumed else None))
        self._seed = next((seed for *_, seed in where if seed is not None), self._seed)
        source, (runs, readings, _) = max(enumerate(where), key=lambda pair: pair[1][0])
        if not any(here < runs for here, *_ in where):
            return
        before = self.reduce.share(source, self._before if self.reduce.rank == source else {})
        if self._runs < runs:
            self._start_run()
            self._runs, self._readings, self._n_before = runs, readings, UNKNOWN
            self._go_on_after({key: value.to(self._like.device) for key, value in before.items()})

    def fit(self, mean: Tensor) -> Fit:
        """Return the `Fit` of everything that was added, at the weights `mean`."""
        counts = (self.n_all, self.n_outputs)
        parts = (self.structure, self.likelihood, self.estimator.name, self.layout, mean, self.totals, self.data)
        fit = Fit(*parts, *counts, linear=self.engine.linear, flat=self.flat, empirical=self.estimator.empirical)
        if self._trusting is not nullcontext:
            with self._trusting():
                require_sums(fit, fit.sums)
        return fit

    def _moments(self, forward: Forward, targets: Targets, of: Tensor | None) -> Iterator[Moments]:
        if self.estimator.exact_hessian:
            exact = forward.hessian(lambda f: -targets.total(self.likelihood.log_prob(f, targets.y)))
            if exact is not None:
                yield exact
                return
        yield from forward.moments(self._curvature(forward, targets, of))

    def _places(self, n: int) -> Tensor:  # (n,)
        """Return the places in the data of the next n examples."""
        return places(self.shard, self.reduce, self.n_data, n)

    def _curvature(self, forward: Forward, targets: Targets, of: Tensor | None) -> OutputCurvature:
        if self.estimator.empirical and forward.positions.several and targets.weights is not None:
            raise UnsupportedError(
                "curvature='ef' squares the score of a whole example, all positions together, so positions cannot have "
                "their own weights. Take curvature='ggn', 'sketch' or 'mc', or weights of 0 and 1."
            )
        draws = None
        if self.estimator.draws:
            draws = Keyed(self._seed, rows_keyed(self._places(forward.positions.n), of))
        made = self.estimator(self.likelihood, forward.outputs, targets.y, draws)
        return made.weighted(targets.weights)

    def _take(self) -> None:
        """Compute the moments of the collected batches: one large product instead of many small ones."""
        if self._pending:
            first, *others = self._pending
            self._notice_forms(first)
            if not self.sums and not self._before:
                self._require_memory(first, self._like)
            with self._trusting():
                self._add_sums(first.merged(others) if others else first)
            self._pending, self._held, self._taken = [], 0, 0

    def _add_sums(self, moments: Moments) -> None:
        """Add the sums of a batch. Sums of unused tensors wait for a batch that uses them, which shows their form."""
        part = dict(self.pass_.sums(moments, self.layout))
        names = {name for name, m in zip(self.layout.names, moments.parameters, strict=True) if is_absent(m)}
        waiting = {key: part.pop(key) for key in list(part) if key.rpartition("/")[0] in names}
        add_to(self.sums, part, self._examples / self._taken if self._taken else 0.0)
        self._zeros = {**waiting, **self._zeros}

    def _require_memory(self, moments: Moments, like: Tensor) -> None:
        """Refuse sums that do not fit into memory."""
        require_memory(self.structure, moments, self.layout, self.budget, like)

    def _notice_forms(self, moments: Moments) -> None:
        """Begin again if a batch uses a tensor in another way than the batches before."""
        self._forms, changed = forms_of(moments, self._forms, self.layout.names)
        if changed:
            raise FormChangedError(
                f"a later batch used {', '.join(changed[:3])} in another way than the first (examples without a fixed "
                "number of rows?), and this loader can be read only once. Give a DataLoader or a list of batches."
            )


def _alike(f: Tensor, other: Tensor) -> bool:
    """Return whether two outputs are equal up to rounding."""
    return f.shape == other.shape and bool((f - other).abs().max() <= torch.finfo(f.dtype).eps ** 0.5 * f.abs().max())
