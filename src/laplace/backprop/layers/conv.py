"""Convolutions: a is the patch that the kernel sees at each output position, and g the gradient at the output.

Stride, padding, padding mode, dilation and groups are supported as in torch, in one, two and three dimensions.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import grad

from laplace.backprop.activations import Activations
from laplace.backprop.covariances import Basis
from laplace.backprop.layers.base import Call, Room, Rule
from laplace.backprop.layers.half_unfold import half_unfolded_gram, half_unfolding_pays
from laplace.backprop.layers.linear import bias
from laplace.backprop.layers.shifts import shifted_gram, shifts_apply
from laplace.backprop.outer import Outer
from laplace.backprop.uses import Use
from laplace.linalg.symmetric import exact, plain_gram, total

_CHUNK = 2**20  # numbers unfolded at a time, few enough for the cache
_CONVOLUTIONS: Final = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}  # by the dimensions of their inputs
_WEIGHT_GRADIENTS: Final = {3: grad.conv1d_weight, 4: grad.conv2d_weight, 5: grad.conv3d_weight}


class Conv(Rule):
    """Computes G_W = sum over positions of g patch^T, per group; G_b = sum of g."""

    name = "conv"

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        conv = call.module
        assert isinstance(conv, nn.modules.conv._ConvNd)
        g = call.gradient(gs[0])  # (K, N, O, *positions), or (K, N, frames, O, *positions)
        x = call.by_example(call.read("input")).to(g.dtype)
        sides = len(conv.kernel_size)
        if g.dim() == sides + 4:  # frames count as further positions
            g = g.flatten(4).permute(0, 1, 3, 2, 4)
        else:
            x = x.unsqueeze(1)
        g = g.flatten(3).unflatten(2, (conv.groups, -1))  # (K, N, Gr, O, T)
        uses: dict[str, Use] = {}
        weight = None
        if "weight" in keys:
            seen = Patches(conv, x, g.shape[4])
            if not first:  # further vectors come, which read the same patches; a prediction sends all at once
                seen = call.kept.once(f"patches in {g.dtype}", lambda room: Patches(conv, x, g.shape[4], room))
            uses["weight"] = weight = Outer(seen, g, reduce, first)
        if "bias" in keys:
            uses["bias"] = bias(g, weight, first)
        return uses


class Patches(Activations):
    """Unfolds activations that are patches under the kernel, for some examples at a time.

    Where a convolution does the same, nothing is unfolded: Q^T a is a convolution whose kernels are the columns of Q,
    and sum_t g a^T is the gradient of a convolution in its weight, with one group for each example.
    """

    def __init__(
        self, conv: nn.modules.conv._ConvNd, x: Tensor, positions: int, room: Room | None = None
    ) -> None:  # x: (N, frames, C, *size)
        self.conv, self.x = conv, x
        self._room = room or Room(0)
        self._unfolded: dict[tuple[int, int, int], Tensor] = {}
        self.shape = (x.shape[0], conv.groups, conv.weight[0].numel(), positions)
        self.nbytes = x.nbytes

    def read(self, part: slice) -> Tensor:  # (n, Gr, I, T)
        """Return the patches of some examples, kept for the next vectors where there is room."""
        key = part.indices(len(self.x))
        found = self._unfolded.get(key)
        if found is None:
            found = self._unfold(self.x[part])
            if self._room.take(found.numel()):
                self._unfolded[key] = found
        return found

    def turned(self, part: slice, basis: Basis | None, dtype: torch.dtype) -> Tensor:  # (n, Gr, I, T)
        if type(basis) is not Basis or not _convolves(self.x, dtype):
            return super().turned(part, basis, dtype)
        x = self.x[part]
        image = padded(self.conv, x.flatten(0, 1))
        kernels = basis.transposed.reshape(-1, *self.conv.weight.shape[1:])
        if image.dim() == 4:  # features last, as whoever multiplies by Q^T a reads them
            image = image.contiguous(memory_format=torch.channels_last)
        options = {"stride": self.conv.stride, "dilation": self.conv.dilation, "groups": self.conv.groups}
        seen = _CONVOLUTIONS[image.dim()](image, kernels, **options).flatten(2)  # (n * frames, Gr * I, T / frames)
        return _by_example(seen.unflatten(1, (self.conv.groups, -1)), x.shape[0], x.shape[1])

    def contracted(self, part: slice, g: Tensor) -> Tensor:  # (K, n, Gr, O, T) -> (K, n, Gr, O, I)
        x = self.x[part]
        k, n, groups, o, _ = g.shape
        attached = torch.is_grad_enabled() and (g.requires_grad or x.requires_grad)
        if x.shape[1] > 1 or attached or not _convolves(x, g.dtype):
            return super().contracted(part, g)
        image = padded(self.conv, x.squeeze(1))
        sizes = _positions(self.conv, image)
        channels = image.reshape(1, -1, *image.shape[2:])  # (1, n * C, *size)
        sent = g.permute(1, 2, 0, 3, 4).reshape(1, n * groups * k * o, *sizes)
        shape = (n * groups * k * o, *self.conv.weight.shape[1:])
        options = {"stride": self.conv.stride, "dilation": self.conv.dilation, "groups": n * groups}
        found = _WEIGHT_GRADIENTS[image.dim()](channels, shape, sent, **options)
        return found.reshape(n, groups, k, o, -1).permute(2, 0, 1, 3, 4)

    def _unfold(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            return patches(self.conv, x.squeeze(1))
        return _by_example(patches(self.conv, x.flatten(0, 1)), x.shape[0], x.shape[1])

    def features(self, part: slice, index: Tensor) -> Tensor:  # (n, F, T)
        x = self.x[part]
        seen = windows(self.conv, padded(self.conv, x.flatten(0, 1)))
        sides = len(self.conv.kernel_size)
        place = torch.unravel_index(index, (self.conv.in_channels, *self.conv.kernel_size))
        seen = seen.permute(0, 1, *range(2 + sides, 2 + 2 * sides), *range(2, 2 + sides))
        found = seen[(slice(None), *place)].flatten(2)  # (n * frames, F, T / frames)
        return found.unflatten(0, x.shape[:2]).transpose(1, 2).flatten(2)

    def gram(self) -> Tensor:  # (Gr, I, I)
        n, groups, i, t = self.shape
        x = self.x.double() if exact(n, i, t) else self.x
        if shifts_apply(self.conv, x):
            return shifted_gram(x.flatten(0, 1)).unsqueeze(0)
        if x.dim() == 5 and half_unfolding_pays(self.conv, image := padded(self.conv, x.flatten(0, 1))):
            step = max(1, _CHUNK // (image[0].numel() * self.conv.kernel_size[1]))
            return total(half_unfolded_gram(self.conv, part) for part in image.split(step)).unsqueeze(0)
        step = max(1, _CHUNK // (groups * i * t))
        parts = (by_feature(self.conv, x[s : s + step].flatten(0, 1)) for s in range(0, n, step))
        return total(plain_gram(part[0].T).unsqueeze(0) if groups == 1 else part @ part.mT for part in parts)

    def mean(self) -> Tensor:  # (N, Gr, I, 1)
        n, groups, i, t = self.shape
        step = max(1, _CHUNK // (groups * i * t))
        return torch.cat([self.read(slice(s, s + step)).mean(3, keepdim=True) for s in range(0, n, step)])


def _convolves(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether torch's convolutions are fast and exact: on other devices they may round to half precision."""
    return x.device.type == "cpu" and x.dtype == dtype == torch.float32


