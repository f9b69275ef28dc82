"""Weights of any layers: runs any network on a batch and sends vectors back to the outputs of its layers.

Gradients are taken with respect to layer outputs, never to weights: those would be thrown away.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.jit import ScriptModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from laplace.algebra import gram, precise_gram
from laplace.backprop.at_positions import Rows, RowsJacobian, Vectors
from laplace.backprop.audit import EXAMPLES, make_plan
from laplace.backprop.hessian import HessianMoments
from laplace.backprop.plan import Learned, Plan, zeros_for
from laplace.backprop.record import NotSeen, Recorded, Recorder
from laplace.backprop.uses import Dense, Use, Written, along, split
from laplace.batches import Inputs
from laplace.budget import Budget
from laplace.curvature.output import OutputCurvature
from laplace.errors import ModelError, quiet
from laplace.positions import Positions
from laplace.replica import replicate
from laplace.weights.selection import Selection

_NARROW = 2**18  # numbers in the outputs of all layers, up to which batches are run together


class Network:
    """Runs a replica of a network; makes its plan on the first batch."""

    linear = False

    def __init__(
        self,
        model: nn.Module,
        weights: Selection,
        budget: Budget,
        plan: Plan | None = None,
        reduce: bool = False,
        twice_differentiable: bool = False,
        class_dim: int | None = -1,
    ) -> None:
        self.replica, self.weights = replicate(model, set(weights.layout.names)), weights
        self.class_dim = class_dim
        self.budget, self.plan, self.reduce = budget, plan, reduce
        self.twice_differentiable = twice_differentiable
        self._read = 0  # numbers in an example's inputs
        self.item_size = max(
            [4, *(p.element_size() for p in self.replica.parameters())]
        )  # bytes of a gradient's number
        self._recorder: tuple[Plan | None, Recorder | None] = (None, None)
        if any(isinstance(module, ScriptModule) for module in self.replica.modules()):
            raise ModelError(
                "a scripted or traced module cannot be looked into. Use the network that it was made from, or "
                "subset_of_weights='last_layer'."
            )

    def room(self) -> int:
        """As many as a narrow network computes in the time that it takes to call it."""
        if self.plan is None or not self.plan.width:
            return 0
        numbers = min(_NARROW, self.budget.chunk // 64)
        return min(numbers // self.plan.width, 4 * numbers // max(1, self._read))

    def forward(self, inputs: Inputs, with_grad: bool = False) -> NetworkForward:
        """Run a batch with its graph; gradients with respect to the inputs only `with_grad`."""
        inputs = inputs.normal_tensors()
        self._read = sum(t.numel() for t in inputs.tensors()) // (inputs.size or 1)
        plan, own = self.planned(inputs), False  # whether it is of this batch
        while True:
            try:
                f, calls = self._recorded(inputs, plan, with_grad)
            except NotSeen as failure:
                plan, own = self._make_plan(inputs, plan.without(failure.paths)), True
                continue
            misfits = plan.misfits(f, calls)
            if not misfits:
                rows = Rows(Positions.of(f, self.class_dim))
                return NetworkForward(self, plan, inputs, f, calls, with_grad, rows)
            plan, own = self._make_plan(inputs, plan.without(misfits) if own else plan.learned), True

    def _recorded(self, inputs: Inputs, plan: Plan, attached: bool) -> tuple[Tensor, list[Recorded]]:
        with torch.inference_mode(False), torch.enable_grad(), self._kernels():
            return self._recorder_for(plan).run(self.readable(inputs, plan), self.replica, attached)

    def _recorder_for(self, plan: Plan) -> Recorder:
        """Its hooks stay on the replica, which nobody else has, until there is another plan."""
        made_for, recorder = self._recorder
        if recorder is None or made_for is not plan:
            recorder = Recorder(self.replica, plan.hooked, plan.learned.repeated, plan.opened)
            self._recorder = plan, recorder
        return recorder

    def _kernels(self) -> AbstractContextManager[Any]:
        """Fused attention has no second derivative; the plain one has."""
        return sdpa_kernel(SDPBackend.MATH) if self.twice_differentiable else nullcontext()

    def planned(self, inputs: Inputs) -> Plan:
        """The plan, made anew where the old one was made on a single example."""
        if self.plan is None or (self.plan.examples == 1 and (inputs.size or 1) > 1):
            return self._make_plan(inputs, None if self.plan is None else self.plan.learned)
        return self.plan

    def _make_plan(self, inputs: Inputs, learned: Learned | None) -> Plan:
        if self._recorder[1] is not None:
            self._recorder[1].remove()
            self._recorder = (None, None)
        self.plan = make_plan(self.replica, self.weights.layout.whole, inputs, learned)
        return self.plan

    def readable(self, inputs: Inputs, plan: Plan) -> Inputs:
        """Inputs that the network may write to, if it does: they are read again."""
        return inputs.map(torch.clone) if plan.learned.writes else inputs

    def chunks(self, inputs: Inputs, n_outputs: int) -> Iterator[Inputs]:
        """The inputs cut so that the gradients of all outputs, at all positions, fit into the budget."""
        if inputs.size is None:
            yield inputs
            return
        plan = self.planned(inputs.normal_tensors())
        width, positions = plan.width, 1
        if math.prod(plan.outputs) > n_outputs:
            positions = self._positions(inputs).count
            width = width * positions * n_outputs // math.prod(plan.outputs)  # as many as this batch is padded to
        step = self.budget.count(self.item_size * width * (2 * n_outputs * positions + 4), share=0.5)
        for start in range(0, inputs.size, step):
            yield inputs.part(start, start + step)

    def planned_positions(self, inputs: Inputs) -> Positions:
        """The shape of the outputs that the plan was made on: of these inputs, where there was none."""
        plan = self.planned(inputs.normal_tensors())
        return Positions.of(torch.empty(plan.examples, *plan.outputs, device="meta"), self.class_dim)

    def _positions(self, inputs: Inputs) -> Positions:
        """The shape of the outputs, from a run on a few examples."""
        with torch.inference_mode(False), torch.no_grad():
            return Positions.of(inputs.part(0, EXAMPLES).map(torch.clone).call(self.replica), self.class_dim)


class NetworkForward:
    """One run with its graph: everything is sent back through it."""

    held = 2**62  # a batch's graph is not kept for later

    def __init__(
        self, network: Network, plan: Plan, inputs: Inputs, f: Tensor, calls: list[Recorded], attached: bool, rows: Rows
    ) -> None:
        self.network, self.plan, self.inputs, self.f = network, plan, inputs, f  # f in the network's own shape
        self.calls, self.attached = calls, attached
        self.dtype = torch.promote_types(f.dtype, torch.float32)
        self.rows, self.positions = rows, rows.positions
        self.outputs = self._counted(f if attached else f.detach())

    def _counted(self, f: Tensor, lead: int = 0) -> Tensor:  # (..., *own shape) -> (..., M, C)
        rows = self.positions.rows(f, lead).to(self.dtype)
        return rows if self.rows.kept is None else rows.index_select(lead, self.rows.kept)

    def counting(self, kept: Tensor) -> NetworkForward:  # (M',), indices into the rows
        """The same run, of which some rows count."""
        kept = kept if self.rows.kept is None else self.rows.kept[kept]
        parts = (self.network, self.plan, self.inputs, self.f, self.calls, self.attached)
        return NetworkForward(*parts, Rows(self.positions, kept))

    def cut(self) -> Iterator[tuple[NetworkForward, slice]]:
        """The same in parts of consecutive rows, where not even one example's gradients fit at once."""
        step = max(1, self._fit // self.positions.c)
        if self.positions.n > 1 or len(self.outputs) <= step:
            yield self, slice(None)
            return
        for index in torch.arange(len(self.outputs), device=self.f.device).split(step):
            yield self.counting(index), slice(int(index[0]), int(index[-1]) + 1)

    def moments(self, curvature: OutputCurvature) -> Iterator[NetworkMoments]:
        """Second moments for the vectors of a root of `curvature`, as many at a time as the budget allows."""
        counts = self.rows.counts(curvature.counts)
        for i, (part, batched) in enumerate(self._parts(self.vectors(curvature))):
            uses = self._uses(part, batched, first=i == 0)
            for use in uses:
                use.counting(counts)
            yield NetworkMoments(uses, self.network)

    def vectors(self, curvature: OutputCurvature) -> Vectors:
        """The vectors of output space whose outer products sum to `curvature`."""
        return self.rows.vectors(curvature)

    def sent(self, v: Tensor) -> list[Use]:
        """The gradients for these vectors."""
        return self._uses(v, self._batched(len(v)), first=True)

    def hessian(self, loss: Callable[[Tensor], Tensor]) -> HessianMoments:
        """Second derivatives of a loss of the outputs in all parameters."""
        named, layout = dict(self.network.replica.named_parameters()), self.network.weights.layout
        tensors = [named[name] for name in layout.names]
        numbers = 4 * self.plan.width * self.f.shape[0] + layout.whole.n_params
        chunk = self.network.budget.count(self.network.item_size * numbers, share=0.5)
        with torch.enable_grad():
            return HessianMoments(loss(self._counted(self.f)), tensors, layout, chunk, self.dtype)

    def jacobian(self, outputs: Tensor | None = None) -> Written | RowsJacobian:
        """Gradients of the unit vectors of output space at every position, or of the asked ones."""
        v = self.rows.units(outputs, self.outputs)
        written = self._written(self._uses(v, self._batched(len(v)), first=True))
        plain = not self.positions.several and self.rows.kept is None
        return written if plain else RowsJacobian(written, self.rows, self._written)

    def _written(self, uses: list[Use]) -> Written:
        return Written(uses, lambda: _rows(uses, self.network))

    def linearised(self, steps: Tensor) -> Tensor:  # (S, P) -> (S, N, C)
        """J step."""
        return self.jacobian().along(steps)

    def perturbed(self, steps: Tensor) -> Tensor:  # (S, P) -> (S, N, C)
        """The network run with each of the moved weights, on the replica's shared memory: nothing is written to."""
        together = self.network.budget.count(8 * self.dtype.itemsize * self.plan.width * self.f.shape[0], share=0.5)
        if len(steps) > together:
            return torch.cat([self.perturbed(part) for part in steps.split(together)])
        layout, replica = self.network.weights.layout, self.network.replica
        parameters = dict(replica.named_parameters())
        tensors = layout.moved([parameters[name].detach() for name in layout.names], steps)
        moved = dict(zip(layout.names, tensors, strict=True))

        def run(chosen: dict[str, Tensor]) -> Tensor:
            return self.network.readable(self.inputs, self.plan).call_with(replica, chosen)

        with torch.inference_mode(False), quiet():
            try:
                drawn = vmap(run, randomness="same")(moved)
            except RuntimeError:  # an operation without a batching rule
                drawn = torch.stack([run({k: t[s] for k, t in moved.items()}) for s in range(len(steps))])
        return self._counted(drawn, lead=1)

    def _parts(self, v: Vectors) -> Iterator[tuple[Tensor, bool]]:
        """Vectors to be sent back as many at once as fit or one by one, whichever is cheaper: both are tried first."""
        seconds, tried = self.plan.seconds, 0
        if not seconds and len(v) > 6 and self._fit > 1:
            yield v[:1], False  # what is done once for all vectors is done here
            for part, batched in ((v[1:2], False), (v[2:6], True)):
                start = time.process_time()
                yield part, batched  # back when all that is taken of them has been
                if seconds.get(batched) != float("inf"):
                    seconds[batched] = (time.process_time() - start) / part.numel()
            tried = 6
        batched = self._batched(len(v) - tried)
        step = self._fit if batched else 1
        parts = (v[start : start + step] for start in range(tried, len(v), step))
        yield from ((part, batched and len(part) > 1) for part in parts)

    @property
    def _fit(self) -> int:
        """How many vectors' gradients fit into the budget."""
        return self.network.budget.count(self.network.item_size * self.plan.width * self.f.shape[0] * 3)

    def _uses(self, v: Tensor, batched: bool, first: bool) -> list[Use]:  # v: (K, N * T, C)
        start, v = time.process_time(), self.positions.shaped(v, lead=1)
        scale = _scale(v) if self.f.dtype is torch.float16 else 1.0
        sent = self._send((v * scale if scale != 1 else v).to(self.f.dtype), batched)
        self.plan.seconds.setdefault(batched, (time.process_time() - start) / v.numel())
        calls, index = [], 0
        for call in self.calls:
            gs = sent[index : index + len(call.edges)]
            calls.append((call, [g.to(self.dtype) / scale if scale != 1 else g.to(self.dtype) for g in gs]))
            index += len(call.edges)
        k, n = v.shape[:2]
        layout, network = self.network.weights.layout, self.network.replica
        found = self.plan.uses(layout, calls, n, v, self.inputs, network, self.network.reduce, first)
        none = v.new_zeros(1, 1, 1)
        uses = [
            Dense(none.expand(k, n, size)) if use is None else use
            for use, size in zip(found, layout.sizes, strict=True)
        ]
        for use in uses:
            use.within(self.network.budget.count(self.network.item_size, share=0.125))
        return uses

    def _send(self, v: Tensor, batched: bool) -> list[Tensor]:
        """Gradients of <v[k], f> at every recorded output, (K, *shape)."""
        edges = [edge for call in self.calls for edge in call.edges]
        kinds = [kind for call in self.calls for kind in zip(call.shapes, call.dtypes, strict=True)]
        if not edges:
            return []
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "create_graph": self.attached}
        if batched:
            try:
                with quiet():
                    out = [
                        torch.autograd.grad(self.f, edges, part, is_grads_batched=True, **options)
                        for part in v.split(self._fit)
                    ]
                return [
                    zeros_for(_joined([part[i] for part in out]), torch.Size((len(v), *shape)), dtype, v)
                    for i, (shape, dtype) in enumerate(kinds)
                ]
            except RuntimeError:  # an operation without a batching rule: remembered
                self.plan.seconds[True] = float("inf")
        rows = [torch.autograd.grad(self.f, edges, vector, **options) for vector in v]
        sent = [[zeros_for(row[i], *kind, v) for row in rows] for i, kind in enumerate(kinds)]
        return [torch.stack(gs) if len(gs) > 1 else gs[0].unsqueeze(0) for gs in sent]

    def _batched(self, k: int) -> bool:
        """Whether vectors go back as many at once as fit: what was cheaper so far; each way is tried once."""
        seconds = self.plan.seconds
        several = min(k, self._fit) > 1
        return several and (True not in seconds or (False in seconds and seconds[True] <= seconds[False]))


