"""Hugging Face's `Conv1D` (GPT-2): a linear layer whose weight is stored with its inputs as rows."""

from __future__ import annotations

from torch import Tensor

from laplace.backprop.activations import Stored
from laplace.backprop.layers.base import Call, Rule
from laplace.backprop.layers.linear import bias, columns
from laplace.backprop.outer import Outer
from laplace.backprop.transposed import Transposed
from laplace.backprop.uses import Use


class Conv1D(Rule):
    """Computes G_W = sum over positions of a g^T; G_b = sum of g."""

    name = "conv1d of transformers"

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        g = call.gradient(gs[0])
        g = columns(g.reshape(*g.shape[:2], -1, g.shape[-1]))  # (K, N, 1, O, T)
        uses: dict[str, Use] = {}
        if "weight" in keys:
            a = call.by_example(call.read("x")).to(g.dtype)
            a = columns(a.reshape(len(a), -1, a.shape[-1]))  # (N, 1, I, T)
            uses["weight"] = Transposed(Outer(Stored(a), g, reduce, first))
        if "bias" in keys:
            uses["bias"] = bias(g, None, first)
        return uses
