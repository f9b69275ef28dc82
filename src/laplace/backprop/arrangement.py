"""Find where the examples are in a tensor inside the network: first, second, or flattened with the positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arrangement:
    """Says how a module's tensors hold N examples.

    first     (N, ...)
    second    (T, N, ...)
    rows      (N * T, ...), an example's rows together
    columns   (T * N, ...), an example's rows N apart
    """

    kind: str = "first"

    def split(self, tensor: Tensor, n: int, lead: int = 0) -> Tensor | None:
        """Return the tensor with its examples at dimension `lead`, (N, ...), or None if it holds none (a constant)."""
        if not self.holds(tensor.shape[lead:], n):
            return None
        if self.kind == "first":
            return tensor
        if self.kind == "second":
            return tensor.transpose(lead, lead + 1)
        if self.kind == "rows":
            return tensor.unflatten(lead, (n, -1))
        return tensor.unflatten(lead, (-1, n)).transpose(lead, lead + 1)

    @property
    def flattened(self) -> bool:
        """Return whether examples share a dimension with positions: the shape does not show whose row it is."""
        return self.kind in ("rows", "columns")

    def holds(self, shape: torch.Size, n: int) -> bool:
        """Return whether a tensor of that shape can hold n examples."""
        if self.kind == "first":
            return len(shape) > 0 and shape[0] == n
        if self.kind == "second":
            return len(shape) > 1 and shape[1] == n
        return len(shape) > 0 and shape[0] > 0 and shape[0] % n == 0

    def per_example(self, shape: torch.Size, n: int) -> tuple[int, ...]:
        """Return what one of n examples has of a tensor of that shape: the same in batches of any size."""
        if self.kind == "first":
            return shape[1:]
        return (shape[0], *shape[2:]) if self.kind == "second" else (shape[0] // n, *shape[1:])

    def alone(self, example: Tensor) -> Tensor:
        """Return one example of `split` as the module takes a batch of one."""
        if self.kind == "first":
            return example.unsqueeze(0)
        return example.unsqueeze(1) if self.kind == "second" else example

    def of_alone(self, tensor: Tensor) -> Tensor:
        """Return what a module gives for a batch of one, as one example of `split`."""
        if self.kind == "first":
            return tensor.squeeze(0)
        return tensor.squeeze(1) if self.kind == "second" else tensor


def detect(touched: list[Tensor], examples: list[int], n: int) -> Arrangement | None:
    """Find the arrangement of a tensor of n examples, or return None if only interacting examples explain it.

    `touched` has one boolean mask for each of some `examples`: where gradients that concern this example alone are not
    zero.
    """
    for kind in ("first", "second", "rows", "columns"):
        arrangement = Arrangement(kind)
        if arrangement.flattened and touched[0].shape[0] == n:
            continue
        parts = [arrangement.split(mask, n) for mask in touched]
        others = (part[torch.arange(n) != i] for i, part in zip(examples, parts, strict=True) if part is not None)
        if all(part is not None for part in parts) and not any(bool(rest.any()) for rest in others):
            return arrangement
    return None


def is_float(tensor: Tensor) -> bool:
    """Return whether gradients can reach a tensor of this dtype."""
    return tensor.is_floating_point() or tensor.dtype in (torch.complex64, torch.complex128)


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written to. Tensors of inference mode do not count writes."""
    return 0 if tensor.is_inference() else tensor._version