class NetworkMoments:
    """Second moments of all parameters, for some vectors."""

    held = 2**62  # a batch's graph and gradients are not kept for later

    def __init__(self, parameters: list[Use], network: Network) -> None:
        self.parameters, self.network = parameters, network

    def merged(self, others: Sequence[Any]) -> NetworkMoments:
        raise NotImplementedError("the moments of one run are taken before the next")

    def gram(self) -> Tensor:  # (P, P)
        total = None
        for rows in _rows(self.parameters, self.network):
            term = precise_gram(rows.flatten(0, 1))
            total = term if total is None else total.add_(term)
        assert total is not None
        return total

    def products(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Coefficients <G, u> of all parameters together, sent back; some examples at a time."""
        vectors, n = vectors.to(self.parameters[0].g), self.parameters[0].shape[1]
        each = sum(use.load(len(vectors)) for use in self.parameters)
        step = self.network.budget.count(self.network.item_size * each, share=0.25)
        total = None
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            uses = [use.settled(part) for use in self.parameters]
            coefficients = along(uses, split(vectors, uses))
            term = torch.cat([use.back(coefficients) for use in uses], 1)
            total = term if total is None else total.add_(term)
        assert total is not None
        return total

    def gram_along(self, steps: Sequence[Tensor]) -> Tensor:  # (r, r)
        return gram(along(self.parameters, steps).flatten(1).T.double())

    def trace(self) -> Tensor:
        return torch.stack([use.trace() for use in self.parameters]).sum()


def _scale(v: Tensor) -> float:
    """A power of two that lifts vectors out of the range in which half precision rounds them to zero."""
    return 2.0 ** (4 - math.ceil(math.log2(max(float(v.abs().max()), 1e-30))))


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    """The gradients of some vectors after those of others; None where there are none."""
    there = [part for part in parts if part is not None]
    return torch.cat(there) if len(there) > 1 else there[0] if there else None


def _rows(uses: list[Use], network: Network) -> Iterator[Tensor]:
    """The gradients of all parameters side by side, (K, n, P), for some examples at a time."""
    k, n, _ = uses[0].shape
    width = sum(use.shape[2] for use in uses)
    step = network.budget.count((network.item_size + 8) * k * width, share=0.25)  # 8: their copy in float64
    for start in range(0, n, step):
        yield torch.cat([use.contracted(slice(start, min(start + step, n))) for use in uses], 2)
