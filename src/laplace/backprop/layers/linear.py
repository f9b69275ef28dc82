"""nn.Linear with any leading dimensions: a is its input, g the gradient at its output."""

from __future__ import annotations

from torch import Tensor

from laplace.backprop.layers.base import Call, Rule
from laplace.backprop.uses import Outer, Stored, Use


class Linear(Rule):
    """G_W = sum over positions of g a^T; G_b = sum of g."""

    name = "linear"

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        a, g = call.by_example(call.args[0]), call.by_example(gs[0], 1)
        g = g.reshape(*g.shape[:2], -1, 1, g.shape[-1])  # (K, N, T, 1, O)
        uses: dict[str, Use] = {}
        if "weight" in keys:
            a = a.reshape(a.shape[0], -1, 1, a.shape[-1])  # (N, T, 1, I)
            uses["weight"] = Outer(Stored(a), g, reduce, first)
        if "bias" in keys:
            uses["bias"] = bias(g.sum(2, keepdim=True).squeeze(3), first)
        return uses


def bias(g: Tensor, first: bool) -> Outer:  # (K, N, 1, O)
    """A bias is a weight with constant input 1, its g summed over positions: exact."""
    return Outer(Stored(g.new_ones(g.shape[1], 1, 1, 1)), g.unsqueeze(3), False, first, summed=True)
