"""Know whether operations are being recorded, so that code may not look at the values of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

_PLAIN = frozenset({torch.float32, torch.float64})


def is_traced() -> bool:
    """Return whether torch.compile, torch.export or torch.jit.trace records what runs.

    Then a condition on the values of a tensor, or a loop whose length depends on the batch, would be recorded as it
    came out for the example inputs, or refused.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor is numbers in memory that nobody follows: then NumPy may compute with them.

    Not so if it needs a gradient, is traced, lies elsewhere, is of a subclass or of another dtype than float32 and
    float64, or if a mode of torch, a transform such as vmap, or a tangent would see the operations.
    """
    return (
        not is_traced()
        and are_numbers(x)
        and not torch._C._len_torch_dispatch_stack()
        and peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
    )


def are_numbers(x: Tensor) -> bool:
    """Return what `is_plain` asks of the tensor itself, for what operations made of plain tensors."""
    return type(x) is Tensor and x.is_cpu and not x.requires_grad and x.dtype in _PLAIN and x.layout is torch.strided
