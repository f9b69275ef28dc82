"""Open nn.MultiheadAttention: its projections of query, key and value are linear layers, and so is its output's.

If query, key and value are one tensor, the fused projection is one linear layer. Otherwise it is three, with a
Kronecker pair each.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laplace.backprop.activations import Stored
from laplace.backprop.layers.base import Call, Inner, Rule, reached
from laplace.backprop.layers.linear import bias, columns
from laplace.backprop.outer import Outer
from laplace.backprop.stacked import Stacked
from laplace.backprop.uses import Use

_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_OUT = ("out_proj.weight", "out_proj.bias")


class Attention(Rule):
    """Opens every call into its linear maps: the in-projections and the out-projection."""

    name, opens, below = "attention", True, _OUT

    def __init__(self) -> None:
        self.apart = False  # whether query, key and value have been different tensors

    def opened(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Inner]]:
        assert isinstance(module, nn.MultiheadAttention)
        given = inspect.signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs)
        given.apply_defaults()
        _, query, key, value, padding, need_weights, mask, average, causal = given.arguments.values()
        if query.dim() != 3 or query.is_nested or module.bias_k is not None or module.add_zero_attn:
            raise NotImplementedError("only batched attention without bias_k, bias_v or add_zero_attn can be opened")
        read = (query,) if query is key is value else (query, key, value)
        projected = _projected(module, read)
        q, k, v = projected[0].chunk(3, -1) if len(projected) == 1 else projected
        q, k, v = (_heads(module, t) for t in (q, k, v))  # (N, heads, T, D)
        mask, causal = _mask(q, mask, padding, causal and padding is None and not need_weights)
        if need_weights:
            scores = q * q.shape[-1] ** -0.5 @ k.mT
            weights = (scores if mask is None else scores + mask).softmax(-1)
            attended = weights @ v
        else:
            weights, attended = None, F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        attended = attended.transpose(1, 2).flatten(2)
        attended = attended if module.batch_first else attended.transpose(0, 1)
        out = F.linear(attended, module.out_proj.weight, module.out_proj.bias)
        inner = [
            Inner("in", read, projected, ("in_proj_weight", "in_proj_bias", *_SEPARATE)),
            Inner("out", (attended,), (out,), _OUT),
        ]
        return (out, weights.mean(1) if weights is not None and average else weights), inner

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        own = [columns(call.gradient(g)) for g in gs]  # (K, N, 1, O, T) each
        read = [columns(call.by_example(t).to(own[0].dtype)) for t in call.args]  # (N, 1, I, T) each
        uses: dict[str, Use] = {}
        if call.kwargs["part"] == "out":
            if _OUT[0] in keys:
                uses[_OUT[0]] = Outer(Stored(read[0]), own[0], reduce, first)
            if _OUT[1] in keys:
                uses[_OUT[1]] = bias(own[0], None, first)
            return uses
        self.apart |= len(read) == 3
        if self.apart and len(read) == 1:
            read, own = read * 3, list(own[0].chunk(3, 3))
        outers = [Outer(Stored(a), g, reduce, first) for a, g in zip(read, own, strict=True)]
        if "in_proj_weight" in keys:
            uses["in_proj_weight"] = Stacked(outers) if self.apart else outers[0]
        uses |= {key: outer for key, outer in zip(_SEPARATE, outers, strict=False) if key in keys}
        if "in_proj_bias" in keys:
            uses["in_proj_bias"] = bias(torch.cat([g.sum(4, keepdim=True) for g in own], 3), None, first)
        return uses


def _projected(module: nn.MultiheadAttention, read: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return query, key and value after their projections, in one tensor if they were one."""
    weight, b = module.in_proj_weight, module.in_proj_bias
    if len(read) == 1 and weight is not None:
        return (F.linear(read[0], weight, b),)
    weights = [getattr(module, key) for key in _SEPARATE] if weight is None else weight.chunk(3)
    biases = [None] * 3 if b is None else b.chunk(3)
    read = [*read] * 3 if len(read) == 1 else read
    each = [F.linear(*triple) for triple in zip(read, weights, biases, strict=True)]
    return tuple(reached(t, (*weights, b)) for t in each)  # perhaps only some of the three are uncertain


def _heads(module: nn.MultiheadAttention, t: Tensor) -> Tensor:  # (N, T, E) or (T, N, E) -> (N, heads, T, D)
    t = t if module.batch_first else t.transpose(0, 1)
    return t.unflatten(2, (module.num_heads, -1)).transpose(1, 2)


def _mask(q: Tensor, mask: Tensor | None, padding: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
    """Return the mask that is added to the scores, (N or 1, heads or 1, T, S), and whether to use a causal one."""
    if causal:
        return None, True
    if mask is not None:
        mask = _added(mask, q).unflatten(0, (q.shape[0], -1)) if mask.dim() == 3 else _added(mask, q)
    if padding is not None:
        hidden = _added(padding, q)[:, None, None]
        mask = hidden if mask is None else mask + hidden
    return mask, False


def _added(mask: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -torch.inf) if mask.dtype is torch.bool else mask
