"""Whether a network is still the one that was fitted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from laplace.replica import unwrap
from laplace.weights.last_layer import LastLayer
from laplace.weights.selection import Selection


@dataclass(frozen=True)
class Snapshot:
    """Where every parameter and buffer lay, how often it had been written to, and two sums of its values: no copy.

    Addresses and versions are compared at each prediction. They mean nothing in a copy of the network (None there), and
    writes through `.data` leave them as they are; sums are compared where an answer would be kept for good.
    """

    versions: tuple[tuple[int, int], ...] | None
    sums: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        """The network as it is now."""
        return cls(_versions(model), tuple(map(_sums, _tensors(model))))

    def elsewhere(self) -> Snapshot:
        """The same of a copy of the network."""
        return replace(self, versions=None)

    def same_place(self, model: nn.Module) -> bool:
        """Whether nothing was written to, moved or replaced, as far as torch tells."""
        return self.versions == _versions(model)

    def same_values(self, model: nn.Module) -> bool:
        """Whether all values have the same sums."""
        now = [_sums(t) for t in _tensors(model)]
        return len(now) == len(self.sums) and all(_near(a, b) for a, b in zip(now, self.sums, strict=True))


def what_changed(
    model: nn.Module, weights: LastLayer | Selection, mean: Tensor, then: Snapshot | None, thoroughly: bool = False
) -> str | None:
    """In words, what is no longer as it was when `mean` and `then` were taken; None where nothing is."""
    layout = weights.layout
    now = zip(layout.gather(weights.tensors(model)), layout.split(mean), strict=True)
    if not all(torch.equal(t.to(m), m) for t, m in now):
        return f"the uncertain weights of {weights.described} have changed"
    if then is None:
        return None
    if thoroughly or then.versions is None:
        return None if then.same_values(model) else "weights or statistics of the network have changed"
    return (
        None
        if then.same_place(model)
        else "weights or statistics of the network have been written to, moved or replaced"
    )


def _tensors(model: nn.Module) -> list[Tensor]:
    network = unwrap(model)
    return [*network.parameters(), *network.buffers()]


def _versions(model: nn.Module) -> tuple[tuple[int, int], ...]:
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in _tensors(model))


def _sums(t: Tensor) -> tuple[float, float]:
    """The sum and the norm of all values."""
    t = t.detach()
    t = t.abs() if t.is_complex() else t
    numbers = t if t.is_floating_point() else t.to(torch.float64)
    return float(t.sum(dtype=torch.float64)), float(torch.linalg.vector_norm(numbers, dtype=torch.float64))


def _near(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Equal but for the order of a sum."""
    if any(map(math.isnan, (*a, *b))):
        return [*map(math.isnan, a)] == [*map(math.isnan, b)]
    return abs(a[0] - b[0]) <= 1e-9 * (abs(b[0]) + b[1]) and abs(a[1] - b[1]) <= 1e-9 * b[1]
