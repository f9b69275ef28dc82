"""Compute second moments of 3x3 patches without unfolding them.

With stride 1 and one ring of zeros, A[(c, d), (c', d')] = sum over positions t of x_c[t + d] x_c'[t + d'] depends only
on d' - d, up to the edges. So we lay out the image with two zero columns and two zero rows, and multiply it with itself
at 13 flat shifts (views, no copies). That counts every position at which the kernel overlaps the image at all. The
positions one row or column outside, which the convolution does not visit, see a single row or column of the image. We
subtract their share, and add the corners back, which were subtracted twice.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

_SMALLEST = 6  # for images with shorter sides, unfolding is cheaper


def shifts_apply(conv: nn.modules.conv._ConvNd, x: Tensor) -> bool:  # x: (..., H, W)
    """Return whether a convolution is of this kind."""
    return (
        type(conv) is nn.Conv2d
        and tuple(conv.kernel_size) == (3, 3)
        and tuple(conv.stride) == tuple(conv.dilation) == (1, 1)
        and conv.padding in ((1, 1), "same")
        and conv.padding_mode == "zeros"
        and conv.groups == 1
        and min(x.shape[-2:]) >= _SMALLEST
    )


def shifted_gram(x: Tensor) -> Tensor:  # (M, C, H, W) -> (9 C, 9 C)
    """Return the sum over examples and positions of patch patch^T."""
    m, c, h, w = x.shape
    flat = x.new_zeros(c, m, h + 2, w + 2)
    flat[:, :, :h, :w] = x.transpose(0, 1)
    flat = flat.reshape(c, -1)
    moments = x.new_empty(5, 5, c, c)  # index (2 + dy, 2 + dx) for shift (dy, dx)
    for dy in range(3):
        for dx in range(-2 if dy else 0, 3):
            shift = dy * (w + 2) + dx
            product = flat[:, : flat.shape[1] - shift] @ flat[:, shift:].T
            moments[2 + dy, 2 + dx] = product
            moments[2 - dy, 2 - dx] = product.T
    first, second = _differences()
    a = moments[first, second].reshape(3, 3, 3, 3, c, c)  # (dy, dx, dy', dx', c, c')
    for row, dy in ((0, 2), (h - 1, 0)):
        a[dy, :, dy, :] -= _line(x[:, :, row])
    for column, dx in ((0, 2), (w - 1, 0)):
        a[:, dx, :, dx] -= _line(x[:, :, :, column])
        for row, dy in ((0, 2), (h - 1, 0)):
            corner = x[:, :, row, column]
            a[dy, dx, dy, dx] += corner.T @ corner
    return a.permute(4, 0, 1, 5, 2, 3).reshape(9 * c, 9 * c)


def _line(x: Tensor) -> Tensor:  # (M, C, L) -> (3, 3, C, C)
    """Return the same along one dimension, for all positions at which a kernel of three overlaps the line."""
    m, c, length = x.shape
    flat = x.new_zeros(c, m, length + 2)
    flat[:, :, :length] = x.transpose(0, 1)
    flat = flat.reshape(c, -1)
    moments = x.new_empty(5, c, c)
    for d in range(3):
        product = flat[:, : flat.shape[1] - d] @ flat[:, d:].T
        moments[2 + d], moments[2 - d] = product, product.T
    d = torch.arange(3)
    return moments[2 + d.unsqueeze(0) - d.unsqueeze(1)]


@cache
def _differences() -> tuple[Tensor, Tensor]:
    """Return the indices of d' - d for all pairs of offsets, (81,) each."""
    grid = torch.stack(torch.meshgrid(*[torch.arange(3)] * 4, indexing="ij")).flatten(1)  # dy, dx, dy', dx'
    return 2 + grid[2] - grid[0], 2 + grid[3] - grid[1]
