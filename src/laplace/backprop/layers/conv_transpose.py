"""Transposed convolutions: each input position is mapped linearly to a patch of the output, and patches add up.

a is the input at a position, and g is the patch of the gradient at the output that the kernel covers there. Stride,
padding, output padding, dilation and groups are supported as in torch, in one, two and three dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laplace.backprop.activations import Stored
from laplace.backprop.layers.base import Call, Rule
from laplace.backprop.layers.conv import windows
from laplace.backprop.layers.linear import bias
from laplace.backprop.outer import Outer
from laplace.backprop.transposed import Transposed
from laplace.backprop.uses import Use


class ConvTranspose(Rule):
    """Computes G_W = sum over input positions of a patch^T, per group; G_b = sum of g."""

    name = "conv transpose"

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        conv = call.module
        assert isinstance(conv, nn.modules.conv._ConvTransposeNd)
        g = call.gradient(gs[0])  # (K, N, O, *positions), or (K, N, frames, O, *positions)
        x = call.by_example(call.read("input")).to(g.dtype)
        if g.dim() == len(conv.kernel_size) + 3:
            g, x = g.unsqueeze(2), x.unsqueeze(1)
        uses: dict[str, Use] = {}
        if "weight" in keys:
            a = x.flatten(3).unflatten(2, (conv.groups, -1))  # (N, frames, Gr, I, T)
            covered = _covered(conv, g.flatten(0, 2), x.shape[3:]).unflatten(0, g.shape[:3])
            a, covered = a.permute(0, 2, 3, 1, 4).flatten(3), covered.permute(0, 1, 3, 4, 2, 5).flatten(4)
            uses["weight"] = Transposed(Outer(Stored(a), covered, reduce, first))
        if "bias" in keys:
            uses["bias"] = bias(g.flatten(4).sum((2, 4)).unsqueeze(2).unsqueeze(4), None, first)
        return uses


def _covered(conv: nn.modules.conv._ConvTransposeNd, g: Tensor, size: torch.Size) -> Tensor:
    """Return the part of the output that the kernel covers at every input position.

    (M, O, *positions) -> (M, Gr, O * kernel, T).
    """
    around: list[int] = []
    for side, (k, s, p, d) in enumerate(zip(conv.kernel_size, conv.stride, conv.padding, conv.dilation, strict=True)):
        whole = (size[side] - 1) * s + d * (k - 1) + 1  # length that all kernels cover together
        around = [int(p), whole - int(p) - g.shape[2 + side], *around]
    seen = windows(conv, F.pad(g, around))  # a negative pad crops what no kernel covers
    sides = len(conv.kernel_size)
    seen = seen.permute(0, 1, *range(2 + sides, 2 + 2 * sides), *range(2, 2 + sides))
    return seen.reshape(len(g), conv.groups, conv.weight[0].numel(), -1)
