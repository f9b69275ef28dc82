"""Send vectors back through autograd's graph, without the slow import that `torch.autograd.grad` does.

Given vectors, `grad` imports all of sympy the first time (half a second to two, more than most fits take), just to
compare two shapes. Without vectors it does not. So a node at the root supplies the vectors instead. Both ways give the
same numbers. If sympy is imported already, we take the direct way, which is microseconds faster.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import vmap

_HEAVY = "torch.fx.experimental.symbolic_shapes"


def sent_back(
    f: Tensor,
    to: Sequence[Tensor] | Sequence[GradientEdge],
    v: Tensor,  # of f's shape, or (K, *f.shape)
    batched: bool = False,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of <v, f>, with None where f does not depend on it; (K, ...) each if `batched`.

    The graph is kept. Raises a RuntimeError if an operation cannot be batched.
    """
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "create_graph": create_graph}
    if _HEAVY in sys.modules:
        return torch.autograd.grad(f, to, v, is_grads_batched=batched, **options)
    handed = [v]
    with torch.enable_grad():
        root = _Root.apply(f, handed)
    if not batched:
        return torch.autograd.grad(root, to, **options)
    reached: list[bool] = []

    def one(vector: Tensor) -> list[Tensor]:
        handed[0] = vector
        found = torch.autograd.grad(root, to, **options)
        reached[:] = [g is not None for g in found]
        return [g for g in found if g is not None]

    rest = iter(vmap(one)(v))
    return tuple(next(rest) if there else None for there in reached)


class _Root(torch.autograd.Function):
    """Makes a number whose gradient in f is whatever `handed` holds at the time of the backward pass."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, handed: list[Tensor]) -> Tensor:
        ctx.handed = handed
        return f.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.handed[0], None
