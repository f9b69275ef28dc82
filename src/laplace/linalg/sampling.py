"""Draw random numbers that do not depend on how the data was cut into batches.

Numbers are drawn as integers, example by example, so that one generator gives example n the same numbers in whatever
batch it is. (`torch.randn` draws in blocks, and does not.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_STEPS = 2**31


@dataclass(frozen=True)
class Draws:
    """How many draws to make, and from which generator (None: torch's global one)."""

    n: int
    generator: torch.Generator | None = None

    def seeded(self, device: torch.device) -> Draws:
        """Return draws that are the same in every call: from the generator if there is one, else from seed 0."""
        return self if self.generator is not None else Draws(self.n, torch.Generator(device).manual_seed(0))


def signs(n: int, k: int, c: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return Rademacher signs, (k, n, c)."""
    bits = torch.randint(2, (n, k, c), generator=generator, device=_device(like, generator))
    return (2 * bits - 1).to(like).transpose(0, 1)


def uniforms(n: int, k: int, c: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return uniform numbers strictly between 0 and 1 in float64, (k, n, c)."""
    steps = torch.randint(_STEPS, (n, k, c), generator=generator, device=_device(like, generator))
    return ((steps.double() + 0.5) / _STEPS).to(like.device).transpose(0, 1)


def normals_by_example(n: int, k: int, c: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard normal numbers for the outputs of each example, (k, n, c)."""
    return (math.sqrt(2) * torch.erfinv(2 * uniforms(n, k, c, like, generator) - 1)).to(like.dtype)


def normals(n: int, p: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard normal numbers for n draws of p weights, drawn one after the other, (n, p)."""
    device = _device(like, generator)
    rows = [torch.randn(p, generator=generator, dtype=like.dtype, device=device) for _ in range(n)]
    return torch.stack(rows).to(like.device)


def _device(like: Tensor, generator: torch.Generator | None) -> torch.device:
    return like.device if generator is None else generator.device
