"""A second set of modules around the same tensors, so that the user's network is never touched.

The replica has its own hooks, flags and training mode and shares every parameter and buffer. It is made anew for each
call (microseconds a module), so that it is never out of date, and thrown away afterwards: there is nothing to put
back after an exception, and other threads may use the network meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from types import MethodType
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from laplace.errors import ModelError


def replicate(model: nn.Module, tracked: Collection[str] | None = None) -> nn.Module:
    """A copy of the module tree in eval mode, on the same buffers and parameters.

    Where `tracked` names parameters, the replica's are its own tensors on the same memory, and those need gradients.
    """
    model = unwrap(model)
    clones: dict[int, Any] = {}
    if tracked is not None:
        for name, p in model.named_parameters():
            own = name.replace("_orig_mod.", "") in tracked
            clones[id(p)] = nn.Parameter(p.detach(), requires_grad=own)
    for module in model.modules():
        if unwrap(module) is not module:
            continue  # torch.compile around a part of the network: its inner module stands in for it, below
        if isinstance(module, ScriptModule):
            if module.training:
                raise ModelError("a scripted module cannot be run in eval mode without changing it: call model.eval().")
            clones[id(module)] = module
        else:
            clones[id(module)] = module.__class__.__new__(module.__class__)
    for module in model.modules():
        clones.setdefault(id(module), clones[id(unwrap(module))])
    for module in model.modules():
        if unwrap(module) is not module:
            continue
        clone = clones[id(module)]
        if clone is not module:
            clone.__dict__.update({key: _rewire(value, clones) for key, value in module.__dict__.items()})
            clone.__dict__["training"] = False
            clone.__dict__["_compiled_call_impl"] = None
    return clones[id(model)]


def unwrap(model: nn.Module) -> nn.Module:
    """The eager network inside `torch.compile`'s wrapper, whose compiled code would call the original's layers."""
    while not isinstance(model, ScriptModule) and isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
        model = inner
    return model


def _rewire(value: Any, clones: dict[int, Any]) -> Any:
    """`value` with every reference to an original module turned to its clone; containers are copied."""
    if id(value) in clones:
        return clones[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in clones:
        return MethodType(value.__func__, clones[id(value.__self__)])
    for container in (list, tuple, set):
        if type(value) is container:
            return container(_rewire(item, clones) for item in value)
    if isinstance(value, dict):
        copied = value.copy()
        for key, item in value.items():
            copied[key] = _rewire(item, clones)
        return copied
    return value
