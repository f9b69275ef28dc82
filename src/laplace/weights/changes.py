"""Find out whether a network has changed since it was fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laplace.network import digests
from laplace.network.pieces import behind, is_stand_in, written
from laplace.network.replica import unwrap
from laplace.network.sharded import is_replaced
from laplace.weights.last_layer import FoundLastLayer
from laplace.weights.selection import Selection


@dataclass(frozen=True)
class Snapshot:
    """Remembers each parameter's and buffer's address, version counter and digest of values, without copying it.

    Addresses and versions are compared at each prediction. They are None for a copy of the network, where they mean
    nothing. They do not see writes through `.data`, so that digests are compared, too, before a result is stored.
    """

    versions: tuple[tuple[int, int], ...] | None
    values: Mapping[str, Mapping[str, Any]] | None = None  # digests by name; an older pickle has none

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        """Take a snapshot of the network."""
        return cls(_versions(model), digests.of_state(model))

    def elsewhere(self) -> Snapshot:
        """Return the snapshot for a copy of the network."""
        return replace(self, versions=None)

    def same_place(self, model: nn.Module) -> bool:
        """Return whether no tensor was written to, moved or replaced, as far as torch can tell."""
        return self.versions == _versions(model)

    def differs(self, other: Snapshot) -> str:
        """Describe which tensors have other values. Returns '' if none has."""
        if self.values is None or other.values is None:
            return ""
        return digests.differing(self.values, other.values)


def what_changed(
    model: nn.Module, weights: FoundLastLayer | Selection, mean: Tensor, then: Snapshot | None, thoroughly: bool = False
) -> str | None:
    """Describe what has changed since `mean` and `then` were taken. Returns None if nothing has."""
    layout = weights.layout
    trios = zip(weights.tensors(model), layout.parts, layout.split(mean), strict=True)
    now = [(t.flatten() if part is None else part.gather(t.flatten()), m) for t, part, m in trios if not is_stand_in(t)]
    if not all(torch.equal(t.to(m), m) for t, m in now):  # of pieces, the snapshot tells
        return f"the uncertain weights of {weights.described} have changed"
    if then is None:
        return None
    if thoroughly or then.versions is None:
        differ = then.differs(Snapshot.of(model))
        return f"{differ}: weights or statistics of the network have changed" if differ else None
    return (
        None
        if then.same_place(model)
        else "weights or statistics of the network have been written to, moved or replaced"
    )


def _tensors(model: nn.Module) -> list[Tensor]:
    network = unwrap(model)
    return [*network.parameters(), *network.buffers()]


def _versions(model: nn.Module) -> tuple[tuple[int, int], ...]:
    tensors = _tensors(model)
    if pieces := behind(tensors):
        tensors = [t for t in tensors if not behind([t])]
    own = tuple((_address(t), 0 if t.is_inference() else t._version) for t in tensors)
    return own if not pieces else (*own, *written(pieces), (int(is_replaced(unwrap(model))), 0))


def _address(t: Tensor) -> int:
    return t.data_ptr() if t.layout is torch.strided else id(t)
