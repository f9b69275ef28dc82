"""Treat weights of any layers: run the network on a batch and send vectors back to the outputs of its layers.

Gradients are taken with respect to layer outputs, never with respect to weights, since we would not use those.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.jit import ScriptModule

from laplace.backprop.at_positions import Rows, RowsJacobian, Vectors
from laplace.backprop.audit import EXAMPLES, kept_plan, lifting_changes_nothing, make_plan, recheck
from laplace.backprop.hessian import HessianMoments
from laplace.backprop.hessian_audit import require_hessian
from laplace.backprop.inner import LastCall, last_call
from laplace.backprop.network_moments import NetworkMoments, examples_beside
from laplace.backprop.plan import Learned, Plan, zeros_for
from laplace.backprop.record import NotSeen, Recorded, Recorder
from laplace.backprop.sending import sent_back
from laplace.backprop.twice import twice_differentiable
from laplace.backprop.uses import NetworkJacobian, NoUse, Use
from laplace.budget import LARGE, Budget, give_back_freed_memory
from laplace.errors import ModelError, quiet
from laplace.linalg.output_curvature import OutputCurvature
from laplace.network.inputs import Inputs
from laplace.network.pieces import whole
from laplace.predictive.positions import Positions
from laplace.weights.selection import Selection

_NARROW = 2**18  # most numbers in the outputs of all layers for which batches are run together
_AT_ONCE = 2**19  # most numbers of G at a time: larger blocks cost page faults, or stay in malloc's heap


class Network:
    """Runs a replica of a network, and makes its plan on the first batch."""

    linear = False

    def __init__(
        self,
        replica: nn.Module,  # which tracks these weights
        weights: Selection,
        budget: Budget,
        plan: Plan | None = None,
        reduce: bool = False,
        twice_differentiable: bool = False,
        class_dim: int | None = -1,
    ) -> None:
        self.replica, self.weights = replica, weights
        self.class_dim = class_dim
        self.budget, self.plan, self.reduce = budget, plan, reduce
        self.twice_differentiable = twice_differentiable
        self.hessian_is_right = False  # set after the check on the first batch
        self._read = 0  # numbers in an example's inputs
        self.item_size = max(
            [4, *(p.element_size() for p in self.replica.parameters())]
        )  # bytes per number of a gradient
        self._recorder: tuple[Plan | None, Recorder | None] = (None, None)
        if any(isinstance(module, ScriptModule) for module in self.replica.modules()):
            raise ModelError(
                "the layers inside a scripted or traced module cannot be seen. Use the original network, or "
                "subset_of_weights='last_layer'."
            )

    def put_hooks(self) -> None:
        """Put the plan's hooks on the replica now, not at the first run."""
        if self.plan is not None:
            self._recorder_for(self.plan)

    def room(self) -> int:
        """Return how many examples a narrow network computes in the time that one call takes."""
        if self.plan is None or not self.plan.width:
            return 0
        numbers = min(_NARROW, self.budget.chunk // 64)
        return min(numbers // self.plan.width, 4 * numbers // max(1, self._read))

    def most(self, inputs: Inputs) -> int:
        """Return for how many examples one vector's gradients, and what the network keeps for them, fit into memory."""
        plan = self.planned(inputs.normal_tensors())
        return self.budget.count(4 * self.item_size * plan.width)

    def forward(self, inputs: Inputs, with_grad: bool = False) -> NetworkForward:
        """Run a batch and keep its graph, with gradients with respect to the inputs only `with_grad`."""
        inputs = inputs.normal_tensors()
        self._read = sum(t.numel() for t in inputs.tensors()) // (inputs.size or 1)
        plan, own = self.planned(inputs), False  # whether the plan was made on this batch
        while True:
            try:
                f, calls = self._recorded(inputs, plan, with_grad)
            except NotSeen as failure:
                plan, own = self._make_plan(inputs, plan.without(failure.paths)), True
                continue
            if elsewhere := plan.read_elsewhere(f, calls, self._recorder_for(plan).leaves, inputs):
                plan, own = self._make_plan(inputs, plan.refusing(elsewhere)), True
                continue
            if not lifting_changes_nothing(plan, f, inputs, self.replica):
                plan, own = self._make_plan(inputs, plan.without(plan.lifted)), True
                continue
            misfits = plan.misfits(f, calls)
            if not misfits:
                rows = Rows(Positions.of(f, self.class_dim))
                return NetworkForward(self, plan, inputs, f, calls, with_grad, rows)
            plan, own = self._make_plan(inputs, plan.without(misfits) if own else plan.learned), True

    def confirmed(self, inputs: Inputs) -> bool:
        """Return whether the plan explains some examples from all over a batch. If not, makes a better plan.

        Only asked if the user has changed layers. All others do what their type does, and the graph shows the rest.
        """
        if self.plan is None or not self.plan.doubtful:
            return True
        forward, layout = self.forward(inputs.spread(EXAMPLES)), self.weights.layout.whole
        plan = forward.plan
        learned = recheck(plan, layout, forward.f, forward.calls, forward.inputs, self.replica)
        if learned is not plan.learned:
            self._make_plan(forward.inputs, learned)
        return learned is plan.learned

    def _recorded(self, inputs: Inputs, plan: Plan, attached: bool) -> tuple[Tensor, list[Recorded]]:
        with torch.inference_mode(False), torch.enable_grad(), self.differentiable(attached):
            return self._recorder_for(plan).run(self.readable(inputs, plan), self.replica, attached)

    def _recorder_for(self, plan: Plan) -> Recorder:
        """Return the recorder of a plan. Its hooks stay on our own replica until there is another plan."""
        made_for, recorder = self._recorder
        if recorder is None or made_for is not plan:
            learned = plan.learned
            recorder = Recorder(self.replica, plan.hooked, learned.repeated, plan.opened, lifted=plan.lifted)
            self._recorder = plan, recorder
        return recorder

    def differentiable(self, attached: bool) -> AbstractContextManager[Any]:
        """Return the context to run in: twice differentiable for a Hessian, or if gradients stay `attached`."""
        return twice_differentiable() if self.twice_differentiable or attached else nullcontext()

    def planned(self, inputs: Inputs) -> Plan:
        """Return the plan. Makes a new one if there is none, or if it was made on a single example."""
        if self.plan is None or (self.plan.examples == 1 and (inputs.size or 1) > 1):
            return self._make_plan(inputs, None if self.plan is None else self.plan.learned)
        return self.plan

    def _make_plan(self, inputs: Inputs, learned: Learned | None) -> Plan:
        if self._recorder[1] is not None:
            self._recorder[1].remove()
            self._recorder = (None, None)
        self.plan = make_plan(self.replica, self.weights.layout.whole, inputs, learned)
        if self.weights.layout.whole.n_params > LARGE:  # the audit has compared gradients of all weights
            give_back_freed_memory()
        return self.plan

    def keep(self, plan: Plan, inputs: Inputs) -> None:
        """Take over the plan of an earlier fit, if it still explains this network."""
        self.plan = kept_plan(plan, self.replica, self.weights.layout.whole, inputs.normal_tensors())

    def relearn(self, inputs: Inputs, learned: Learned) -> None:
        """Make the plan again from more facts, which other processes have found."""
        self._make_plan(inputs.normal_tensors(), learned)

    def readable(self, inputs: Inputs, plan: Plan) -> Inputs:
        """Return the inputs, cloned if the network writes to them, because they are read again."""
        return inputs.map(torch.clone) if plan.learned.writes else inputs

    def chunks(self, inputs: Inputs, n_outputs: int) -> Iterator[Inputs]:
        """Cut the inputs so that the gradients of all outputs, at all positions, fit into the budget."""
        if inputs.size is None:
            yield inputs
            return
        plan = self.planned(inputs.normal_tensors())
        width, positions = plan.inner if self.inside(plan) else plan.width, 1
        if math.prod(plan.outputs) > n_outputs:
            positions = self._positions(inputs).count
            width = width * positions * n_outputs // math.prod(plan.outputs)  # for this batch's padded length
        vectors = n_outputs * positions
        vectors += 2 if _one_by_one(plan) else vectors  # what autograd holds beside the gradients of all vectors
        step = self.budget.count(self.item_size * width * (vectors + 4), share=0.5)
        for start in range(0, inputs.size, step):
            yield inputs.part(start, start + step)

    def inside(self, plan: Plan) -> bool:
        """Return whether unit vectors start at the last layer's input: all tensors of that layer are uncertain."""
        parts = zip(self.weights.layout.names, self.weights.layout.parts, strict=True)
        whole = {name for name, part in parts if part is None}
        return plan.head is not None and whole.issuperset(plan.owners[plan.head].keys.values())

    def planned_positions(self, inputs: Inputs) -> Positions:
        """Return the shape of the outputs that the plan was made on. Makes one on these inputs if needed."""
        plan = self.planned(inputs.normal_tensors())
        return Positions.of(torch.empty(plan.examples, *plan.outputs, device="meta"), self.class_dim)

    def _positions(self, inputs: Inputs) -> Positions:
        """Return the shape of the outputs, from a run on a few examples."""
        with torch.inference_mode(False), torch.no_grad():
            return Positions.of(inputs.part(0, EXAMPLES).map(torch.clone).call(self.replica), self.class_dim)


class NetworkForward:
    """Holds one run with its graph, through which everything is sent back."""

    held = 2**62  # a batch's graph is not kept for later

    def __init__(
        self, network: Network, plan: Plan, inputs: Inputs, f: Tensor, calls: list[Recorded], attached: bool, rows: Rows
    ) -> None:
        self.network, self.plan, self.inputs, self.f = network, plan, inputs, f  # f as the network returned it
        self.calls, self.attached = calls, attached
        self.dtype = torch.promote_types(f.dtype, torch.float32)
        self.rows, self.positions = rows, rows.positions
        self.outputs = self.counted(f if attached else f.detach())

    def counted(self, f: Tensor, lead: int = 0) -> Tensor:  # (..., *own shape) -> (..., M, C)
        """Return the rows that count of values in the shape of the network's outputs."""
        rows = self.positions.rows(f, lead).to(self.dtype)
        return rows if self.rows.kept is None else rows.index_select(lead, self.rows.kept)

    def spread(self, rows: Tensor) -> Tensor:  # (M, C) -> own shape
        """Return values of the rows that count in the shape of the network's outputs, with zeros elsewhere."""
        if self.rows.kept is not None:
            whole = rows.new_zeros(self.positions.n * self.positions.count, rows.shape[1])
            rows = whole.index_copy(0, self.rows.kept, rows)
        return self.positions.shaped(rows.unsqueeze(0), lead=1)[0]

    def copied(self) -> NetworkForward:
        """Refuse to copy: the graph holds the inputs."""
        raise NotImplementedError("a batch's graph is not kept for later")

    def counting(self, kept: Tensor) -> NetworkForward:  # (M',), indices into the rows
        """Return the same run with only some rows counted."""
        kept = kept if self.rows.kept is None else self.rows.kept[kept]
        parts = (self.network, self.plan, self.inputs, self.f, self.calls, self.attached)
        return NetworkForward(*parts, Rows(self.positions, kept))

    def cut(self) -> Iterator[tuple[NetworkForward, slice]]:
        """Yield parts of consecutive rows, if not even one example's gradients fit at once."""
        step = max(1, self._fit // self.positions.c)
        if self.positions.n > 1 or len(self.outputs) <= step:
            yield self, slice(None)
            return
        for index in torch.arange(len(self.outputs), device=self.f.device).split(step):
            yield self.counting(index), slice(int(index[0]), int(index[-1]) + 1)

    def moments(self, curvature: OutputCurvature) -> Iterator[NetworkMoments]:
        """Yield second moments for vectors of a root of `curvature`, as many at a time as the budget allows."""
        counts = self.rows.counts(curvature.counts)
        for i, (part, batched) in enumerate(self._parts(self.vectors(curvature))):
            uses = self._uses(part, batched, first=i == 0)
            for use in uses:
                use.counting(counts)
            yield NetworkMoments(uses, self.network)

    def vectors(self, curvature: OutputCurvature) -> Vectors:
        """Return the vectors of output space whose outer products sum to `curvature`."""
        return self.rows.vectors(curvature)

    def sent(self, v: Tensor) -> list[Use]:
        """Return the gradients for these vectors."""
        return self._uses(v, self._batched(len(v)), first=True)

    def hessian(self, loss: Callable[[Tensor], Tensor]) -> HessianMoments:
        """Return second derivatives of a loss of the outputs in all parameters."""
        named, layout = dict(self.network.replica.named_parameters()), self.network.weights.layout
        tensors = [named[name] for name in layout.names]
        numbers = 4 * self.plan.width * self.f.shape[0] + layout.whole.n_params
        chunk = self.network.budget.count(self.network.item_size * numbers, share=0.5)
        with torch.enable_grad():
            counted = self.counted(self.f)
            moments = HessianMoments(loss(counted), tensors, layout, chunk, self.dtype)
        if not self.network.hessian_is_right:
            require_hessian(moments, counted, self._outputs_in_double, loss)
            self.network.hessian_is_right = True
        return moments

    def _outputs_in_double(self, tensors: Sequence[Tensor]) -> Tensor:  # (M, C)
        """Return the network's outputs in float64, at other values of its uncertain tensors."""
        network = self.network
        constants = itertools.chain(network.replica.named_parameters(), network.replica.named_buffers())
        chosen = {name: _doubled(whole(t).detach()) for name, t in constants}
        chosen |= zip(network.weights.layout.names, tensors, strict=True)
        inputs = network.readable(self.inputs, self.plan).map(_doubled)
        with torch.inference_mode(False), torch.enable_grad(), network.differentiable(self.attached):
            f = inputs.call_with(network.replica, chosen)
        rows = self.positions.rows(f)
        return rows if self.rows.kept is None else rows.index_select(0, self.rows.kept)

    def jacobian(self, outputs: Tensor | None = None, centred: bool = False) -> NetworkJacobian | RowsJacobian:
        """Return gradients of the unit vectors of output space at every position, or of the asked outputs.

        If `centred`, the vectors are contrasts, e_c - 1/C.
        """
        plain = not self.positions.several and self.rows.kept is None
        last = self._last_call() if plain else None
        if last is not None:
            return self._from_inside(last, outputs, centred)
        v = self.rows.units(outputs, self.outputs)
        v = v - v.mean(-1, keepdim=True) if centred else v
        whole = self._jacobian_of(self._uses(v, self._batched(len(v)), first=True))
        return whole if plain else RowsJacobian(whole, self.rows, self._jacobian_of)

    def _last_call(self) -> LastCall | None:
        """Return the call of the last layer, if unit vectors can be sent back from its input."""
        if self.plan.head is None or not self.network.inside(self.plan):
            return None
        return last_call(self.calls, self.plan.head, self.f)

    def _from_inside(self, last: LastCall, outputs: Tensor | None, centred: bool) -> NetworkJacobian:
        """Return the Jacobian, in closed form for the last layer, from the rows of its weight for layers below."""
        last.call.check_unwritten()
        v = last.rows(outputs, self.attached, centred).to(self.f.dtype).unsqueeze(1).expand(-1, len(self.f), -1)
        own = last.jacobians(self.plan, outputs, self.dtype, centred)
        uses = self._uses(v, self._batched(len(v)), first=True, last=last)
        names = self.network.weights.layout.names
        return self._jacobian_of([own.get(name, use) for name, use in zip(names, uses, strict=True)])

    def _jacobian_of(self, uses: Sequence[Any]) -> NetworkJacobian:
        return NetworkJacobian(uses, lambda: examples_beside(uses, self.network))

    def linearised(self, steps: Tensor) -> Tensor:  # (S, P) -> (S, N, C)
        """Return J step."""
        return self.jacobian().along(steps)

    def perturbed(self, steps: Tensor) -> Tensor:  # (S, P) -> (S, N, C)
        """Run the network with each of the moved weights. Nothing is written to."""
        together = self.network.budget.count(8 * self.dtype.itemsize * self.plan.width * self.f.shape[0], share=0.5)
        if len(steps) > together:
            return torch.cat([self.perturbed(part) for part in steps.split(together)])
        layout, replica = self.network.weights.layout, self.network.replica
        parameters = dict(replica.named_parameters())
        tensors = layout.moved([whole(parameters[name]).detach() for name in layout.names], steps)
        moved = dict(zip(layout.names, tensors, strict=True))

        def run(chosen: dict[str, Tensor]) -> Tensor:
            return self.network.readable(self.inputs, self.plan).call_with(replica, chosen)

        with torch.inference_mode(False), quiet(), self._differentiable():
            try:
                drawn = vmap(run, randomness="same")(moved)
            except RuntimeError:  # an operation without a batching rule
                drawn = torch.stack([run({k: t[s] for k, t in moved.items()}) for s in range(len(steps))])
        return self.counted(drawn, lead=1)

    def _differentiable(self) -> AbstractContextManager[Any]:
        return twice_differentiable() if self.attached else nullcontext()

    def _parts(self, v: Vectors) -> Iterator[tuple[Tensor, bool]]:
        """Yield vectors to send back, many at once or one by one, whichever is cheaper. Times both first."""
        seconds, tried = self.plan.seconds, 0
        if not seconds and len(v) > 6 and self._fit > 1:
            yield v[:1], False  # work that is done once for all vectors is not timed
            for part, batched in ((v[1:2], False), (v[2:6], True)):
                start = time.process_time()
                yield part, batched  # resumes when the caller has used them
                if seconds.get(batched) != float("inf"):
                    seconds[batched] = (time.process_time() - start) / part.numel()
            tried = 6
        batched = self._batched(len(v) - tried)
        step = self._fit if batched else 1
        parts = (v[start : start + step] for start in range(tried, len(v), step))
        yield from ((part, batched and len(part) > 1) for part in parts)

    @property
    def _fit(self) -> int:
        """Return how many vectors' gradients fit into the budget."""
        return self.network.budget.count(self.network.item_size * self.plan.width * self.f.shape[0] * 3)

    def _uses(self, v: Tensor, batched: bool, first: bool, last: LastCall | None = None) -> list[Use]:
        """Return the gradients for vectors v of the outputs, (K, N * T, C), or of `last`'s input, (K, N, H)."""
        start, v = time.process_time(), self.positions.shaped(v, lead=1) if last is None else v
        scale = _scale(v) if self.f.dtype is torch.float16 else 1.0
        of, before = self.f, self.calls
        if last is not None:
            of, before = last.source, [call for call in self.calls if call is not last.call]
        sent = self._send((v * scale if scale != 1 else v).to(of.dtype), batched, of, before)
        self.plan.seconds.setdefault(batched, (time.process_time() - start) / (len(v) * self.f.numel()))
        calls, index = [], 0
        for call in before:
            gs = sent[index : index + len(call.edges)]
            calls.append((call, [g.to(self.dtype) / scale if scale != 1 else g.to(self.dtype) for g in gs]))
            index += len(call.edges)
        k, n = v.shape[:2]
        layout, network = self.network.weights.layout, self.network.replica
        with self._differentiable():  # some rules run parts of the network again
            found = self.plan.uses(layout, calls, n, v, self.inputs, network, self.network.reduce, first)
        none = v.new_zeros(1, 1, 1)
        uses = [
            NoUse(none.expand(k, n, size)) if use is None else use
            for use, size in zip(found, layout.sizes, strict=True)
        ]
        for use, shape in zip(uses, layout.shapes, strict=True):
            use.within(min(_AT_ONCE, self.network.budget.count(self.network.item_size, share=0.125)))
            use.rows = shape[0] if shape else 1
        return uses

    def _send(self, v: Tensor, batched: bool, of: Tensor, calls: Sequence[Recorded]) -> list[Tensor]:
        """Return gradients of <v[k], of> at the outputs of the recorded calls, (K, *shape)."""
        edges = [edge for call in calls for edge in call.edges]
        kinds = [kind for call in calls for kind in zip(call.shapes, call.dtypes, strict=True)]
        if not edges:
            return []
        if batched:
            try:
                with quiet():
                    out = [sent_back(of, edges, part, True, self.attached) for part in v.split(self._fit)]
                return [
                    zeros_for(_joined([part[i] for part in out]), torch.Size((len(v), *shape)), dtype, v)
                    for i, (shape, dtype) in enumerate(kinds)
                ]
            except RuntimeError:  # an operation without a batching rule: do not try again
                self.plan.seconds[True] = float("inf")
        if self.attached or len(v) == 1:
            rows = [sent_back(of, edges, vector, create_graph=self.attached) for vector in v]
            sent = [[zeros_for(row[i], *kind, v) for row in rows] for i, kind in enumerate(kinds)]
            return [torch.stack(gs) if len(gs) > 1 else gs[0].unsqueeze(0) for gs in sent]
        out = [v.new_empty((len(v), *shape), dtype=dtype) for shape, dtype in kinds]
        for k, vector in enumerate(v):  # only one vector's gradients are there beside those of all
            for all_of_it, g in zip(out, sent_back(of, edges, vector), strict=True):
                all_of_it[k] = 0 if g is None else g
        return out

    def _batched(self, k: int) -> bool:
        """Return whether vectors go back many at once. Tries each way once, then takes the cheaper one."""
        seconds = self.plan.seconds
        several = min(k, self._fit) > 1
        return several and (True not in seconds or (False in seconds and seconds[True] <= seconds[False]))


def _one_by_one(plan: Plan) -> bool:
    """Return whether it was found to be cheaper to send vectors back one by one."""
    return plan.seconds.get(False, math.inf) < plan.seconds.get(True, math.inf)


def _doubled(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def _scale(v: Tensor) -> float:
    """Return a power of two that lifts vectors out of the range that half precision rounds to zero."""
    return 2.0 ** (4 - math.ceil(math.log2(max(float(v.abs().max()), 1e-30))))


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    """Concatenate the gradients of several groups of vectors. Returns None if there are none."""
    there = [part for part in parts if part is not None]
    return torch.cat(there) if len(there) > 1 else there[0] if there else None
