"""Run a network that `fully_shard` (FSDP2) has sharded, without a whole copy of it on any rank.

Each rank holds a piece of every parameter. FSDP gathers a layer before it runs and frees it afterwards, and all ranks
must run the network the same number of times. A posterior reads shards of different lengths, so we run a copy of the
tree of modules without FSDP's classes and hooks. It does the same, but asks for each layer when it needs it
(`Ranks.ask`): the other ranks hand over their pieces wherever they are. The user's network is never touched.

In the copy, a parameter is a stand-in, and modules have classes whose `forward` gathers (`pieces.py`). Uncertain
parameters are no exception, unless they are few, as a last layer or adapters: those are gathered for good when they are
found (`settle`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from functools import cache
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from laplace.errors import UnsupportedError
from laplace.network.copying import ATOMS, Copies
from laplace.network.pieces import SETTLED, UNIT, Pieces, is_stand_in, places, present, whole

_STATE = ("FSDPState", "_MultiHandler")  # whose methods are FSDP's hooks
_MARKS = ("__composable_api_state_key", "_is_fsdp", "_fsdp")  # how FSDP's own attributes of a module begin
_PLAIN: Final = "_laplace_plain"  # on a class that gathers: the one that it was made from

_of_copies: WeakKeyDictionary[nn.Module, Pieces] = WeakKeyDictionary()  # which keep them alive


def is_sharded(model: nn.Module) -> bool:
    """Return whether a network is spread over processes. FSDP may have its parameters gathered just now."""
    return any(map(_is_fsdp, model.modules())) or any(map(_is_spread, model.parameters()))


def is_gathering(model: nn.Module) -> bool:
    """Return whether a network is a copy that gathers its layers when they run."""
    return any(is_stand_in(p) for p in model.parameters())


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without the one that gathers its parameters."""
    return getattr(type(module), _PLAIN, type(module))


def gathering(model: nn.Module) -> nn.Module:
    """Return a copy of a sharded network that gathers each layer when it runs. All ranks must call this in turn.

    Raises:
        UnsupportedError: the network is tensor-parallel: its layers compute a part of their outputs each.
    """
    if not any(map(_is_fsdp, model.modules())):
        _refuse_parallel(model)
    pieces = Pieces(model)
    clone = _copied(pieces)
    _of_copies[clone] = pieces
    return clone


def _copied(pieces: Pieces) -> nn.Module:
    """Return a copy of the user's network as it is now, and take in the pieces of its parameters."""
    model, copies = pieces.source, Copies(_plain)
    _reshard(model)
    pieces.clear()
    pieces.facts = _facts(model)
    for name, p in model.named_parameters():
        if not _is_spread(p):
            continue  # FSDP was told to ignore it: the copy shares it
        if sum(part.is_shard() for part in p.placements) > 1:  # type: ignore[attr-defined]
            _refuse_parallel(model, name)
        copies.put(p, pieces.stand_in(p))
    for b in filter(_is_spread, model.buffers()):
        copies.put(b, b.full_tensor().detach())  # type: ignore[attr-defined]
    clone: nn.Module = copies.of(model)
    for module in clone.modules():
        if any(places(module)):
            module.__class__ = _gathering_class(type(module))
    return clone


def _reshard(model: nn.Module) -> None:
    """Have FSDP drop what it left gathered after a forward pass, as `state_dict()` does."""
    for module in model.modules():
        if _is_fsdp(module):
            module.reshard()  # type: ignore[operator]


def settle(model: nn.Module, names: Collection[str], few: bool = False) -> bool:
    """Gather some parameters of such a copy for good. Return whether there were any. All ranks must call this.

    With `few`, nothing is gathered that is more than a rank's share of the network.
    """
    new = {id(p): p for name, p in model.named_parameters() if name in set(names) and is_stand_in(p)}
    if not new or (few and not _are_few(model, [*new.values()])):
        return False
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is None or id(p) not in new:
                continue
            if new[id(p)] is p:
                new[id(p)] = nn.Parameter(whole(p).clone(), p.requires_grad)
                setattr(new[id(p)], SETTLED, p)
            module._parameters[key] = new[id(p)]
    for module in model.modules():
        if kind_of(module) is not type(module) and not any(places(module)):
            module.__class__ = kind_of(module)
    return True


