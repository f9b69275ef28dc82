"""How the uncertain parameters lie in one vector of length P: tensor after tensor, each in row-major order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parameter tensors; each tensor is one block."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, Tensor]]) -> Layout:
        """The layout of named parameters in their order."""
        pairs = [(name, tuple(p.shape)) for name, p in parameters]
        return cls(tuple(n for n, _ in pairs), tuple(s for _, s in pairs))

    @property
    def sizes(self) -> list[int]:
        """Number of weights in each block."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def n_params(self) -> int:
        """Number of weights in all blocks, P."""
        return sum(self.sizes)

    def split(self, vector: Tensor) -> list[Tensor]:  # (..., P) -> [(..., p_b)]
        """A vector cut into its blocks, as views."""
        return list(vector.split(self.sizes, dim=-1))

    def join(self, tensors: Sequence[Tensor]) -> Tensor:  # [shape_b] -> (P,)
        """Parameter tensors as one vector."""
        return torch.cat([t.reshape(-1) for t in tensors])
