"""A second set of modules around the same tensors, so that the user's network is never touched.

The replica has its own hooks, flags and training mode and shares the memory of every parameter and buffer. It is made
anew for each call (microseconds a module), so that it is never out of date, and thrown away afterwards: there is
nothing to put back after an exception, and other threads may use the network meanwhile.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Collection
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import UninitializedParameter

from laplace.errors import ModelError

_LONG = 512  # entries from which a container without modules is shared, not copied (vocabularies)


def replicate(model: nn.Module, tracked: Collection[str] = ()) -> nn.Module:
    """A copy of the module tree in eval mode, on the same buffers and on parameters of its own on the same memory.

    Only the `tracked` parameters require grad: nothing ever reaches the user's `.grad`.
    """
    model = unwrap(model)
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=plain_name(name) in tracked)
        for name, p in model.named_parameters()
    }
    return _copy(model, memo)


def require_shapes(model: nn.Module) -> None:
    """Refuse a network that has never been run on anything: lazy modules find their shapes there."""
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise ModelError(
            f"{lazy[0]!r} and {len(lazy) - 1} more parameters have no shape yet: lazy modules find it when they are "
            "first run. Run the network on a batch and train it, then make it Bayesian."
        )


def unwrap(model: nn.Module) -> nn.Module:
    """The eager network inside `torch.compile`'s wrapper, whose compiled code would call the original's layers."""
    while not isinstance(model, ScriptModule) and isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
        model = inner
    return model


def plain_name(name: str) -> str:
    """A parameter's name without what `torch.compile` puts into it."""
    return name.replace("_orig_mod.", "")


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """`value` with every module in it replaced by its copy; what holds no module is the same object."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, nn.Module):
        return _copy_module(value, memo)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copy(value.__self__, memo)) if _leads(value) else value
    if isinstance(value, functools.partial) and _leads(value):
        return functools.partial(_copy(value.func, memo), *_copy(value.args, memo), **_copy(value.keywords, memo))
    if isinstance(value, FunctionType):
        return _copy_function(value, memo)
    return _copy_container(value, memo)


def _copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    inner = unwrap(module)
    if inner is not module:
        memo[id(module)] = _copy(inner, memo)
        return memo[id(module)]
    if isinstance(module, ScriptModule):
        if module.training:
            raise ModelError("a scripted module cannot be run in eval mode without changing it: call model.eval().")
        return module
    clone = module.__class__.__new__(module.__class__)
    memo[id(module)] = clone
    clone.__dict__.update({key: _copy(item, memo) for key, item in module.__dict__.items()})
    clone.__dict__["training"] = False
    clone.__dict__["_compiled_call_impl"] = None
    return clone


def _copy_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """A function whose closure leads to a module (`lambda x: self.block(x)`) gets a closure over the copy."""
    if not _leads(function):
        return function
    closure = tuple(
        CellType(_copy(content, memo)) if _leads(content := _content(cell)) else cell
        for cell in function.__closure__ or ()
    )
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _copy_container(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict):
        if len(value) > _LONG and not any(map(_leads, value.values())):
            return value
        mapping = memo[id(value)] = kind()
        mapping.update((key, _copy(item, memo)) for key, item in value.items())
        return mapping
    if kind in (list, tuple, set):
        if len(value) > _LONG and not any(map(_leads, value)):
            return value
        if kind is list:
            items = memo[id(value)] = []
            items.extend(_copy(item, memo) for item in value)
            return items
        return kind(_copy(item, memo) for item in value)
    return value


def _leads(value: Any, depth: int = 3) -> bool:
    """Whether a value is a module, or something to call that leads to one; a list in a closure stays the caller's."""
    if isinstance(value, nn.Module):
        return True
    if depth and isinstance(value, MethodType):
        return _leads(value.__self__, depth - 1)
    if depth and isinstance(value, functools.partial):
        return any(_leads(item, depth - 1) for item in (value.func, *value.args, *value.keywords.values()))
    if depth and isinstance(value, FunctionType):
        return any(_leads(_content(cell), depth - 1) for cell in value.__closure__ or ())
    return False


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
