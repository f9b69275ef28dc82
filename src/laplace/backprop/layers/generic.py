"""Explain any other parameter: exact per-example gradients through the smallest module that holds all its uses.

The module is run again on one example at a time (vectorised with torch.func if that works, otherwise in a loop), and
the gradient at its outputs is pulled back to the parameter. Costs a forward and a backward pass of that module per
vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from laplace.backprop.arrangement import is_float
from laplace.backprop.layers.base import Call, Rule
from laplace.backprop.uses import DenseUse, Use
from laplace.errors import quiet
from laplace.linalg.autocast import as_called
from laplace.network.pieces import whole
from laplace.network.pytree import replace_tensors, tensors_in
from laplace.network.replica import call_with


class Generic(Rule):
    """Computes G[k, n] by a vector-Jacobian product of the owning module at example n."""

    name = "generic"

    def __init__(self) -> None:
        self.vectorised = True
        self.constants: set[tuple[int, int]] = set()  # inputs that hold no examples: number of inputs, and index

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        parameters = {key: whole(call.module.get_parameter(key)).detach() for key in keys}
        inputs = tensors_in((call.args, call.kwargs))
        split = [self._split(call, t, (len(inputs), i)) for i, t in enumerate(inputs)]
        cotangents = [call.gradient(g) for g in gs]  # (K, N, ...)

        def outputs(chosen: dict[str, Tensor], examples: list[Tensor]) -> list[Tensor]:
            own = [t.clone() for t in examples]  # cloned: the module may write to them
            alone = [call.arrangement.alone(t) if s is not None else t for t, s in zip(own, split, strict=True)]
            args, kwargs = replace_tensors((call.args, call.kwargs), iter(alone))
            with as_called():
                out = call_with(call.module, chosen, args, kwargs)
            made = [t for t in tensors_in(out) if is_float(t)]
            found = [call.arrangement.of_alone(made[i]) for i in call.reached]
            return [t.to(g.dtype) for t, g in zip(found, gs, strict=True)]

        dims = [0 if s is not None else None for s in split]
        values = [t if s is None else s for t, s in zip(inputs, split, strict=True)]
        grads = self.pull_back(outputs, parameters, values, dims, cotangents)
        return {key: DenseUse(grad.reshape(*grad.shape[:2], -1).to(gs[0].dtype)) for key, grad in grads.items()}

    def _split(self, call: Call, tensor: Tensor, slot: tuple[int, int]) -> Tensor | None:
        """Return an input by example, or None if it is a constant.

        A mask of T positions is a constant even in a batch of T examples: the audit, on fewer examples, has seen that.
        """
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
        """Return the gradient of <cotangent, outputs> in each parameter, per vector and example."""
        if self.vectorised:
            try:
                return self._with_vmap(outputs, parameters, values, dims, cotangents)
            except Exception:
                self.vectorised = False  # no batching rule: from now on the loop below, which is exact, too
        return self._in_a_loop(outputs, parameters, values, dims, cotangents)

    def _with_vmap(
        self, outputs: Any, parameters: dict[str, Tensor], values: list[Tensor], dims: Any, cotangents: list[Tensor]
    ) -> dict[str, Tensor]:
        # We do not give every example its own copy of the parameters, which needs no torch.func: batching rules of some
        # operations are wrong for batched weights (an embedding's padding is forgotten).
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
                    for key, grad in zip(leaves, _pulled(out, gs, [*leaves.values()], attached), strict=True):
                        rows[key][j].append(grad)
        return {key: torch.stack([torch.stack(row) for row in table]) for key, table in rows.items()}


def _pulled(outputs: list[Tensor], gs: list[Tensor], leaves: list[Tensor], attached: bool) -> list[Tensor]:
    """Return the gradients of <g, outputs>, with zeros if the outputs do not depend on a leaf."""
    inner = _inner(outputs, gs)
    if not inner.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(inner, leaves, retain_graph=True, allow_unused=True, create_graph=attached)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def _inner(outputs: list[Tensor], gs: list[Tensor]) -> Tensor:
    """Return the real part of <g, output>. Its gradient is what autograd gives when g is sent back from the output."""
    total = gs[0].new_zeros((), dtype=gs[0].real.dtype)
    for output, g in zip(outputs, gs, strict=True):
        if output.shape != g.shape:
            raise ValueError(f"one example's output has shape {tuple(output.shape)}; {tuple(g.shape)} was expected.")
        product = (g.conj() * output).sum()
        total = total + (product.real if product.is_complex() else product)
    return total


class WholeNetwork(Generic):
    """Applies a generic rule at the root: the network itself, run on one example of its inputs."""

    name = "generic, whole network"
    whole = True

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        network: nn.Module = call.module
        inputs = call.kwargs["inputs"]  # laplace.network.inputs.Inputs
        parameters = {key: whole(network.get_parameter(key)).detach() for key in keys}
        values = inputs.tensors()
        dims = [0 if own else None for own in inputs.own(call.n)]  # None: shared by all examples

        def outputs(chosen: dict[str, Tensor], examples: list[Tensor]) -> list[Tensor]:
            own = iter(
                [t.clone() if d is None else t.clone().unsqueeze(0) for t, d in zip(examples, dims, strict=True)]
            )
            return [inputs.with_tensors(own).call_with(network, chosen).squeeze(0).to(gs[0].dtype)]

        grads = self.pull_back(outputs, parameters, values, dims, gs)
        return {key: DenseUse(grad.reshape(*grad.shape[:2], -1).to(gs[0].dtype)) for key, grad in grads.items()}
