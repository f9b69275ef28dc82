"""Copy the tree of modules around the same tensors, so that the user's network is never touched.

The replica has its own hooks, flags and training mode, and shares the memory of every parameter and buffer. So there is
nothing to restore after an exception, and other threads may use the network meanwhile. It is made anew for each call
(microseconds per module), or kept as long as nothing has changed: see `kept.py`.

Modules are copied wherever they are kept: in attributes, containers, objects, functions and weak references. What
cannot be copied (a global variable, an object with a destructor) still leads to the user's own modules. The first run
of a replica notices that: see `watching.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.jit import ScriptModule
from torch.nn.parameter import UninitializedParameter

from laplace.errors import ModelError
from laplace.network.copying import ATOMS, Copies
from laplace.network.pieces import copied, is_stand_in

UNWATCHED = "_laplace_unwatched"  # on a replica whose first run must be watched: the original network
_ELSEWHERE = "_laplace_elsewhere"  # on modules of a replica that keep a parameter in other places than its attribute
_HELD = "_laplace_held"  # on a replica: the targets of its weak references

known_writes: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()  # tensors that watched networks write


def replicate(model: nn.Module, tracked: Collection[str] = (), written: Collection[str] | None = None) -> nn.Module:
    """Return a copy of the module tree in eval mode, with new tensors on the same memory.

    Only the `tracked` parameters require grad, and nothing ever reaches the user's `.grad`. Tensors that the network
    writes to get memory of their own. So do tensors made in inference mode, which autograd cannot use.
    """
    return replica_and_copies(model, tracked, written)[0]


def replica_and_copies(
    model: nn.Module, tracked: Collection[str] = (), written: Collection[str] | None = None
) -> tuple[nn.Module, Copies]:
    """Return a replica and all copies that were made for it."""
    model = unwrap(model)
    written = known_writes.get(model) if written is None else written
    copies, apart = Copies(_copy_module), written or ()
    for name, p in model.named_parameters():
        name = plain_name(name)
        apart_from_it = (name in apart or p.is_inference()) and not is_stand_in(p)
        copies.put(p, copied(p, nn.Parameter(_own(p) if apart_from_it else p.detach(), name in tracked)))
    for name, b in model.named_buffers():
        copies.put(b, _own(b) if plain_name(name) in apart or b.is_inference() else b.detach())
    replica: nn.Module = copies.of(model)
    if copies.elsewhere:
        for module in replica.modules():
            module.__dict__[_ELSEWHERE] = True
    if copies.held:
        replica.__dict__[_HELD] = copies.held
    if written is None and not isinstance(replica, ScriptModule):
        replica.__dict__[UNWATCHED] = model
    return replica, copies


def call_with(module: nn.Module, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module of a replica with some parameters replaced, by name. Nothing is written to.

    Uses torch's `functional_call`, which replaces attributes. Parameters that are also kept in a tuple or an object are
    replaced in a copy of the module.
    """
    if _ELSEWHERE not in module.__dict__:
        return functional_call(module, tensors, args, kwargs)
    copies = Copies(_copy_module)
    for name, tensor in tensors.items():
        copies.put(module.get_parameter(name), tensor)
    return copies.of(module)(*args, **kwargs)


def _own(t: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return t.detach().clone()


def require_values(model: nn.Module) -> None:
    """Refuse a network without values: lazy modules that never ran, or tensors on the device 'meta'."""
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise ModelError(
            f"{lazy[0]!r} and {len(lazy) - 1} more parameters have no shape yet: lazy modules find it when they are "
            "first run. Run the network on a batch and train it, then make it Bayesian."
        )
    meta = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if meta:
        raise ModelError(
            f"{meta[0]!r} and {len(meta) - 1} more tensors of the network are on the device 'meta', where they have "
            "shapes and no values. Write model.to_empty(device='cpu') and model.load_state_dict(...), or make the "
            "network outside of torch.device('meta'), and train it."
        )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the eager network inside `torch.compile`'s wrapper, whose compiled code would call the original layers."""
    while not isinstance(model, ScriptModule) and isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
        model = inner
    return model


def plain_name(name: str) -> str:
    """Return a parameter's name without the part that `torch.compile` adds."""
    return name.replace("_orig_mod.", "")


def _copy_module(module: nn.Module, copies: Copies) -> nn.Module:
    """Copy a module in eval mode."""
    inner = unwrap(module)
    if inner is not module:
        return copies.put(module, copies.of(inner))
    if isinstance(module, ScriptModule):
        if module.training:
            raise ModelError("a scripted module is in training mode, and we must not change it: call model.eval().")
        return module
    clone = copies.put(module, module.__class__.__new__(module.__class__))
    own, elsewhere, of = clone.__dict__, copies.elsewhere, copies.of
    for key, item in tuple(module.__dict__.items()):
        own[key] = item if type(item) in ATOMS else copies.own(item) if key == "_parameters" else of(item)
    if isinstance(module, nn.RNNBase):  # its list of weights follows its attributes
        copies.elsewhere = elsewhere
    own["training"] = False
    own["_compiled_call_impl"] = None
    return clone
