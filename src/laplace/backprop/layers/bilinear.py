"""nn.Bilinear: a linear layer whose input is the products of two inputs' features."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.backprop.activations import Stored
from laplace.backprop.entries import at
from laplace.backprop.layers.base import Call, Rule
from laplace.backprop.layers.linear import bias, columns
from laplace.backprop.outer import Outer
from laplace.backprop.uses import Use

_WIDE = 2048  # with more products of features, their second moments are not kept


class Bilinear(Rule):
    """Computes G_W = sum over positions of g (x1 (x) x2)^T; G_b = sum of g."""

    name = "bilinear"

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        g = call.gradient(gs[0])
        g = columns(g.reshape(*g.shape[:2], -1, g.shape[-1]))  # (K, N, 1, O, T)
        uses: dict[str, Use] = {}
        if "weight" in keys:
            given = dict(zip(("input1", "input2"), call.args, strict=False)) | call.kwargs
            x1, x2 = (call.by_example(given[key]).to(g.dtype) for key in ("input1", "input2"))
            a = (x1.unsqueeze(-1) * x2.unsqueeze(-2)).flatten(-2)
            outer = Outer(Stored(columns(a.reshape(len(a), -1, a.shape[-1]))), g, reduce, first)
            wide = a.shape[-1] > _WIDE
            uses["weight"] = at(outer, torch.arange(outer.weights, device=g.device)) if wide else outer
        if "bias" in keys:
            uses["bias"] = bias(g, None, first)
        return uses
