"""Gather a network that `fully_shard` (FSDP2) has sharded into a plain one, parameter by parameter.

Each rank holds a piece of every parameter, and a run of the network waits for all ranks at every layer. A posterior
that predicts on one rank, or reads shards of different lengths, needs a network that runs by itself. So a plain copy is
made once: each parameter is gathered, and FSDP's hooks and classes are left out. The sharded network is not touched.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from laplace.errors import UnsupportedError
from laplace.network.copying import Copies

_STATE = ("FSDPState", "_MultiHandler")  # whose methods are FSDP's hooks
_MARKS = ("__composable_api_state_key", "_is_fsdp", "_fsdp")  # how FSDP's own attributes of a module begin


def is_sharded(model: nn.Module) -> bool:
    """Whether a parameter of a network is spread over processes."""
    return any(_is_spread(p) for p in model.parameters())


def gathered(model: nn.Module) -> nn.Module:
    """Return a plain copy of a sharded network, with its whole parameters. All ranks must call this together.

    Raises:
        UnsupportedError: the network is tensor-parallel: its layers compute a part of their outputs each.
    """
    if not any(_is_fsdp(module) for module in model.modules()):
        _refuse_parallel(model)
    copies = Copies(_plain)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if _is_spread(p) and sum(part.is_shard() for part in p.placements) > 1:  # type: ignore[attr-defined]
                _refuse_parallel(model, name)
            copies.put(p, nn.Parameter(_whole(p).detach().clone(), p.requires_grad))
        for b in model.buffers():
            copies.put(b, _whole(b).detach().clone())
    return copies.of(model)


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor() if _is_spread(t) else t  # type: ignore[attr-defined]


def _is_spread(t: Tensor) -> bool:
    """Whether a tensor is a DTensor. Its class is not imported: that takes long, and few networks have any."""
    return any(kind.__name__ == "DTensor" for kind in type(t).__mro__)


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _refuse_parallel(model: nn.Module, name: str | None = None) -> None:
    name = next(name for name, p in model.named_parameters() if _is_spread(p)) if name is None else name
    raise UnsupportedError(
        f"{name!r} is tensor-parallel: each rank computes a part of the layer's outputs. Give the network before "
        "parallelize_module, or sharded by fully_shard alone, which is gathered."
    )


def _plain(module: nn.Module, copies: Copies) -> nn.Module:
    """Copy a module without FSDP's class and hooks."""
    kind: Any = type(module)
    if _is_fsdp(module):
        kind = kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]
    clone = copies.put(module, kind.__new__(kind))
    for key, item in tuple(module.__dict__.items()):
        if key.startswith(_MARKS):
            continue
        own = item
        if key.endswith("_hooks") and isinstance(item, OrderedDict):
            own = OrderedDict((number, hook) for number, hook in item.items() if not _is_of_fsdp(hook))
        clone.__dict__[key] = copies.own(own) if key == "_parameters" else copies.of(own)
    return clone


def _is_of_fsdp(hook: Any) -> bool:
    owner = getattr(hook, "__self__", None)
    return type(owner).__name__ in _STATE or "fsdp" in str(getattr(hook, "__module__", "")).lower()
