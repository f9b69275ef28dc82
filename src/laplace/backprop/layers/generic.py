"""Any other parameter: exact per-example gradients through the smallest module that holds all its uses.

The module is run again on one example at a time (vectorised with torch.func where that works, in a loop where it
does not), and the gradient at its outputs is pulled back to the parameter. Costs a forward and a backward pass of that
module per vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from laplace.backprop.arrangement import is_float
from laplace.backprop.layers.base import Call, Rule
from laplace.backprop.uses import Dense, Use
from laplace.errors import quiet
from laplace.nested import replace_tensors, tensors_in
from laplace.precision import as_called


class Generic(Rule):
    """G[k, n] by a vector-Jacobian product of the owning module at example n."""

    name = "generic"

    def __init__(self) -> None:
        self.vectorised = True
        self.constants: set[tuple[int, int]] = set()  # inputs that held no examples: number of inputs, and which

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        parameters = {key: call.module.get_parameter(key).detach() for key in keys}
        inputs = tensors_in((call.args, call.kwargs))
        split = [self._split(call, t, (len(inputs), i)) for i, t in enumerate(inputs)]
        cotangents = [call.gradient(g) for g in gs]  # (K, N, ...)

        def outputs(chosen: dict[str, Tensor], examples: list[Tensor]) -> list[Tensor]:
            own = [t.clone() for t in examples]  # the module may write to them
            alone = [call.arrangement.alone(t) if s is not None else t for t, s in zip(own, split, strict=True)]
            args, kwargs = replace_tensors((call.args, call.kwargs), iter(alone))
            with as_called():
                out = functional_call(call.module, chosen, args, kwargs)
            found = [call.arrangement.of_alone(t) for t in tensors_in(out) if is_float(t)][: len(gs)]
            return [t.to(g.dtype) for t, g in zip(found, gs, strict=True)]

        dims = [0 if s is not None else None for s in split]
        values = [t if s is None else s for t, s in zip(inputs, split, strict=True)]
        grads = self.pull_back(outputs, parameters, values, dims, cotangents)
        return {key: Dense(grad.reshape(*grad.shape[:2], -1).to(gs[0].dtype)) for key, grad in grads.items()}

    def _split(self, call: Call, tensor: Tensor, slot: tuple[int, int]) -> Tensor | None:
        """An input by example; a mask of T positions is none though there be T examples, which the audit has seen."""
        split = None if slot in self.constants else call.arrangement.split(tensor, call.n)
        if split is None:
            self.constants.add(slot)
        return split

    def pull_back(
        self,
        outputs: Callable[[dict[str, Tensor], list[Tensor]], list[Tensor]],
        parameters: dict[str, Tensor],
        values: list[Tensor],
        dims: list[int | None],
        cotangents: list[Tensor],  # (K, N, ...) each
    ) -> dict[str, Tensor]:  # (K, N, *shape)
        """The gradient of <cotangent, outputs> in each parameter, per vector and example."""
        if self.vectorised:
            try:
                return self._with_vmap(outputs, parameters, values, dims, cotangents)
            except Exception:
                self.vectorised = False  # no batching rule: remembered, the loop below is exact too
        return self._in_a_loop(outputs, parameters, values, dims, cotangents)

    def _with_vmap(
        self, outputs: Any, parameters: dict[str, Tensor], values: list[Tensor], dims: Any, cotangents: list[Tensor]
    ) -> dict[str, Tensor]:
        def one(examples: list[Tensor], gs: list[Tensor]) -> dict[str, Tensor]:
            pulled = vjp(lambda chosen: outputs(chosen, examples), parameters)
            return pulled[1](gs)[0]

        with quiet():
            per_vector = [vmap(one, (dims, 0))(values, [g[k] for g in cotangents]) for k in range(len(cotangents[0]))]
        return {key: torch.stack([grads[key] for grads in per_vector]) for key in parameters}

    def _in_a_loop(
        self, outputs: Any, parameters: dict[str, Tensor], values: list[Tensor], dims: Any, cotangents: list[Tensor]
    ) -> dict[str, Tensor]:
        k, n = cotangents[0].shape[:2]
        attached = any(t.requires_grad for t in (*values, *cotangents))
        leaves = {key: p.clone().requires_grad_() for key, p in parameters.items()}
        rows: dict[str, list[list[Tensor]]] = {key: [[] for _ in range(k)] for key in parameters}
        with torch.enable_grad():
            for i in range(n):
                out = outputs(leaves, [v[i] if d == 0 else v for v, d in zip(values, dims, strict=True)])
                for j in range(k):
                    gs = [g[j, i] for g in cotangents]
                    grads = torch.autograd.grad(
                        out, list(leaves.values()), gs, retain_graph=True, allow_unused=True, create_graph=attached
                    )
                    for (key, leaf), grad in zip(leaves.items(), grads, strict=True):
                        rows[key][j].append(torch.zeros_like(leaf) if grad is None else grad)
        return {key: torch.stack([torch.stack(row) for row in table]) for key, table in rows.items()}


class WholeNetwork(Generic):
    """The generic rule at the root: the network itself, run on one example of its inputs."""

    name = "generic, whole network"
    whole = True

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        network: nn.Module = call.module
        inputs = call.kwargs["inputs"]  # laplace.batches.Inputs
        parameters = {key: network.get_parameter(key).detach() for key in keys}
        values = inputs.tensors()
        dims = [0 if t.shape[:1] == (call.n,) else None for t in values]  # None: the same for all examples

        def outputs(chosen: dict[str, Tensor], examples: list[Tensor]) -> list[Tensor]:
            own = iter(
                [t.clone() if d is None else t.clone().unsqueeze(0) for t, d in zip(examples, dims, strict=True)]
            )
            return [inputs.with_tensors(own).call_with(network, chosen).squeeze(0).to(gs[0].dtype)]

        grads = self.pull_back(outputs, parameters, values, dims, gs)
        return {key: Dense(grad.reshape(*grad.shape[:2], -1).to(gs[0].dtype)) for key, grad in grads.items()}
