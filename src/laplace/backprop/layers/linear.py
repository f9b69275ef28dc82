"""nn.Linear with any leading dimensions: a is its input, and g the gradient at its output."""

from __future__ import annotations

from torch import Tensor

from laplace.backprop.activations import Ones, Stored
from laplace.backprop.layers.base import Call, Rule
from laplace.backprop.outer import Outer
from laplace.backprop.uses import Use


class Linear(Rule):
    """Computes G_W = sum over positions of g a^T; G_b = sum of g."""

    name = "linear"

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        g = call.gradient(gs[0])
        g = g.reshape(*g.shape[:2], -1, g.shape[-1]).mT.unsqueeze(2)  # (K, N, 1, O, T)
        uses: dict[str, Use] = {}
        weight = None
        if "weight" in keys:
            a = call.by_example(call.read("input")).to(g.dtype)
            a = a.reshape(a.shape[0], -1, a.shape[-1]).mT.unsqueeze(1)  # (N, 1, I, T)
            uses["weight"] = weight = Outer(Stored(a), g, reduce, first)
        if "bias" in keys:
            uses["bias"] = bias(g, weight, first)
        return uses


def columns(t: Tensor) -> Tensor:  # (..., T, D) -> (..., 1, D, T)
    """Move positions to the columns, in one group."""
    return t.mT.unsqueeze(-3)


def bias(g: Tensor, weight: Outer | None, first: bool) -> Outer:  # (K, N, Gr, O, T)
    """Return the use of a bias: a weight with constant input 1 and g summed over positions. This is exact."""
    g = (g if g.shape[4] == 1 else g.sum(4, keepdim=True)).flatten(2, 3).unsqueeze(2)
    return Outer(Ones(g), g, False, first, weight, summed=True)
