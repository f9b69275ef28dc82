"""Run a network that `fully_shard` (FSDP2) has sharded, without a whole copy of it on any rank.

Each rank holds a piece of every parameter. FSDP gathers a layer before it runs and frees it afterwards, and all ranks
must run the network the same number of times. A posterior reads shards of different lengths, so we run a copy of the
tree of modules without FSDP's classes and hooks. It does the same, but asks for each layer when it needs it
(`Ranks.ask`): the other ranks hand over their pieces wherever they are. The user's network is never touched.

In the copy, a parameter that is not gathered is a stand-in: one number, seen in the whole shape. Whatever autograd
would keep of a gathered parameter for the way back is kept as its name, and is gathered again there. Uncertain
parameters are gathered for good when they are found (`settle`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from laplace.distributed.ranks import SERVICES, Ranks
from laplace.distributed.together import ranks_together
from laplace.errors import UnsupportedError
from laplace.network.copying import Copies

_STATE = ("FSDPState", "_MultiHandler")  # whose methods are FSDP's hooks
_MARKS = ("__composable_api_state_key", "_is_fsdp", "_fsdp")  # how FSDP's own attributes of a module begin
_SERVICE: Final = "pieces of a parameter"
_SLOTS: Final = "_laplace_slots"  # on modules that FSDP has wrapped: the places of the parameters that they gather
_PIECE: Final = "_laplace_piece"  # on a stand-in


class Pieces(list[Any]):
    """This rank's pieces of a network's parameters, DTensors in their order. The other ranks may ask for them."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@dataclass(frozen=True)
class Piece:
    """Names a parameter of which each rank has a piece: the number of the network, and that of the parameter."""

    network: int
    index: int

    def gather(self, ranks: Ranks | None = None) -> Tensor:
        """Return the whole parameter. All ranks take part."""
        ranks = ranks_together() if ranks is None else ranks
        if ranks is None:
            raise UnsupportedError(
                "the network is sharded by fully_shard, and each run gathers its layers from all ranks. Call it on all "
                "of them: la.predict(x, group=torch.distributed.group.WORLD), where each rank may have inputs of its "
                "own; or `with laplace.distributed.together(group):` around any other call."
            )
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            _disable_current_modes(),
            temporarily_clear_interpreter_stack(),
        ):
            return ranks.ask(_SERVICE, (self.network, self.index))


_counter = itertools.count()  # all ranks make their networks in the same order
_networks: WeakValueDictionary[int, Pieces] = WeakValueDictionary()
_of_copies: WeakKeyDictionary[nn.Module, Pieces] = WeakKeyDictionary()  # which keep them alive


def _gathered(key: tuple[int, int], _: list[Any]) -> Tensor:
    number, index = key
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes(), temporarily_clear_interpreter_stack():
        return _networks[number][index].full_tensor().detach()


SERVICES[_SERVICE] = _gathered


def is_sharded(model: nn.Module) -> bool:
    """Whether a parameter of a network is spread over processes."""
    return any(_is_spread(p) for p in model.parameters())


def is_gathering(model: nn.Module) -> bool:
    """Whether a network is a copy that gathers its layers when they run."""
    return any(hasattr(p, _PIECE) for p in model.parameters())


def whole(t: Tensor) -> Tensor:
    """Return a tensor of a network. One of which each rank has a piece is gathered."""
    piece = getattr(t, _PIECE, None)
    return t if piece is None else piece.gather()


