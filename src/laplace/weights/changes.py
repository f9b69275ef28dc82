"""Whether a network is still the one that was fitted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laplace.replica import unwrap
from laplace.weights.last_layer import LastLayer
from laplace.weights.selection import Selection


@dataclass(frozen=True)
class Snapshot:
    """Where every parameter lay and how often it had been written to: a few integers, no copy."""

    versions: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        """The network as it is now."""
        network = unwrap(model)
        tensors = (*network.parameters(), *network.buffers())
        return cls(tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors))


def what_changed(model: nn.Module, weights: LastLayer | Selection, mean: Tensor, then: Snapshot | None) -> str | None:
    """In words, what is no longer as it was when `mean` and `then` were taken; None where nothing is."""
    layout = weights.layout
    now = zip(layout.gather(weights.tensors(model)), layout.split(mean), strict=True)
    if not all(torch.equal(t.to(m), m) for t, m in now):
        return f"the uncertain weights of {weights.described} have changed"
    if then is not None and Snapshot.of(model) != then:
        return "weights or statistics of the network have been written to, moved or replaced"
    return None