def refresh(model: nn.Module) -> None:
    """Bring such a copy up to date with the user's network. All ranks must call this."""
    pieces = _of_copies.get(model)
    if pieces is None:
        return
    _reshard(pieces.source)
    if _facts(pieces.source)[0] != pieces.facts[0]:
        made = _copied(pieces)
        model.__class__ = type(made)
        object.__setattr__(model, "__dict__", made.__dict__)
    for p in model.parameters():
        if (stand_in := getattr(p, SETTLED, None)) is not None:
            p.data.copy_(whole(stand_in))


def is_replaced(model: nn.Module) -> bool:
    """Return whether the user's network has other parameters than when such a copy was made of it."""
    pieces = _of_copies.get(model)
    own = set(map(id, pieces or ()))
    return pieces is not None and any(_is_spread(p) and id(p) not in own for p in pieces.source.parameters())


def _facts(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return of what a network is made, apart from values, as plain facts; and the objects, whose ids are among them.

    Modules, parameters, buffers, hooks, and the numbers and words that modules keep. Nothing of FSDP.
    """
    facts, objects = list[Any](), list[Any]()
    for name, module in model.named_modules(remove_duplicate=False):
        facts.append((name, _kind(module)))
        for key, item in module.__dict__.items():
            if key in ("_parameters", "_buffers"):
                form = ((word, id(t), *(() if t is None else (t.dtype, t.shape, t.device, t.requires_grad)))
                        for word, t in item.items())  # fmt: skip
                facts.append((key, *form))
                objects.extend(item.values())
            elif key.endswith("_hooks") and isinstance(item, OrderedDict):
                facts.append((key, *(id(hook) for hook in item.values() if not _is_of_fsdp(hook))))
                objects.extend(item.values())
            elif type(item) in ATOMS and key != "training" and not key.startswith(_MARKS):
                facts.append((key, item))
    return facts, objects


def _are_few(model: nn.Module, tensors: list[nn.Parameter]) -> bool:
    """Return whether some parameters, gathered, are no more than what a rank holds of the network anyway."""
    pieces = _of_copies[model]
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return sum(p.numel() * p.element_size() for p in tensors) * pieces[0].device_mesh.size() <= size


@cache
def _gathering_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class whose forward pass has its parameters gathered."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with present(self):
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, _PLAIN: kind})


def _is_spread(t: Tensor) -> bool:
    """Return whether a tensor is a DTensor. Its class is not imported: that takes long, and few networks have any."""
    return any(kind.__name__ == "DTensor" for kind in type(t).__mro__)


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _refuse_parallel(model: nn.Module, name: str | None = None) -> None:
    name = next(name for name, p in model.named_parameters() if _is_spread(p)) if name is None else name
    raise UnsupportedError(
        f"{name!r} is tensor-parallel: each rank computes a part of the layer's outputs. Give the network before "
        "parallelize_module, or sharded by fully_shard alone."
    )


def _kind(module: nn.Module) -> Any:
    """Return the class of a module without that of FSDP."""
    kind: Any = type(module)
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)] if _is_fsdp(module) else kind


def _plain(module: nn.Module, copies: Copies) -> nn.Module:
    """Copy a module without FSDP's class and hooks."""
    kind = _kind(module)
    clone = copies.put(module, kind.__new__(kind))
    for key, item in tuple(module.__dict__.items()):
        if key.startswith(_MARKS):
            continue
        own = item
        if key.endswith("_hooks") and isinstance(item, OrderedDict):
            own = OrderedDict((number, hook) for number, hook in item.items() if not _is_of_fsdp(hook))
        clone.__dict__[key] = copies.own(own) if key == "_parameters" else copies.of(own)
    if _is_fsdp(module):
        clone.__dict__[UNIT] = True
    return clone


def _is_of_fsdp(hook: Any) -> bool:
    owner = getattr(hook, "__self__", None)
    return type(owner).__name__ in _STATE or "fsdp" in str(getattr(hook, "__module__", "")).lower()
