"""Recognise layers that apply one matrix at every position: nn.Linear, and convolutions with kernel size 1."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

Pointwise = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def is_pointwise(module: Any) -> TypeGuard[Pointwise]:
    """Return whether a module applies one matrix at every position."""
    if isinstance(module, nn.Linear):
        return True
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    plain = {*module.kernel_size, *module.stride, module.groups} == {1}
    return plain and not isinstance(module.padding, str) and set(module.padding) == {0}


def features(module: Pointwise, phi: Tensor) -> Tensor:  # -> (N, ..., H)
    """Return the input of the module with the features last."""
    return phi if isinstance(module, nn.Linear) else phi.movedim(1, -1)


def applied(module: Pointwise, phi: Tensor) -> Tensor:
    """Apply the module's weight and bias to an input, in the input's dtype."""
    bias = None if module.bias is None else module.bias.to(phi.dtype)
    if isinstance(module, nn.Linear):
        return nn.functional.linear(phi, module.weight.to(phi.dtype), bias)
    out = torch.einsum("ch,nh...->nc...", module.weight.flatten(1).to(phi.dtype), phi)
    return out if bias is None else out + bias.reshape(-1, *[1] * (out.dim() - 2))
