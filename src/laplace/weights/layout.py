"""Arrange the uncertain weights in one vector of length P: tensor after tensor, each in row-major order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.errors import ModelError


def require_real(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse complex weights. The Gaussian is over real numbers."""
    for name, p in parameters:
        if p.is_complex():
            raise ModelError(
                f"the weights {name!r} are complex ({p.dtype}); uncertain weights must be real numbers. Keep them as a "
                "real parameter of shape (..., 2) and use torch.view_as_complex in forward, or choose others: "
                "subset_of_weights='last_layer', or names of layers."
            )


@dataclass(frozen=True, eq=False)
class Scattered:
    """Lists the uncertain weights of a tensor if not all are uncertain."""

    index: Tensor  # (p,), ascending, into the flattened tensor
    shape: tuple[int, ...]  # of the whole tensor

    def gather(self, flat: Tensor) -> Tensor:  # (..., numel) -> (..., p)
        """Return the uncertain weights of a flattened tensor."""
        return flat[..., self.index.to(flat.device)]

    def scatter_add(self, tensor: Tensor, steps: Tensor) -> Tensor:  # shape, (S, p) -> (S, *shape)
        """Return the tensor with each step added to its uncertain weights."""
        flat = tensor.reshape(1, -1).expand(len(steps), -1)
        return flat.index_add(1, self.index.to(flat.device), steps).reshape(len(steps), *self.shape)


@dataclass(frozen=True, eq=False)
class Layout:
    """Holds names and shapes of the blocks. A block is a parameter tensor, or its uncertain weights, of shape (p,).

    Attributes:
        names: the names of the parameters, in the order of the flat vector of weights.
        shapes: the shape of each block.
        scattered: for each block, which weights of the tensor it has, or None for a whole tensor. () if all are whole.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    scattered: tuple[Scattered | None, ...] = ()

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, Tensor]]) -> Layout:
        """Return the layout of whole named parameters in their order. Refuses complex ones."""
        parameters = list(parameters)
        require_real(parameters)
        pairs = [(name, tuple(p.shape)) for name, p in parameters]
        return cls(tuple(n for n, _ in pairs), tuple(s for _, s in pairs))

    @classmethod
    def of_parts(
        cls, names: Sequence[str], shapes: Sequence[tuple[int, ...]], indices: Sequence[Tensor | None]
    ) -> Layout:
        """Return the layout of tensors whose weights at `indices` are uncertain, or all weights (None)."""
        pairs = list(zip(shapes, indices, strict=True))
        if all(index is None for index in indices):
            return cls(tuple(names), tuple(shapes))
        return cls(
            tuple(names),
            tuple(shape if index is None else (len(index),) for shape, index in pairs),
            tuple(None if index is None else Scattered(index, shape) for shape, index in pairs),
        )

    @property
    def parts(self) -> tuple[Scattered | None, ...]:
        """Return one entry per block: which weights of the tensor it has, or None for all."""
        return self.scattered or (None,) * len(self.names)

    @property
    def tensor_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the whole tensors."""
        return tuple(s if part is None else part.shape for s, part in zip(self.shapes, self.parts, strict=True))

    @property
    def whole(self) -> Layout:
        """Return the layout of the whole tensors."""
        return Layout(self.names, self.tensor_shapes)

    @property
    def sizes(self) -> list[int]:
        """Return the number of weights in each block."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def n_params(self) -> int:
        """Return the number of weights in all blocks, P."""
        return sum(self.sizes)

    def only(self, indices: Sequence[int]) -> Layout:
        """Return the layout of some blocks."""
        parts = tuple(self.scattered[i] for i in indices) if self.scattered else ()
        return Layout(tuple(self.names[i] for i in indices), tuple(self.shapes[i] for i in indices), parts)

    def split(self, vector: Tensor) -> list[Tensor]:  # (..., P) -> [(..., p_b)]
        """Split a vector into its blocks, as views."""
        return list(vector.split(self.sizes, dim=-1))

    def gather(self, tensors: Sequence[Tensor], lead: int = 0) -> list[Tensor]:  # [(..., *shape)] -> [(..., p_b)]
        """Return the uncertain weights of whole tensors, flat. The first `lead` dimensions are batch dimensions."""
        flat = [t.reshape(*t.shape[:lead], -1) for t in tensors]
        return [t if part is None else part.gather(t) for t, part in zip(flat, self.parts, strict=True)]

    def join(self, tensors: Sequence[Tensor], lead: int = 0) -> Tensor:  # [(..., *shape)] -> (..., P)
        """Return the uncertain weights of whole tensors as one vector."""
        return torch.cat(self.gather(tensors, lead), -1)

    def moved(self, tensors: Sequence[Tensor], steps: Tensor) -> list[Tensor]:  # [shape], (S, P) -> [(S, *shape)]
        """Return whole tensors with each step added to their uncertain weights."""
        out = []
        for tensor, step, part in zip(tensors, self.split(steps), self.parts, strict=True):
            step = step.to(tensor.dtype)
            moved = tensor + step.reshape(len(step), *tensor.shape) if part is None else part.scatter_add(tensor, step)
            out.append(moved)
        return out
