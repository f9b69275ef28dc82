"""log K_1, the modified Bessel function of the second kind, as often differentiable as is asked for.

With k_n(z) = e^z K_n(z), which neither overflows nor underflows: k_0' = k_0 - k_1 and k_1' = k_1 - k_0 - k_1 / z.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _K0(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return torch.special.scaled_modified_bessel_k0(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (z,) = ctx.saved_tensors
        return grad * (_k0(z) - _k1(z))


class _K1(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return torch.special.scaled_modified_bessel_k1(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (z,) = ctx.saved_tensors
        return grad * (_k1(z) - _k0(z) - _k1(z) / z)


def _k0(z: Tensor) -> Tensor:
    out = _K0.apply(z)
    assert isinstance(out, Tensor)
    return out


def _k1(z: Tensor) -> Tensor:
    out = _K1.apply(z)
    assert isinstance(out, Tensor)
    return out


def log_k1(z: Tensor) -> Tensor:
    """Return log K_1(z) for z > 0."""
    return _k1(z).log() - z
