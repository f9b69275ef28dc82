"""Take a network out of the wrappers that spread it over processes. Its forward would wait for the other processes.

`DistributedDataParallel` and Lightning Fabric keep the network inside and run it with exchanges around it: its buffers
are broadcast before a run, so that a prediction on one rank alone would hang. The network inside is the same on every
rank, and a posterior belongs to it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laplace.errors import UnsupportedError
from laplace.network.sharded import gathering, is_sharded

_COMPILED = "_orig_mod"


def unwrapped(model: nn.Module) -> tuple[nn.Module, str | None]:
    """Return the network inside of its wrappers, and the name of the class that spreads it over processes, if one does.

    A compiled network stays as it is, unless there is such a wrapper inside. Of a network that `fully_shard` has
    sharded, a copy is returned that gathers its layers when they run: see `sharded.py`.

    Raises:
        UnsupportedError: the network is tensor-parallel, or in FullyShardedDataParallel.
    """
    inner: Any = model
    by = None
    while True:
        name = type(inner).__name__
        if name == "FullyShardedDataParallel":
            raise UnsupportedError(
                "the network is in FullyShardedDataParallel, whose parameters are flat pieces without names of their "
                "own. Shard it with torch.distributed.fsdp.fully_shard instead, or give the network before wrapping."
            )
        if isinstance(inner, DistributedDataParallel):
            inner, by = inner.module, name
        elif name == "_FabricModule":
            inner, by = inner.module, by or "Lightning Fabric's module"
        elif isinstance(compiled := getattr(inner, _COMPILED, None), nn.Module) and _is_spread(compiled):
            inner = compiled
        elif is_sharded(inner):
            return gathering(inner), "fully_shard"
        else:
            return (model, None) if by is None else (inner, by)


def _is_spread(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel) or type(model).__name__ == "_FabricModule"
