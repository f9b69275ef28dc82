"""Random numbers that do not depend on how the data was cut into batches.

Drawn example by example from integers: the same generator gives example n the same numbers whatever batch it is in
(`torch.randn` does not: it draws in blocks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_STEPS = 2**31


@dataclass(frozen=True)
class Draws:
    """How many draws, and from which generator (None: torch's own)."""

    n: int
    generator: torch.Generator | None = None


def signs(n: int, k: int, c: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Rademacher signs, (k, n, c)."""
    bits = torch.randint(2, (n, k, c), generator=generator, device=_device(like, generator))
    return (2 * bits - 1).to(like).transpose(0, 1)


def uniforms(n: int, k: int, c: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform numbers strictly between 0 and 1 in float64, (k, n, c)."""
    steps = torch.randint(_STEPS, (n, k, c), generator=generator, device=_device(like, generator))
    return ((steps.double() + 0.5) / _STEPS).to(like.device).transpose(0, 1)


def normals_by_example(n: int, k: int, c: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers for the outputs of each example, (k, n, c)."""
    return (math.sqrt(2) * torch.erfinv(2 * uniforms(n, k, c, like, generator) - 1)).to(like.dtype)


def normals(n: int, p: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers for n draws of p weights, draw by draw, (n, p)."""
    device = _device(like, generator)
    rows = [torch.randn(p, generator=generator, dtype=like.dtype, device=device) for _ in range(n)]
    return torch.stack(rows).to(like.device)


def _device(like: Tensor, generator: torch.Generator | None) -> torch.device:
    return like.device if generator is None else generator.device