def _by_example(x: Tensor, n: int, frames: int) -> Tensor:  # (n * frames, Gr, I, T / frames) -> (n, Gr, I, T)
    """Take an example's frames together, as further positions."""
    return x if frames == 1 else x.unflatten(0, (n, frames)).permute(0, 2, 3, 1, 4).flatten(3)


def _positions(conv: nn.modules.conv._ConvNd, image: Tensor) -> list[int]:
    """Return how many positions the kernel has along each side of a padded image."""
    sides = zip(image.shape[2:], conv.kernel_size, conv.stride, conv.dilation, strict=True)
    return [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d in sides]


def patches(conv: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:  # (M, C, *size) -> (M, Gr, I, T)
    """Return the patches under the kernel at every output position, split into groups of channels."""
    x = windows(conv, padded(conv, x))
    sides = len(conv.kernel_size)
    kernel, positions = range(2 + sides, 2 + 2 * sides), range(2, 2 + sides)
    x = x.permute(0, 1, *kernel, *positions)
    return x.reshape(x.shape[0], conv.groups, conv.weight[0].numel(), -1)


def by_feature(conv: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:  # (M, C, *size) -> (Gr, I, M * T)
    """Return the patches with all examples' positions side by side, ready for one product."""
    x = windows(conv, padded(conv, x).transpose(0, 1).contiguous())
    sides = len(conv.kernel_size)
    kernel, positions = range(2 + sides, 2 + 2 * sides), range(2, 2 + sides)
    return x.permute(0, *kernel, 1, *positions).reshape(conv.groups, conv.weight[0].numel(), -1)


def windows(conv: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:  # (A, B, *size) -> (A, B, *positions, *kernel)
    """Return a view with one window of the kernel's size per output position."""
    for side, (k, s, d) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)):
        x = x.unfold(2 + side, d * (k - 1) + 1, s)[..., ::d]
    return x


def padded(conv: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:
    """Return the input with the convolution's own padding applied."""
    around = conv._reversed_padding_repeated_twice
    if not any(around):
        return x
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return F.pad(x, around, mode=mode)