def gathering(model: nn.Module) -> nn.Module:
    """Return a copy of a sharded network that gathers each layer when it runs. All ranks must call this in turn.

    Raises:
        UnsupportedError: the network is tensor-parallel: its layers compute a part of their outputs each.
    """
    if not any(_is_fsdp(module) for module in model.modules()):
        _refuse_parallel(model)
    copies, pieces, number = Copies(_plain), Pieces(), next(_counter)
    _networks[number] = pieces
    for name, p in model.named_parameters():
        if not _is_spread(p):
            copies.put(p, nn.Parameter(p.detach().clone(), p.requires_grad))
            continue
        if sum(part.is_shard() for part in p.placements) > 1:  # type: ignore[attr-defined]
            _refuse_parallel(model, name)
        local = p.to_local()  # type: ignore[attr-defined]
        standin = nn.Parameter(torch.zeros((), dtype=p.dtype, device=local.device).expand(p.shape), p.requires_grad)
        setattr(standin, _PIECE, Piece(number, len(pieces)))
        pieces.append(p.detach())
        copies.put(p, standin)
    for b in model.buffers():
        copies.put(b, (b.full_tensor() if _is_spread(b) else b).detach().clone())  # type: ignore[attr-defined]
    clone: nn.Module = copies.of(model)
    _of_copies[clone] = pieces
    for module in [module for module in model.modules() if _is_fsdp(module)]:
        own = copies.of(module)
        own.__dict__[_SLOTS] = [
            (copies.of(sub), key, getattr(copies.of(p), _PIECE)) for sub, key, p in _own_slots(module) if _is_spread(p)
        ]
        own.__class__ = _gathering_class(type(own))
    return clone


def settle(model: nn.Module, names: Collection[str]) -> bool:
    """Gather some parameters of such a copy for good. Return whether there were any. All ranks must call this."""
    places = [(module, key, p) for module in model.modules() for key, p in module._parameters.items() if p is not None]
    named = {id(p): p for name, p in model.named_parameters() if name in set(names) and hasattr(p, _PIECE)}
    for p in named.values():
        settled = nn.Parameter(whole(p).clone(), p.requires_grad)
        for module, key, other in places:
            if other is p:
                module._parameters[key] = settled
    if named:
        for module in [module for module in model.modules() if _SLOTS in module.__dict__]:
            slots = [slot for slot in module.__dict__[_SLOTS] if hasattr(slot[0]._parameters[slot[1]], _PIECE)]
            module.__dict__[_SLOTS] = slots
            if not slots:
                module.__class__ = type(module).__mro__[1]
    return bool(named)


def _own_slots(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the places of the parameters that FSDP gathers for this module: not those of such modules inside of it."""
    for key, p in module._parameters.items():
        if p is not None:
            yield module, key, p
    for child in module.children():
        if not _is_fsdp(child):
            yield from _own_slots(child)


@cache
def _gathering_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class whose forward pass has its parameters gathered."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _there(self.__dict__[_SLOTS]):
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@contextmanager
def _there(slots: list[tuple[nn.Module, str, Piece]]) -> Iterator[None]:
    """Put gathered parameters into their places for a while. Autograd keeps their names, not their values."""
    standins = [(module, key, module._parameters[key]) for module, key, _ in slots]
    gathered: dict[Piece, nn.Parameter] = {}
    try:
        for module, key, piece in slots:
            if piece not in gathered:
                gathered[piece] = nn.Parameter(piece.gather(), requires_grad=False)
            module._parameters[key] = gathered[piece]
        if not torch.is_grad_enabled():
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(*_by_name(gathered)):
            yield
    finally:
        for module, key, standin in standins:
            module._parameters[key] = standin


def _by_name(gathered: dict[Piece, nn.Parameter]) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return what autograd does to keep a tensor, and to get it back: gathered parameters are kept by their names."""
    memory = {p.untyped_storage().data_ptr(): piece for piece, p in gathered.items()}
    ranks = ranks_together()  # autograd may come back on another thread

    def keep(t: Tensor) -> Any:
        piece = memory.get(t.untyped_storage().data_ptr()) if t.layout is torch.strided else None
        return t if piece is None else (piece, t.size(), t.stride(), t.storage_offset())

    def get(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        piece, *place = kept
        return piece.gather(ranks).as_strided(*place)

    return keep, get


def _is_spread(t: Tensor) -> bool:
    """Whether a tensor is a DTensor. Its class is not imported: that takes long, and few networks have any."""
    return any(kind.__name__ == "DTensor" for kind in type(t).__mro__)


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _refuse_parallel(model: nn.Module, name: str | None = None) -> None:
    name = next(name for name, p in model.named_parameters() if _is_spread(p)) if name is None else name
    raise UnsupportedError(
        f"{name!r} is tensor-parallel: each rank computes a part of the layer's outputs. Give the network before "
        "parallelize_module, or sharded by fully_shard alone."
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
