"""Run a network for a posterior: find the weights, choose the engine, cut the inputs into parts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from laplace.backprop import Forward, Head, Network, Plan
from laplace.backprop.audit import EXAMPLES
from laplace.checks import all_finite, how_many
from laplace.curvature import GGN, Estimator, Sketch
from laplace.distributed.groups import world_size
from laplace.errors import (
    InputError,
    LaplaceWarning,
    ModelError,
    ProcessesWarning,
    StaleWarning,
    UnsupportedError,
    warn,
)
from laplace.inference.next_tokens import are_shifted, labels_within, refuse_tokens_themselves, shifted
from laplace.inference.own_loss import compare
from laplace.inference.ready import Ready, ReadyEngine
from laplace.inference.targets import check_finite
from laplace.linalg.autocast import rounding
from laplace.network.batches import Batch, device_of, training_batches
from laplace.network.inputs import Inputs, described
from laplace.network.kept import replicate_to_keep
from laplace.network.pieces import is_stand_in
from laplace.network.pytree import map_tensors, tensors_in
from laplace.network.replica import replicate, unwrap
from laplace.network.sharded import refresh, settle
from laplace.network.sharing import Sharing, outputs_of, outputs_twice
from laplace.posterior.posterior import Fit
from laplace.predictive.positions import Positions
from laplace.spec import Spec, require_served
from laplace.structures import adding
from laplace.weights import FoundLastLayer, Selection, Snapshot, what_changed

MOST_VECTORS: Final = 256  # with more, outputs at positions get a sketch of the GGN by default


class Runner:
    """Holds a network with the user's options, and facts that running it has shown.

    Attributes:
        model: the network, without wrappers that spread it over processes. It is never changed.
        wrapped: the name of the class that did, if one did.
        spec: the user's options.
        enable_backprop: whether gradients flow from predictions to the inputs.
        weights: the uncertain weights. None until they are found.
        plan: the rule for the gradients of each tensor. None until the network has run.
        snapshot: the state of the network when it was fitted.
        dims: the number of dimensions of each training input. None if the posterior came from a file.
        ranks: how many processes fitted the posterior together.
        ready: what waits for the next prediction.
        next_tokens: whether labels have to be shifted to the next positions. None until a batch tells.
    """

    def __init__(self, model: nn.Module, spec: Spec, enable_backprop: bool = False, wrapped: str | None = None) -> None:
        self.model, self.spec, self.enable_backprop, self.wrapped = model, spec, enable_backprop, wrapped
        self.weights: FoundLastLayer | Selection | None = None
        self.plan: Plan | None = None
        self.snapshot: Snapshot | None = None
        self.dims: tuple[int, ...] | None = None
        self.next_tokens: bool | None = None
        self.ranks = 1
        self._sharing, self._warned, self.ready = Sharing(), set[str](), Ready()

    @property
    def spread(self) -> str | None:
        """Say that the network is spread over processes, if it is."""
        return None if self.wrapped is None else f"a network in {self.wrapped}"

    # ---- what the network is -------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any], progress_bar: bool | None, what: str) -> Iterator[Batch]:
        """Yield the batches of a loader. `what` names the run in errors and progress bars.

        The labels of a causal language model are shifted, so that each stands at the logits that predict it.
        """
        spec = self.spec
        for batch in training_batches(loader, self.model, spec.keys, progress_bar, what):
            inputs = self.told_apart(batch.inputs)
            batch = batch if inputs is batch.inputs else replace(batch, inputs=inputs)
            meant = batch, self.model, spec.likelihood, spec.class_dim
            if not labels_within(batch):
                if batch.index == 0:
                    refuse_tokens_themselves(*meant)
                yield batch
                continue
            if self.next_tokens is None:  # decided on the first batch that shows it
                self.next_tokens = are_shifted(*meant, partial(self.warn_once, "own loss"))
                if self.next_tokens is False:
                    compare(*meant, partial(self.warn_once, "own loss"))
            yield shifted(batch, spec.likelihood) if self.next_tokens else batch

    def told_apart(self, inputs: Inputs) -> Inputs:
        """Find out which input tensors all examples share. Several tensors take a run of the network."""
        return self._sharing.told_apart(inputs, self.model)

    def find_weights(self, inputs: Inputs, keep: bool = False) -> FoundLastLayer | Selection:
        """Return the uncertain weights. Runs the network on one example if necessary."""
        if keep and self.weights is not None:
            return self.weights
        refresh(unwrap(self.model))
        weights = self.spec.weights.find(self.model, inputs)
        self._settle(weights)
        require_served(self.spec.structure, weights.layout)
        scores = self.spec.estimator.empirical
        if isinstance(weights, FoundLastLayer) and scores and self.positions(inputs).several:
            return Selection(weights.layout)  # the score of an example is one vector over all its positions
        return weights

    def _settle(self, weights: FoundLastLayer | Selection) -> None:
        """Keep the uncertain weights of a sharded network on every rank from now on, if they are few."""
        settle(unwrap(self.model), weights.layout.names, few=isinstance(weights, Selection))

    def _damaged(self) -> str:
        """Return a sentence about weights that are NaN or infinite, if there are any."""
        bad = [name for name, p in self.model.named_parameters() if not is_stand_in(p) and not all_finite(p.detach())]
        return f" So do the weights {', '.join(bad[:3])}: training has diverged, or a file is damaged." if bad else ""

    def require_steady(self, inputs: Inputs, linear: bool) -> None:
        """Refuse a network whose outputs are random, or depend on other examples in the batch.

        The second check is for last layers. For other weights the audit finds it, and names the layer.
        """
        few = inputs.part(0, EXAMPLES)
        fewer = few.part(0, 2) if linear and (few.size or 0) > 2 else few
        f, again = outputs_twice(self.model, few, fewer)
        if f.dim() == 2 and not all_finite(f):  # at positions, some outputs may not count
            seen = f"looking at the first {how_many(len(f), 'example')}: "
            check_finite(f, f"{seen}the network's outputs hold", why=self._damaged())
        if not f.dim() or not again.dim() or _alike(f[: len(again)], again):
            return
        if fewer is not few and _alike(f, self.outputs(few)):
            raise ModelError(
                "the outputs of an example depend on the others in its batch. A posterior needs independent examples: "
                "give BatchNorm running statistics, and take means over the batch out of forward."
            )
        raise ModelError(
            "the network gives other outputs on a second run: it draws random numbers in eval mode. Write "
            "dropout(h, p, training=self.training), and take noise out of forward."
        )

    def outputs(self, inputs: Inputs) -> Tensor:
        """Run the network once without recording anything."""
        return outputs_of(self.model, inputs)

    def positions(self, inputs: Inputs) -> Positions:
        """Return the shape of the outputs, from a run on a few examples."""
        return Positions.of(self.outputs(inputs.part(0, EXAMPLES)), self.spec.class_dim)

    def chosen_curvature(self, engine: Head | Network, inputs: Inputs) -> Estimator:
        """Choose the curvature when the user did not: exact GGN, or a sketch when that needs too many vectors."""
        if self.spec.curvature is not None:
            return self.spec.curvature
        if isinstance(engine, Head):
            return GGN()
        found = engine.planned_positions(inputs)
        vectors = found.count * found.c
        if not found.several or vectors <= MOST_VECTORS:
            return GGN()
        self.warn_once(
            "sketch",
            f"the exact GGN sends back a vector for each of {found.c} outputs at {found.count} positions. That is more "
            f"than {MOST_VECTORS}, and an unbiased estimate with one vector is used: curvature='sketch'. Write "
            "curvature='ggn' for the exact one, or curvature='sketch' with curvature_samples= to choose yourself.",
        )
        return Sketch()

    def require_rereading(self, loader: Iterable[Any], before: Fit | None) -> None:
        """Refuse a loader that cannot be read often enough, and adding data if the structure cannot."""
        structure = self.spec.structure
        if structure.passes > 1 and isinstance(loader, Iterator):
            raise InputError(
                f"hessian_structure={structure.name!r} reads the data {structure.passes} times or more, and a "
                f"{type(loader).__name__} can be read once. Give a DataLoader or a list of batches."
            )
        if not structure.adds and before is not None:
            raise UnsupportedError(
                f"override=False: the sums of {structure.name!r} depend on all data and cannot be added to. Fit all "
                f"data at once, or take {adding()}, whose sums add."
            )

    # ---- running it ----------------------------------------------------------------------------------------------

    def engine(self, weights: FoundLastLayer | Selection, plan: Plan | None = None) -> Head | Network:
        """Return the engine that runs the network. A `plan` of an earlier call saves making it again."""
        return self._engine_on(replicate(self.model, _tracked(weights)), weights, plan)

    def _engine_on(self, replica: nn.Module, weights: FoundLastLayer | Selection, plan: Plan | None) -> Head | Network:
        spec = self.spec
        if isinstance(weights, FoundLastLayer):
            return Head(replica, weights, spec.budget, spec.class_dim)
        reduce = spec.structure.weight_sharing == "reduce"
        return Network(replica, weights, spec.budget, plan, reduce, spec.estimator.exact_hessian, spec.class_dim)

    def runs(self, fit: Fit, inputs: Inputs, whole: bool = False) -> Iterator[Forward]:
        """Yield runs on consecutive parts of the inputs that fit into memory, or one run on the `whole`."""
        if whole:
            yield from self.uncut(fit, inputs, whole)
            return
        for forward in self.uncut(fit, inputs):
            yield from (part for part, _ in forward.cut())

    def uncut(self, fit: Fit, inputs: Inputs, whole: bool = False) -> Iterator[Forward]:
        """Yield runs on consecutive parts of the inputs, with all positions of each example."""
        ready = self.ready.take(fit) or self._made_ready(fit)
        assert self.weights is not None
        engine = self.engine(self.weights, self.plan) if ready is None else ready.engine
        device = device_of(self.model) if ready is None else ready.device
        inputs = self.told_apart(inputs.as_tensors(self.model).to(device))
        if not engine.linear and any(t.shape[:1] == (0,) for t in tensors_in(inputs.x)):
            raise InputError(f"there is no example in {described(inputs.x, {})}. Leave empty batches out.")
        seen = 0  # number of examples in the parts before
        runs = self._run_in_parts(engine, [inputs] if whole else engine.chunks(inputs, fit.n_outputs))
        while (forward := self._next(runs, inputs, fit)) is not None:
            if forward.positions.c != fit.n_outputs:
                self._refuse_if_single(inputs, fit, None)
                raise InputError(
                    f"the network returns {forward.positions.c} outputs for each example, and returned {fit.n_outputs} "
                    "when the posterior was fitted. Give inputs of the same kind, or fit again."
                )
            check_finite(forward.outputs, "the network's outputs hold", forward.positions.count, seen)
            seen += forward.positions.n
            yield fit.attach_points(forward, engine, self.spec.budget.chunk)
        self.plan = engine.plan
        if ready is not None:
            self.ready.give(ready)

    def _made_ready(self, fit: Fit) -> ReadyEngine | None:
        """Return an engine that can be kept. None if the network has changed since it was fitted, or has no plan."""
        same, weights = self.notice_changes(fit), self.weights
        assert weights is not None
        if not same or (isinstance(weights, Selection) and self.plan is None):
            return None
        kept = replicate_to_keep(self.model, _tracked(weights))
        if kept is None:
            return None
        engine = self._engine_on(kept.replica, weights, self.plan)
        return ReadyEngine.of(engine, kept, fit, weights.tensors(self.model))

    def _run_in_parts(self, engine: Head | Network, parts: Iterable[Inputs]) -> Iterator[Forward]:
        for part in parts:
            forward = engine.forward(part, self.enable_backprop)
            if not engine.confirmed(part):  # these inputs led to a better plan
                forward = engine.forward(part, self.enable_backprop)
            yield forward

    def _next(self, runs: Iterator[Forward], inputs: Inputs, fit: Fit) -> Forward | None:
        """Return the next run. Refuse a single example without a batch dimension, whether it failed or not."""
        try:
            forward = next(runs, None)
        except Exception as error:
            self._refuse_if_single(inputs, fit, error)
            raise
        if forward is not None and forward.positions.dim is None and self.spec.class_dim is not None:
            sure = self.dims is not None or forward.positions.n != inputs.size
            if sure:
                self._refuse_if_single(inputs, fit, None)
        return forward

    def _refuse_if_single(self, inputs: Inputs, fit: Fit, error: Exception | None) -> None:
        """Refuse inputs that lack one dimension, if the network runs with a batch dimension added."""
        dims = dims_of(inputs)
        comparable = self.dims is not None and (error is None or len(dims) == len(self.dims))
        if not dims or (comparable and dims != tuple(d - 1 for d in self.dims or ())):
            return
        try:
            singles = inputs.singles()
            batch = replace(singles, x=map_tensors(singles.x, lambda t: t.unsqueeze(0)))
            found = Positions.of(self.outputs(batch), self.spec.class_dim)
        except Exception:  # whatever a network may raise
            return
        if found.n == 1 and found.c == fit.n_outputs:
            write = "x[0:1] instead of x[0], or x.unsqueeze(0)"
            if isinstance(inputs.x, Mapping):
                write = "{key: value.unsqueeze(0) for key, value in x.items()}; for a data set of examples, give "
                write += "DataLoader(examples, batch_size=32, collate_fn=...) with the collator of the fit"
            raise InputError(
                f"x is {described(inputs.x, {})}: a single example, but a batch is needed. Write {write}."
            ) from error

    # ---- whether it is still the same ----------------------------------------------------------------------------

    def adopt(
        self,
        weights: FoundLastLayer | Selection,
        plan: Plan | None = None,
        dims: tuple[int, ...] | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        """Remember the current state of the network, which a posterior belongs to; or the given one."""
        if snapshot is None:
            self._settle(weights)
        self.weights, self.plan, self.dims = weights, plan, dims
        self.snapshot = Snapshot.of(self.model) if snapshot is None else snapshot
        self._warned.discard("stale")
        self.ready.clear()

    def changed(self, mean: Tensor, thoroughly: bool = False) -> str | None:
        """Describe what has changed since the fit. Returns None if nothing has."""
        assert self.weights is not None
        return what_changed(self.model, self.weights, mean, self.snapshot, thoroughly)

    def notice_changes(self, fit: Fit) -> bool:
        """Warn, once, if the network has changed since it was fitted. Return whether it is the same."""
        changed = self.changed(fit.mean)
        if not changed and self.snapshot is not None and self.snapshot.versions is None:
            self.snapshot = Snapshot.of(self.model)  # this is a copy, and its values are the same
        if changed:
            self.warn_once(
                "stale",
                f"{changed} since fit; the posterior is valid only for the network as it was. Call la.fit again.",
                StaleWarning,
            )
        return not changed

    def require_unchanged(self, fit: Fit) -> None:
        """Refuse to add data at other weights than those of the earlier data."""
        if changed := self.changed(fit.mean, thoroughly=True):
            raise UnsupportedError(
                f"{changed} since fit, and data at other weights cannot be added. Fit all data at once, or "
                "use the posterior as a prior: Laplace(..., prior=la.as_prior()).fit(new_loader)."
            )

    def notice_processes(self, training: bool = False) -> None:
        """Warn, once, if this is one of several processes and nobody said how they work together."""
        if (count := world_size()) < 2:
            return
        apart = "the networks drift apart" if training else "its posterior sees only the batches that it reads itself"
        self.warn_once(
            "processes",
            f"this is one of {count} processes of torch.distributed, and {apart}. Write "
            "group=torch.distributed.group.WORLD if each process reads a part of the data: all end with the posterior "
            "of all of it. Write group=None if this process is meant to work alone.",
            ProcessesWarning,
        )

    def warn_once(self, key: str, message: str, category: type[LaplaceWarning] = LaplaceWarning) -> None:
        """Warn the first time that this is called with `key`."""
        if key not in self._warned:
            warn(message, category)
            self._warned.add(key)  # not reached if warnings are errors

    def with_structure_of(self, fit: Fit) -> Runner:
        """Return a runner of the same network for another fit, with all warnings to come again."""
        other = copy.copy(self)
        other.spec, other._warned, other.ready = replace(self.spec, structure=fit.structure), set(), Ready()
        other.snapshot = self.snapshot  # kept: this is the same network, not a copy
        return other

    def __getstate__(self) -> dict[str, Any]:
        snapshot = self.snapshot  # addresses in memory mean nothing in a copy
        return self.__dict__ | {"snapshot": None if snapshot is None else snapshot.elsewhere()}


def _tracked(weights: FoundLastLayer | Selection) -> frozenset[str]:
    """Return the parameters that must require grad in a replica: none of a last layer, whose input is enough."""
    return frozenset() if isinstance(weights, FoundLastLayer) else frozenset(weights.layout.names)


def dims_of(inputs: Inputs) -> tuple[int, ...]:
    """Return the number of dimensions of each input tensor."""
    return tuple(t.dim() for t in inputs.singles().tensors())


def _alike(f: Tensor, other: Tensor) -> bool:
    """Return whether two outputs are equal up to rounding, ignoring NaN and infinity."""
    if f.shape != other.shape:
        return False
    tolerance = 3 * rounding({f.dtype}) ** 0.5
    f, other = f.double(), other.double()
    difference = (f - other).nan_to_num(0.0, 0.0, 0.0).abs()
    return not f.numel() or float(difference.max()) <= tolerance * float(f.nan_to_num(0.0, 0.0, 0.0).abs().max())
