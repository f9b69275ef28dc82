"""Compute second moments of patches by unfolding them along one side only.

Let u_r hold what the kernel's columns see of the padded row r: C k_w features at the W' horizontal positions. At
vertical stride 1 and dilation d, kernel row i sees u_(y + i d) at the vertical position y, so that

    A[(i, .), (i', .)] = sum over y of u_(y + i d) u_(y + i' d)^T

sums products of rows that lie (i' - i) d apart. Pairs (i, i') of the same difference share all products but those
at the upper and lower edge. Each product is computed once; only sums are taken, so that nothing cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SMALL = 2**12  # numbers that the kernel's columns see of one row of all images: with fewer, unfolding is cheaper


def half_unfolding_pays(conv: nn.modules.conv._ConvNd, padded: Tensor) -> bool:  # (M, C, H, W)
    """Return whether a convolution is of this kind, and its rows have something in common."""
    if type(conv) is not nn.Conv2d or conv.groups != 1 or conv.stride[0] != 1 or conv.kernel_size[0] == 1:
        return False
    numbers = padded.numel() // padded.shape[2] * conv.kernel_size[1] // conv.stride[1]
    return numbers >= _SMALL and padded.shape[2] > 2 * (conv.kernel_size[0] - 1) * conv.dilation[0]


def half_unfolded_gram(conv: nn.modules.conv._ConvNd, padded: Tensor) -> Tensor:  # (M, C, H, W) -> (I, I)
    """Return the sum over examples and positions of patch patch^T."""
    (height, width), (down, across) = conv.kernel_size, conv.dilation
    c, rows = padded.shape[1], padded.shape[2]
    seen = padded.permute(1, 2, 0, 3).unfold(3, across * (width - 1) + 1, conv.stride[1])[..., ::across]
    u = seen.permute(0, 4, 1, 2, 3).reshape(c * width, rows, -1)  # (q, H, M W')
    positions = rows - down * (height - 1)  # H'
    a = u.new_empty(height, height, len(u), len(u))
    for apart in range(height):
        for i, product in enumerate(_by_first_row(u, apart * down, positions, down, height - apart)):
            a[i, i + apart], a[i + apart, i] = product, product.T
    a = a.unflatten(3, (c, width)).unflatten(2, (c, width))  # (i, i', c, j, c', j')
    return a.permute(2, 0, 3, 4, 1, 5).reshape(c * height * width, -1)


def _by_first_row(u: Tensor, apart: int, positions: int, step: int, count: int) -> list[Tensor]:  # (q, q) each
    """Return the sums over r = i step, ..., i step + positions - 1 of u_r u_(r + apart)^T for i < count."""
    first = (count - 1) * step  # rows from here to `positions` are in every sum
    inner = u[:, first:positions].flatten(1) @ u[:, first + apart : positions + apart].flatten(1).T
    if not first:
        return [inner]
    by_row = u.transpose(0, 1)  # (H, q, M W')
    upper = torch.bmm(by_row[:first], by_row[apart : apart + first].mT)
    below = slice(positions, positions + first), slice(positions + apart, positions + apart + first)
    lower = torch.bmm(by_row[below[0]], by_row[below[1]].mT)
    found = []
    for i in range(count):
        found.append(inner + upper[i * step :].sum(0) + lower[: i * step].sum(0))
    return found
