"""All weights: runs any network on a batch and sends vectors back to the outputs of its layers.

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

from laplace.algebra import gram
from laplace.backprop.plan import Plan, make_plan, zeros_for
from laplace.backprop.record import Recorded, Recorder
from laplace.backprop.uses import Dense, Use
from laplace.batches import Inputs
from laplace.budget import Budget
from laplace.curvature.hessian import HessianMoments, hessian
from laplace.curvature.output import OutputCurvature
from laplace.errors import ModelError, quiet
from laplace.replica import replicate
from laplace.weights.all_weights import AllWeights

_NARROW = 2**17  # numbers in the outputs of all layers, up to which batches are run together


class Network:
    """Runs a replica of a network; makes its plan on the first batch."""

    linear = False

    def __init__(
        self,
        model: nn.Module,
        weights: AllWeights,
        budget: Budget,
        plan: Plan | None = None,
        reduce: bool = False,
        twice_differentiable: bool = False,
    ) -> None:
        self.replica, self.weights = replicate(model, set(weights.layout.names)), weights
        self.budget, self.plan, self.reduce = budget, plan, reduce
        self.twice_differentiable = twice_differentiable
        self._recorder: tuple[Plan | None, Recorder | None] = (None, None)
        if any(isinstance(module, ScriptModule) for module in self.replica.modules()):
            raise ModelError(
                "a scripted or traced module cannot be looked into. Use the network that it was made from, or "
                "subset_of_weights='last_layer'."
            )

    def room(self) -> int:
        """As many as a narrow network computes in the time that it takes to call it."""
        return 0 if self.plan is None else min(_NARROW, self.budget.chunk // 64) // max(1, self.plan.width)

    def forward(self, inputs: Inputs, with_grad: bool = False) -> NetworkForward:
        """Run a batch with its graph; gradients with respect to the inputs only `with_grad`."""
        inputs = inputs.normal_tensors()
        plan = self.planned(inputs)
        f, calls = self._recorded(inputs, plan, with_grad)
        if not plan.fits(calls, f.shape[0]):
            plan = self.plan = make_plan(self.replica, self.weights.layout, inputs)
            f, calls = self._recorded(inputs, plan, with_grad)
        return NetworkForward(self, plan, inputs, f, calls, with_grad)

    def _recorded(self, inputs: Inputs, plan: Plan, attached: bool) -> tuple[Tensor, list[Recorded]]:
        recorder = self._recorder_for(plan)
        try:
            with torch.inference_mode(False), torch.enable_grad(), self._kernels():
                recorder.start(inputs.size, attached)
                return inputs.call(self.replica), recorder.calls
        finally:
            recorder.stop()

    def _recorder_for(self, plan: Plan) -> Recorder:
        """Its hooks stay on the replica, which nobody else has, until there is another plan."""
        made_for, recorder = self._recorder
        if recorder is None or made_for is not plan:
            if recorder is not None:
                recorder.remove()
            recorder = Recorder(self.replica, plan.hooked, plan.repeated)
            self._recorder = plan, recorder
        return recorder

    def _kernels(self) -> AbstractContextManager[Any]:
        """Fused attention has no second derivative; the plain one has."""
        return sdpa_kernel(SDPBackend.MATH) if self.twice_differentiable else nullcontext()

    def planned(self, inputs: Inputs) -> Plan:
        """The plan, made anew where the old one was made on a single example."""
        if self.plan is None or (self.plan.examples == 1 and (inputs.size or 1) > 1):
            self.plan = make_plan(self.replica, self.weights.layout, inputs)
        return self.plan

    def chunks(self, inputs: Inputs, n_outputs: int) -> Iterator[Inputs]:
        """The inputs cut so that the gradients of all outputs fit into the budget."""
        if inputs.size is None:
            yield inputs
            return
        width = self.planned(inputs.normal_tensors()).width
        step = self.budget.count(4 * width * (2 * n_outputs + 4), share=0.5)
        for start in range(0, inputs.size, step):
            yield inputs.part(start, start + step)


class NetworkForward:
    """One run with its graph: everything is sent back through it."""

    held = 2**62  # a batch's graph is not kept for later

    def __init__(
        self, network: Network, plan: Plan, inputs: Inputs, f: Tensor, calls: list[Recorded], attached: bool
    ) -> None:
        self.network, self.plan, self.inputs, self.f = network, plan, inputs, f
        self.calls, self.attached = calls, attached
        self.dtype = torch.promote_types(f.dtype, torch.float32)
        self.outputs = (f if attached else f.detach()).to(self.dtype)

    def moments(self, curvature: OutputCurvature) -> Iterator[NetworkMoments]:
        """Second moments for the vectors of a root of `curvature`, as many at a time as the budget allows."""
        for i, (part, batched) in enumerate(self._parts(curvature.root())):
            yield NetworkMoments(self._uses(part, batched, first=i == 0), self.network)

    def hessian(self, loss: Callable[[Tensor], Tensor], diagonal: bool) -> HessianMoments:
        """Second derivatives of a loss of the outputs in all parameters."""
        layout = self.network.weights.layout
        named = dict(self.network.replica.named_parameters())
        with torch.enable_grad():
            value = loss(self.f.to(self.dtype))
            chunk = self.network.budget.count(4 * self.plan.width * self.f.shape[0] * 4, share=0.5)
            h = hessian(value, [named[name] for name in layout.names], diagonal, chunk)
        return HessianMoments(h.to(self.dtype), layout.sizes)

    def jacobian(self, outputs: Tensor | None = None) -> NetworkJacobian:
        """Gradients of the unit vectors of output space, (C, N, C), or of the asked ones."""
        n, c = self.f.shape
        eye = torch.eye(c, dtype=self.dtype, device=self.f.device)
        v = (eye if outputs is None else eye[outputs]).unsqueeze(1).expand(-1, n, -1)
        return NetworkJacobian(self._uses(v, self._batched(len(v)), first=True), self.network)

    def linearised(self, steps: Tensor) -> Tensor:  # (S, P) -> (S, N, C)
        """J step: gradients of the outputs times the step, tensor by tensor."""
        parts = self.network.weights.layout.split(steps)
        uses = self.jacobian().parameters
        return torch.stack([use.along(part) for use, part in zip(uses, parts, strict=True)]).sum(0)

    def perturbed(self, steps: Tensor) -> Tensor:  # (S, P) -> (S, N, C)
        """The network run with each of the moved weights, on the replica's shared memory: nothing is written to."""
        layout, replica = self.network.weights.layout, self.network.replica
        parameters = dict(replica.named_parameters())
        moved = {
            name: parameters[name].detach() + step.reshape(len(steps), *shape).to(parameters[name].dtype)
            for name, step, shape in zip(layout.names, layout.split(steps), layout.shapes, strict=True)
        }

        def run(chosen: dict[str, Tensor]) -> Tensor:
            return self.inputs.call_with(replica, chosen)

        with torch.inference_mode(False), quiet():
            try:
                return vmap(run, randomness="same")(moved).to(self.dtype)
            except RuntimeError:  # an operation without a batching rule
                return torch.stack([run({k: t[s] for k, t in moved.items()}) for s in range(len(steps))]).to(self.dtype)

    def _parts(self, v: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Vectors to be sent back at once or one by one, whichever is cheaper: both are tried on the first few."""
        fit = self.network.budget.count(4 * self.plan.width * self.f.shape[0] * 3)
        if not self.plan.seconds and len(v) > 3 and fit > 1:
            yield v[:1], False
            yield v[1:3], True
            v = v[3:]
        batched = self._batched(len(v))
        yield from ((part, batched and len(part) > 1) for part in v.split(min(fit, len(v)) if batched else 1))

    def _uses(self, v: Tensor, batched: bool, first: bool) -> list[Use]:  # v: (K, N, C)
        start = time.process_time()
        scale = _scale(v) if self.f.dtype is torch.float16 else 1.0
        sent = self._send((v * scale if scale != 1 else v).to(self.f.dtype), batched)
        if self.plan.seconds.get(batched) != float("inf"):
            self.plan.seconds[batched] = (time.process_time() - start) / v.numel()
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
            use.chunk = self.network.budget.count(4, share=0.125)
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
                    out = torch.autograd.grad(self.f, edges, v, is_grads_batched=True, **options)
                return [
                    zeros_for(g, torch.Size((len(v), *shape)), dtype, v)
                    for g, (shape, dtype) in zip(out, kinds, strict=True)
                ]
            except RuntimeError:  # an operation without a batching rule: remembered
                self.plan.seconds[True] = float("inf")
        rows = [torch.autograd.grad(self.f, edges, vector, **options) for vector in v]
        sent = [[zeros_for(row[i], *kind, v) for row in rows] for i, kind in enumerate(kinds)]
        return [torch.stack(gs) if len(gs) > 1 else gs[0].unsqueeze(0) for gs in sent]

    def _batched(self, k: int) -> bool:
        """Whether vectors go back all at once: what was cheaper so far, if they fit; each way is tried once."""
        if 4 * k * self.plan.width * self.f.shape[0] * 3 > self.network.budget.chunk:
            return False
        seconds = self.plan.seconds
        return k > 1 and (True not in seconds or (False in seconds and seconds[True] <= seconds[False]))


class NetworkMoments:
    """Second moments of all parameters, for some vectors."""

    held = 2**62  # a batch's graph and gradients are not kept for later

    def __init__(self, parameters: list[Use], network: Network) -> None:
        self.parameters, self.network = parameters, network

    def merged(self, others: Sequence[Any]) -> NetworkMoments:
        raise NotImplementedError("the moments of one run are taken before the next")

    def gram(self) -> Tensor:  # (P, P)
        total = None
        for rows in _rows(self.parameters, self.network.budget):
            term = gram(rows.flatten(0, 1))
            total = term if total is None else total.add_(term)
        assert total is not None
        return total


class NetworkJacobian:
    """The Jacobian of the outputs in all parameters; written out for a dense posterior only, in chunks of examples."""

    def __init__(self, parameters: list[Use], network: Network) -> None:
        self.parameters, self.network = parameters, network

    def variance(self, covariance: Tensor) -> Tensor:
        parts = [((j @ covariance) * j).sum(-1).T for j in self._rows()]
        return torch.cat(parts)

    def covariance(self, covariance: Tensor) -> Tensor:
        return torch.cat([torch.einsum("cnp,dnp->ncd", j @ covariance, j) for j in self._rows()])

    def joint(self, covariance: Tensor) -> Tensor:
        j = torch.cat([part.transpose(0, 1) for part in self._rows()])  # (N, C, P)
        n, c, p = j.shape
        rows = j.reshape(n * c, p)
        return (rows @ covariance @ rows.T).reshape(n, c, n, c)

    def variance_in(self, basis: Tensor, variances: Tensor) -> Tensor:
        parts = [(j @ basis).square() @ variances.T for j in self._rows()]  # (C, n, G)
        return torch.cat(parts, 1).permute(2, 1, 0)

    def _rows(self) -> Iterator[Tensor]:
        return _rows(self.parameters, self.network.budget)


def _scale(v: Tensor) -> float:
    """A power of two that lifts vectors out of the range in which half precision rounds them to zero."""
    return 2.0 ** (4 - math.ceil(math.log2(max(float(v.abs().max()), 1e-30))))


def _rows(uses: list[Use], budget: Budget) -> Iterator[Tensor]:
    """The gradients of all parameters side by side, (K, n, P), for some examples at a time."""
    k, n, _ = uses[0].shape
    width = sum(use.shape[2] for use in uses)
    step = budget.count(4 * k * width, share=0.25)
    for start in range(0, n, step):
        yield torch.cat([use.contracted(slice(start, min(start + step, n))) for use in uses], 2)
