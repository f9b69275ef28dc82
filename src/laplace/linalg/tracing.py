"""Know whether operations are being recorded, so that code may not look at the values of tensors."""

from __future__ import annotations

import torch


def is_traced() -> bool:
    """Return whether torch.compile, torch.export or torch.jit.trace records what runs.

    Then a condition on the values of a tensor, or a loop whose length depends on the batch, would be recorded as it
    came out for the example inputs, or refused.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
