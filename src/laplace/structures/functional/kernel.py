"""Compute the kernel of the linearised network: inner products of gradients, in float64.

Only tiles on and below the diagonal are computed; the others are their transposes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from laplace.backprop.uses import Use
from laplace.linalg.symmetric import gram
from laplace.structures.functional.structure import Gradients

Tile = tuple[slice, slice, list[Use], list[Use]]


def kernels(gradients: Gradients, points: int, independent: bool) -> list[Tensor]:
    """Return <G, G'> for each parameter: of all points and vectors, (1, M K, M K), or per vector, (K, M, M)."""
    blocks: list[Tensor] = []
    for rows, columns, left, right in _tiles(gradients, independent):
        if not blocks:
            k = left[0].shape[0]
            shape = (k, points, points) if independent else (1, points * k, points * k)
            blocks = [torch.empty(shape, dtype=torch.float64, device=use.g.device) for use in left]
        for block, one, two in zip(blocks, left, right, strict=True):
            term = one.double().cross_each(two.double()) if independent else cross(one, two)
            block[:, rows, columns], block[:, columns, rows] = term, term.mT
    return blocks


def own_kernels(uses: Sequence[Use], independent: bool, limit: int) -> list[Tensor]:
    """Return the same for the gradients of a single batch.

    Those at many positions are contracted once, in their own dtype, if they fit in `limit` bytes. Products are in
    float64, so that the kernel is positive semi-definite.
    """
    blocks = []
    for use in uses:
        k, n, p = use.shape
        if use.positions > 1 and k * n * p * (use.g.element_size() + 8) <= limit:
            g = torch.cat([use.contracted(part) for part in use.parts()], 1).double()  # (K, N, p)
            rows = g if independent else g.transpose(0, 1).flatten(0, 1).unsqueeze(0)
            blocks.append(torch.stack([gram(each.T) for each in rows]))
        else:
            use = use.double()
            blocks.append(use.cross_each(use) if independent else cross(use, use).unsqueeze(0))
    return blocks


def kernel(gradients: Gradients, points: int) -> Tensor:  # (M K, M K)
    """Return <G, G'> of all points and vectors, summed over all parameters."""
    total = torch.empty(0)
    for rows, columns, left, right in _tiles(gradients, False):
        if not len(total):
            side = points * left[0].shape[0]
            total = torch.empty(side, side, dtype=torch.float64, device=left[0].g.device)
        term = cross(left[0], right[0])
        for one, two in zip(left[1:], right[1:], strict=True):
            term += cross(one, two)
        total[rows, columns], total[columns, rows] = term, term.T
    return total


def cross(one: Use, two: Use) -> Tensor:  # (N K, M K)
    """Return <G, G'> of one parameter for all points and vectors."""
    return one.double().cross(two.double()).flatten(2).flatten(0, 1)


def _tiles(gradients: Gradients, independent: bool) -> Iterator[Tile]:
    """Yield the tiles on and below the diagonal: their rows, their columns, and the gradients of both."""
    start = 0
    for left in gradients():
        stop, other = start + _rows(left, independent), 0
        for right in gradients():
            if other > start:
                break
            end = other + _rows(right, independent)
            yield slice(start, stop), slice(other, end), left, right
            other = end
        start = stop


def _rows(uses: list[Use], independent: bool) -> int:
    k, n, _ = uses[0].shape
    return n if independent else n * k
