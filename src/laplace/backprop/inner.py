"""Predict from inside the network: from the input of a last linear layer whose output is the network's, f = W phi + b.

The unit vectors of output space reach that layer's output unchanged. So its own Jacobian is phi (x) e_c, which is never
written out (head_jacobian.py). They reach its input as the rows of W, and C vectors with as many numbers as there are
features are sent on from there. Nothing grows with C^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from laplace.backprop.head_jacobian import HeadJacobianOf
from laplace.backprop.layers.linear import Linear
from laplace.backprop.plan import Plan
from laplace.backprop.record import Recorded
from laplace.backprop.sending import sent_back
from laplace.network.pieces import whole


@dataclass(frozen=True)
class LastCall:
    """Records a call of a linear layer that returned the network's output."""

    call: Recorded
    layer: nn.Linear
    source: Tensor  # its input with its graph, (N, H)

    def begins(self, f: Tensor, v: Tensor) -> bool:  # (N, C), (N, C)
        """Return whether autograd confirms that vectors v reach the input as v W. Hooks may change that."""
        if not self.source.requires_grad:
            return True
        (found,) = sent_back(f, [self.source], v)
        if found is None:
            return False
        expected = (v @ whole(self.layer.weight).detach().to(v)).to(found)
        near = min(10 * torch.finfo(f.dtype).eps ** 0.5, 0.1)
        return bool((found - expected).abs().max() <= near * expected.abs().max())

    def jacobians(
        self, plan: Plan, outputs: Tensor | None, dtype: torch.dtype, centred: bool
    ) -> dict[str, HeadJacobianOf]:
        """Return the Jacobians in the layer's own tensors, by their names in the layout."""
        read = self.call.args[0] if self.call.args else self.call.kwargs["input"]
        phi, n, c = read.to(dtype), len(read), self.layer.out_features
        inputs = {"weight": phi, "bias": phi.new_ones(1, 1)}
        keys = plan.owners[self.call.name].keys
        return {name: HeadJacobianOf(inputs[key], n, c, outputs, centred) for key, name in keys.items()}

    def rows(self, outputs: Tensor | None, attached: bool, centred: bool) -> Tensor:  # (C', H)
        """Return the rows of W, which are the gradients of the asked outputs, or contrasts, at the layer's input."""
        weight = whole(self.layer.weight)
        weight = weight if attached else weight.detach()
        weight = weight - weight.mean(0) if centred else weight
        return weight if outputs is None else weight[outputs]


def find_last_call(plan: Plan, calls: Sequence[Recorded], f: Tensor) -> LastCall | None:
    """Find the linear layer that returned f, if its tensors are its own parameters that nothing else uses."""
    root = plan.owners.get("")
    if root is not None and root.rule.whole:
        return None  # the whole-network rule needs the vectors of output space
    for path, owner in plan.owners.items():
        last = last_call(calls, path, f)
        if last is None or not isinstance(owner.rule, Linear):
            continue
        computed = last.layer._parameters.get("weight") is None
        others = {name for other in plan.owners.values() if other is not owner for name in other.keys.values()}
        return None if computed or not others.isdisjoint(owner.keys.values()) else last
    return None


def last_call(calls: Sequence[Recorded], path: str, f: Tensor) -> LastCall | None:
    """Return a module's call if it is its only one, reads (N, H), and returned the very tensor f, (N, C)."""
    own = [call for call in calls if call.name == path]
    if len(own) != 1 or f.dim() != 2 or f.grad_fn is None or len(own[0].edges) != 1:
        return None
    (call,), (edge,), end = own, own[0].edges, get_gradient_edge(f)
    if edge.node is not end.node or edge.output_nr != end.output_nr or not isinstance(call.module, nn.Linear):
        return None
    source = call.source
    if source is None or source.dim() != 2 or len(source) != len(f):
        return None
    return LastCall(call, call.module, source)
