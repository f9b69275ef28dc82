"""Keep a replica from one call to the next, as long as neither it nor its original has changed.

A replica copies every container on the way to a module. So it is out of date if one of these holds another object than
it did, or if a tensor lies elsewhere in memory. Both are seen without making the copy again: identities of what the
containers hold are compared, and addresses of tensors. In the same way we see whether a run has left something in the
replica itself (a counter, a cache, the last activations). Then it is not used again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable
from itertools import chain
from types import CellType, FunctionType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from laplace.network.copying import LONG, Copies, held_by
from laplace.network.operations import places
from laplace.network.pieces import behind, written
from laplace.network.replica import known_writes, replica_and_copies, unwrap
from laplace.network.sharded import is_replaced

_MAPPINGS: Final = frozenset({dict, OrderedDict, defaultdict, Counter})
_SEQUENCES: Final = frozenset({list, set, deque})
_FIXED: Final = frozenset({tuple, frozenset})  # nothing in them can be replaced
_ASIDE: Final = (  # of a module: nothing in them has to do with its forward pass
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_non_persistent_buffers_set",
    "_forward_hooks_with_kwargs",  # of hooks that are also in `_forward_hooks` or `_forward_pre_hooks`
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


class KeptReplica:
    """Holds a replica, and what decides whether it may be used again.

    Attributes:
        network: the original.
        replica: the copy of the network.
        tensors: the network's own parameters and buffers, in the order of `Snapshot`.
    """

    def __init__(self, model: nn.Module, replica: nn.Module, copies: Copies) -> None:
        self.network, self.replica = model, replica
        self.tensors = [*model.parameters(), *model.buffers()]
        pairs, aside = [*copies.pairs()], set[int]()
        for value, _ in pairs:
            if isinstance(value, nn.Module):
                aside |= {id(value.__dict__.get(name)) for name in _ASIDE}
        pairs = [pair for pair in pairs if id(pair[0]) not in aside]
        self._theirs = Contents(chain((value for value, _ in pairs), copies.dead_ends()))
        self._copies = [copy for value, copy in pairs if copy is not value]
        self._own: Contents | None = None
        self._places = places(self.tensors)
        self._pieces = behind(self.tensors)
        self._written = written(self._pieces)

    def is_current(self) -> bool:
        """Return whether the network is as it was when the replica was made, and no tensor was written to."""
        same = self._theirs.are_same() and self._places == places(self.tensors)
        if not same or not self._pieces:
            return same
        return self._written == written(self._pieces) and not is_replaced(self.network)

    def settle(self) -> None:
        """Remember the replica as it is now, with the hooks that it has got, before it runs."""
        self._own = Contents(self._copies)

    def is_clean(self) -> bool:
        """Return whether no run has left anything in the replica since `settle`."""
        return self._own is not None and self._own.are_same()


def replicate_to_keep(model: nn.Module, tracked: Collection[str] = ()) -> KeptReplica | None:
    """Return a replica that can be kept, in which the `tracked` parameters require grad.

    Returns None if it could not be told later whether it is still right. That is so for networks that write to their
    own tensors, whose replica starts from the network's values each time, for tensors that are not dense or were made
    in inference mode, and for scripted modules.
    """
    model = unwrap(model)
    if known_writes.get(model) != frozenset():
        return None
    tensors = (*model.parameters(), *model.buffers())
    if any(t.is_inference() or t.layout is not torch.strided for t in tensors):
        return None
    replica, copies = replica_and_copies(model, tracked)
    if not copies.complete or any(isinstance(module, ScriptModule) for module in replica.modules()):
        return None
    return KeptReplica(model, replica, copies)


class Contents:
    """Remembers which objects some containers, modules, objects and functions hold."""

    def __init__(self, holders: Iterable[Any]) -> None:
        self._mappings: list[Any] = []
        self._sequences: list[Any] = []
        self._empty: list[Any] = []
        self._others: list[Any] = []
        self._objects: list[Any] = []
        seen = set[int]()
        for value in holders:
            if id(value) not in seen:
                seen.add(id(value))
                self._add(value)
        self._kinds = [*map(type, self._objects)]
        self._items = [dict(mapping) for mapping in self._mappings]
        self._sizes = [*map(len, self._sequences)]
        held = (map(dict.values, self._mappings), self._sequences, map(held_by, self._others))
        self._held = [*chain.from_iterable(chain(*held))]  # kept alive, so that their addresses stay unique
        self._count = sum(map(len, self._mappings))
        self._values = self._values_now()
        self._ids = self._ids_now()

    def are_same(self) -> bool:
        """Return whether they still hold the same objects.

        Mappings are compared as a whole last: then all values are the same objects, and none is asked whether it is
        equal to another. Their order is part of the comparison of values.
        """
        try:
            return (
                self._values == self._values_now()
                and not any(self._empty)
                and self._items == self._mappings
                and self._kinds == [*map(type, self._objects)]
                and self._sizes == [*map(len, self._sequences)]
                and self._ids == self._ids_now()
            )
        except (
            RuntimeError,
            ValueError,
        ):  # another thread is changing one of them; one is shorter; or a key is a tensor
            return False

    def _values_now(self) -> bytes:
        """Return the addresses of what the mappings hold, an array's bytes: no number is made for each."""
        values = chain.from_iterable(map(dict.values, self._mappings))
        return np.fromiter(values, object, self._count).tobytes()

    def _ids_now(self) -> list[int]:
        """Return the identities of what the others hold."""
        found: list[int] = []
        if self._sequences:
            found.extend(map(id, chain.from_iterable(self._sequences)))
        if self._others:
            found.extend(map(id, chain.from_iterable(map(held_by, self._others))))
        return found

    def _add(self, value: Any) -> None:
        kind = type(value)
        if kind in _FIXED or isinstance(value, Tensor):
            return
        if kind in _MAPPINGS or kind in _SEQUENCES:
            if len(value) > LONG:
                return  # a vocabulary, which the replica shares
            (self._empty if not value else self._mappings if kind in _MAPPINGS else self._sequences).append(value)
        elif isinstance(value, nn.Module):
            self._objects.append(value)
            self._mappings.append(value.__dict__)
            parameters = value._parameters  # which a replica copies by itself
            (self._mappings if parameters else self._empty).append(parameters)
        elif isinstance(value, (FunctionType, CellType)) or not hasattr(value, "__dict__"):
            self._others.append(value)
        else:
            self._objects.append(value)
            self._others.append(value)
