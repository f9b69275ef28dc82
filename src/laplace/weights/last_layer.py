"""Find the last linear layer, whose output is the network's output, by running a few examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from laplace.errors import ModelError, OptionError, UnknownNameError, warn
from laplace.network.inputs import Inputs
from laplace.network.replica import replicate, unwrap
from laplace.network.sharded import settle
from laplace.weights.layout import Layout
from laplace.weights.pointwise import Pointwise, applied, is_pointwise


def _pick_first(h: Tensor) -> Tensor:  # (N, ..., D) -> (N, D)
    return h.flatten(1, -2)[:, 0]


def _pick_last(h: Tensor) -> Tensor:
    return h.flatten(1, -2)[:, -1]


def _average(h: Tensor) -> Tensor:
    return h.flatten(1, -2).mean(1)


_FEW: Final = 8  # outputs that are compared first
REDUCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "pick_first": _pick_first,
    "pick_last": _pick_last,
    "average": _average,
}


@dataclass(frozen=True)
class FoundLastLayer:
    """Names the layer, its uncertain tensors, and how the network reduces a sequence after it."""

    module: str
    layout: Layout
    reduction: str | None = None

    @property
    def described(self) -> str:
        """Return a description for messages."""
        return f"the last layer {self.module!r}"

    def layer(self, model: nn.Module) -> Pointwise:
        """Return the layer inside `model`, or inside a replica of it."""
        try:
            layer = unwrap(model).get_submodule(self.module)
        except AttributeError:
            layer = None
        if not is_pointwise(layer):
            raise ModelError(
                f"the last layer {self.module!r} is no longer an nn.Linear of the network. Call la.fit again."
            )
        return layer

    def tensors(self, model: nn.Module) -> list[Tensor]:
        """Return the uncertain tensors with their current values."""
        own = self.layer(model)._parameters
        found = [own.get(name.rpartition(".")[2]) for name in self.layout.names]
        if any(p is None for p in found):
            raise ModelError(f"the last layer no longer has {', '.join(self.layout.names)}. Call la.fit again.")
        return [p.detach() for p in found if p is not None]

    def reduce(self, h: Tensor, at: Tensor | None = None) -> Tensor:  # (N, ..., D) -> (N, D)
        """Reduce features or outputs of the layer over the dimensions between the first and the last.

        With `at`, (N,), the position of each row is taken, which the network was seen to pick.
        """
        if h.dim() == 2 or self.reduction is None:
            return h
        if at is None:
            return REDUCTIONS[self.reduction](h)
        return h.flatten(1, -2)[torch.arange(len(h), device=h.device), at]


def positions_picked(out: Tensor, f: Tensor) -> Tensor | None:  # (N, ..., C), (N, C) -> (N, T)
    """Return for every position whether its outputs are the network's, or None if some row has no such position.

    A decoder of padded sequences picks the last token of each row that is none of the padding.
    """
    if out.dim() < 3 or (out.shape[0], out.shape[-1]) != f.shape:
        return None
    same = _equal(out, f, _FEW)  # a vocabulary is long, and a few outputs rule out most positions
    if bool(same.any(1).all()) and f.shape[1] > _FEW:
        same = _equal(out, f, f.shape[1])
    return same if bool(same.any(1).all()) else None


def _equal(out: Tensor, f: Tensor, c: int) -> Tensor:  # (N, ..., C), (N, C) -> (N, T)
    return (_known(out.flatten(1, -2)[..., :c].to(f.dtype)) == _known(f[:, :c]).unsqueeze(1)).all(-1)


def last_of(same: Tensor) -> Tensor:  # (N, T) -> (N,)
    """Return the last position of each row that is true."""
    return same.shape[1] - 1 - same.flip(1).int().argmax(1)


def asked(replica: nn.Module, layer: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:  # (N, ..., C), (N, C)
    """Run a network with random numbers in place of a layer's output. Return them, and the network's output.

    What the network does behind the layer shows in them without ties, even if all weights of the layer are zero.
    """
    drawn: list[Tensor] = []

    def replace(module: Any, args: Any, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(output.shape, generator=generator, dtype=torch.float64)
        drawn.append(noise.to(output.device, output.dtype))
        return drawn[-1]

    handle = layer.register_forward_hook(replace)
    try:
        with torch.inference_mode(False), torch.no_grad():
            f = inputs.map(torch.clone).singles().call(replica)
    finally:
        handle.remove()
    return drawn[-1], f


def find_last_layer(model: nn.Module, example: Inputs, name: str | None, reduction: str | None) -> FoundLastLayer:
    """Find the last layer by its name, or by one run of the network on `example`."""
    if name is not None:
        name = name.removeprefix("_orig_mod.")
        _check_named(model, name)
    calls, output = _record(model, example)
    candidates = [call for call in calls if name is None or call.name == name]
    for call in reversed(candidates):
        whole = call.output.dim() == output.dim() or call.output.shape == (*output.shape, 1)
        linear = isinstance(call.layer, nn.Linear)
        ways = [reduction] if reduction or whole or not linear else list(REDUCTIONS)
        found = [way for way in ways if _matches(call.output, call.version, output, way)]
        if len(found) > 1:
            found = _decided(found, model, example, call.name)
        if found:
            if found[0] != reduction:
                warn(
                    f"the network reduces a sequence after its last layer {call.name!r}. feature_reduction="
                    f"{found[0]!r} gives the same output and is used. Pass it to silence this warning."
                )
            _check_called_once(call.name, calls)
            if settle(unwrap(model), [name for name, _ in _own_parameters(model, call.name)]):
                return find_last_layer(model, example, call.name, found[0])  # whose weights are there now
            _check_linear(model, call)
            return FoundLastLayer(call.name, _uncertain(model, call.name), found[0])
    raise ModelError(_not_found(name, calls, output))


def _decided(ways: list[str | None], model: nn.Module, example: Inputs, name: str) -> list[str | None]:
    """Return which of several reductions it is. Examples of one position have them all: the first is as good."""
    replica = replicate(model)
    out, f = asked(replica, replica.get_submodule(name), example)
    return [way for way in ways if _matches(out, out._version, f, way)] or ways


@dataclass
class _Call:
    name: str
    layer: Pointwise
    input: Tensor
    output: Tensor
    version: int


def _record(model: nn.Module, example: Inputs) -> tuple[list[_Call], Tensor]:
    """Return all calls of linear layers in order, and the network's output."""
    replica = replicate(model)
    calls: list[_Call] = []

    def record(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                phi = args[0] if args else kwargs["input"]
                calls.append(_Call(name, module, phi, output, output._version))

        return hook

    for name, module in replica.named_modules():
        if is_pointwise(module):
            module.register_forward_hook(record(name), with_kwargs=True)
    with torch.inference_mode(False), torch.no_grad():
        return calls, example.map(torch.clone).singles().call(replica)  # cloned: it may write to them


def is_output(out: Tensor, version: int, f: Tensor) -> bool:
    """Return whether a layer's output, at that version, is the network's: the same memory, or equal values."""
    if out._version != version or out.shape not in (f.shape, (*f.shape, 1)):  # a last 1 may be dropped
        return False
    return (
        out is f or out.data_ptr() == f.data_ptr() or torch.equal(_known(out.to(f.dtype).reshape(f.shape)), _known(f))
    )


def _matches(out: Tensor, version: int, f: Tensor, reduction: str | None) -> bool:
    if reduction is None or out.dim() == 2:
        return is_output(out, version, f)
    if out._version != version:
        return False
    per_row = reduction == "pick_last" and positions_picked(out, f) is not None
    return per_row or close(REDUCTIONS[reduction](out), f)


def close(out: Tensor, f: Tensor) -> bool:
    """Return whether two tensors are equal up to the order of additions in a mean."""
    if out.shape != f.shape:
        return False
    eps = torch.finfo(f.dtype).eps
    out, f = _known(out.to(f.dtype)), _known(f)
    return torch.allclose(out, f, rtol=100 * eps, atol=100 * eps * float(f.abs().max()))


def _known(f: Tensor) -> Tensor:
    """Replace NaN and infinity, which do not compare, by 0. They are refused later, with the batch's name."""
    return f.nan_to_num(0.0, 0.0, 0.0)


def _own_parameters(model: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
    layer = unwrap(model).get_submodule(name)
    return [(f"{name}.{key}" if name else key, p) for key, p in layer.named_parameters(recurse=False)]


def _uncertain(model: nn.Module, name: str) -> Layout:
    parameters = _own_parameters(model, name)
    trainable = [(key, p) for key, p in parameters if p.requires_grad]
    if not trainable:
        warn(f"all parameters of the last layer {name!r} have requires_grad=False; all are treated as uncertain.")
    return Layout.of(trainable or parameters)


def _check_named(model: nn.Module, name: str) -> None:
    modules = dict(unwrap(model).named_modules())
    linear = [n for n, m in modules.items() if is_pointwise(m)]
    if name not in modules:
        raise UnknownNameError(f"the last layer {name!r} is not a module of the network. Its linear layers: {linear}.")
    if not is_pointwise(modules[name]):
        raise OptionError(
            f"the last layer {name!r} is a {type(modules[name]).__name__}; it must be an nn.Linear: {linear}."
        )


def _check_called_once(name: str, calls: list[_Call]) -> None:
    times = sum(call.name == name for call in calls)
    if times > 1:
        raise ModelError(f"the last layer {name!r} is called {times} times in one run of the network; once is needed.")


def _check_linear(model: nn.Module, call: _Call) -> None:
    """Refuse a layer whose weight is computed from other parameters, or whose forward is not nn.Linear's."""
    own = call.layer._parameters
    if own.get("weight") is None or (call.layer.bias is not None and own.get("bias") is None):
        raise ModelError(
            f"the weight of the last layer {call.name!r} is not a parameter but computed (weight_norm, spectral_norm, "
            "another parametrization). Write torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')."
        )
    with torch.no_grad():
        plain = applied(call.layer, call.input)
    owners = [path for path, module in unwrap(model).named_modules(remove_duplicate=False)
              for p in module._parameters.values() if p is unwrap(model).get_submodule(call.name).weight]  # fmt: skip
    if len(owners) > 1:
        raise ModelError(
            f"the weight of the last layer {call.name!r} is tied to another module ({', '.join(owners)}), which also "
            "uses it. Take subset_of_weights='all', or untie it."
        )
    if not close(plain, call.output):
        raise ModelError(
            f"the last layer {call.name!r}, a {type(call.layer).__name__}, does not compute weight x + bias. Its "
            "forward must be the one of nn.Linear."
        )


def _not_found(name: str | None, calls: list[_Call], output: Tensor) -> str:
    fix = "Return the layer's output itself; softmax, sigmoid and the like belong to the likelihood."
    shape = tuple(output.shape)
    if name is not None:
        made = [tuple(c.output.shape) for c in calls if c.name == name]
        found = f"its output has shape {made[-1]}, changed before it is returned" if made else "it was not called"
        return f"the output of layer {name!r} is not the network's output of shape {shape}: {found}. {fix}"
    if not calls:
        return f"the network (output {shape}) called no nn.Linear, but its last layer must be one."
    last = calls[-1]
    return (
        f"the network's output, of shape {shape}, is not the output of an nn.Linear. The last one called was "
        f"{last.name!r} with output {tuple(last.output.shape)}; {_change(last.output, output)} before it is returned. "
        f"{fix}"
    )


def _change(out: Tensor, f: Tensor) -> str:
    """Say what a network does to its last layer's output, if that is known."""
    if out.shape == f.shape:
        known = {"softmax": out.softmax(-1), "sigmoid": out.sigmoid()}
        for name, changed in known.items():
            if close(changed, f):
                return f"a {name} is taken of it"
    return "something changes it"
