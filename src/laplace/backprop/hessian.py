"""Compute the exact Hessian of -log p(D given theta) at unit noise, by Hessian-vector products.

Unlike other curvatures it is not a sum of squares, and may have negative eigenvalues away from an optimum. All of it,
or its diagonal, takes one product per weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace.backprop.sending import sent_back
from laplace.errors import ModelError, UnsupportedError, quiet
from laplace.weights.layout import Layout

LIMIT = 10_000  # most weights for which all of it, or its diagonal, is computed


class HessianMoments:
    """Holds a Hessian of one batch's loss, in the role that second moments of gradients have elsewhere."""

    held = 2**62

    def __init__(self, loss: Tensor, tensors: Sequence[Tensor], layout: Layout, chunk: int, dtype: torch.dtype) -> None:
        self.tensors, self.layout, self.chunk, self.dtype = tensors, layout, chunk, dtype  # `chunk` products at a time
        slopes = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
        self.slope = layout.join(
            [torch.zeros_like(p) if g is None else g for p, g in zip(tensors, slopes, strict=True)]
        )

    @property
    def parameters(self) -> list[HessianOf]:
        ends = itertools.accumulate(self.layout.sizes)
        triples = zip(self.layout.shapes, self.layout.sizes, ends, strict=True)
        return [HessianOf(self, slice(end - size, end), shape[0] if shape else 1) for shape, size, end in triples]

    def gram_along(self, steps: Sequence[Tensor]) -> Tensor:
        u = torch.cat([*steps], 1)
        return u.to(self.dtype) @ self.products(u).T

    def merged(self, others: Sequence[Any]) -> HessianMoments:
        raise NotImplementedError("Hessians of several batches cannot be merged")

    def products(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        parts = vectors.to(self.slope).split(self.chunk)
        return torch.cat([_products(self.slope, self.tensors, self.layout, part) for part in parts]).to(self.dtype)

    def gram(self) -> Tensor:
        return torch.cat([rows for _, rows in self.rows(slice(None))])

    @cached_property
    def diagonal(self) -> Tensor:  # (P,)
        return torch.cat([rows.gather(1, index.unsqueeze(1)).squeeze(1) for index, rows in self.rows(slice(None))])

    def trace(self) -> None:
        """Return None: the trace would take one product per weight."""
        return

    def rows(self, place: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield indices and rows of the Hessian at `place`, some at a time."""
        size = len(self.slope)
        if size > LIMIT:
            raise UnsupportedError(
                f"an exact Hessian of {size:,} weights needs as many Hessian-vector products; the limit is {LIMIT:,}. "
                "Take hessian_structure='lowrank', curvature='ggn', or fewer weights with subset_of_weights=."
            )
        for index in torch.arange(size, device=self.slope.device)[place].split(self.chunk):
            yield index, self.products(torch.nn.functional.one_hot(index, size))


class HessianOf:
    """Holds one parameter's block of the Hessian."""

    form, first, positions = "dense", True, 1

    def __init__(self, of: HessianMoments, place: slice, rows: int) -> None:
        self.of, self.place, self.weights, self.rows = of, place, place.stop - place.start, rows

    def gram(self) -> Tensor:
        return torch.cat([rows[:, self.place] for _, rows in self.of.rows(self.place)])

    def row_grams(self) -> Tensor:  # (O, I, I)
        parts = []
        for index, rows in self.of.rows(self.place):
            own = (index - self.place.start) // (self.weights // self.rows)
            blocks = rows[:, self.place].unflatten(1, (self.rows, -1))
            parts.append(blocks[torch.arange(len(index), device=index.device), own].double())
        return torch.cat(parts).unflatten(0, (self.rows, -1))

    def squares(self) -> Tensor:
        return self.of.diagonal[self.place]


def _products(flat: Tensor, parameters: Sequence[Tensor], layout: Layout, vectors: Tensor) -> Tensor:  # (K, P) -> same
    """Return the Hessian times each vector: all at once, or in a loop if an operation has no batching rule."""
    try:
        with quiet():
            found = sent_back(flat, parameters, vectors, batched=True)
    except RuntimeError:
        try:
            rows = [sent_back(flat, parameters, v) for v in vectors]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ModelError(
                f"the network cannot be differentiated twice: {error} Take curvature='ggn', 'mc' or 'ef', which need "
                "first derivatives only."
            ) from error
        found = [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]  # type: ignore[arg-type]
    parts = [p.new_zeros(len(vectors), *p.shape) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return layout.join(parts, lead=1)
