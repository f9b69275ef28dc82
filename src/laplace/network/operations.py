"""Run torch's own layers by the operations that they stand for, on the tensors and options that they hold.

A call of a layer looks for hooks, finds `forward`, and each of its parameters by a search that fails at first. That is
two microseconds before an operation that may take as many. Here the operation of a layer whose class is known is
called at once, as in eval mode. It reads whatever the layer holds at that moment. A hook, a compiled call, or a
`forward` that is not torch's is always respected.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as of_all_modules

_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_ALL: Final = tuple(vars(of_all_modules)[f"_global{name}"] for name in _HOOKS)
_CALL: Final = "_compiled_call_impl"  # where `module.compile()` puts what is called instead

Own = Mapping[str, Any]  # the __dict__ of a layer
Operation = Callable[[nn.Module, Tensor], Tensor]


class Line:
    """Runs a network that is a sequence of known layers, without a replica: it runs no code but torch's.

    It reads the network as it is, and writes nothing.

    Args:
        network: the sequence.
        last: its last layer.
    """

    def __init__(self, network: nn.Module, last: nn.Linear) -> None:
        self._network, self._last, self._tensors = network, last, list[Tensor]()
        for layer in network.modules():
            self._tensors += _tensors_of(layer.__dict__)
        self._places = places(self._tensors)

    @classmethod
    def of(cls, network: nn.Module, last: nn.Module) -> Line | None:
        """Return the line of a network; None if it is not such a sequence, or ends with another layer."""
        if not is_line(network, last) or type(last) is not nn.Linear:
            return None
        line = cls(network, last)
        return line if all(type(t) in (Tensor, nn.Parameter) for t in line._tensors) else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the outputs, and the input of the last layer. x may be written to.

        None if a layer is of another kind by now or has hooks, or if a tensor was replaced, moved or written to.
        """
        last, seen = self._last, list[Tensor]()
        phi = input_of(last, self._network, x, seen)
        if phi is None or type(last) is not nn.Linear:
            return None
        same = len(seen) == len(self._tensors) and all(map(operator.is_, seen, self._tensors))
        return (_linear(last, phi), phi) if same and places(seen) == self._places else None


def is_line(network: nn.Module, last: nn.Module) -> bool:
    """Return whether a network is a sequence of known layers, and then the last one, which may be of any kind."""
    layers = [module for module in network.modules() if type(module) is not nn.Sequential]
    return type(network) is nn.Sequential and layers[-1] is last and all(type(m) in _OPERATIONS for m in layers[:-1])


def input_of(last: nn.Module, network: nn.Module, x: Tensor, seen: list[Tensor] | None = None) -> Tensor | None:
    """Return what reaches the last layer of a sequence of known layers; x may be written to.

    None if it is not such a sequence, or has hooks. The tensors of all layers are added to `seen`.
    """
    if any(_HOOKS_OF_ALL) or any(kind.forward is not forward for kind, forward in _FORWARDS):
        return None
    waiting = [network]
    while waiting:
        module = waiting.pop()
        own, kind = module.__dict__, type(module)
        if _is_called_otherwise(own):
            return None
        if seen is not None:
            seen += _tensors_of(own)
        if module is last:
            return None if waiting else x
        operation = _OPERATIONS.get(kind)
        if operation is not None:
            x = operation(module, x)
        elif kind is nn.Sequential:
            waiting += reversed(own["_modules"].values())
        else:
            return None
    return None


def shorten(replica: nn.Module) -> None:
    """Let a replica call the operations of its known layers."""
    for module in replica.modules():
        own, operation = module.__dict__, _OPERATIONS.get(type(module))
        if operation is not None and own.get(_CALL) is None:
            own[_CALL] = _unless_hooked(module, operation)


def places(tensors: list[Tensor]) -> list[Any]:
    """Return where tensors lie in memory, and how often they were written to."""
    return [(t.data_ptr(), t._version, t.stride()) for t in tensors]


def _unless_hooked(module: nn.Module, operation: Operation) -> Callable[..., Any]:
    own, kind, forward = module.__dict__, type(module), type(module).forward
    (a, b, c, d), (e, f, g, h) = (own[name] for name in _HOOKS), _HOOKS_OF_ALL

    def call(*args: Any, **kwargs: Any) -> Any:
        hooked = a or b or c or d or e or f or g or h
        if hooked or kwargs or "forward" in own or type(module) is not kind or kind.forward is not forward:
            return module._call_impl(*args, **kwargs)
        return operation(module, *args)

    return call


def _is_called_otherwise(own: Own) -> bool:
    """Return whether a call of a layer is more than its class says."""
    hooked = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return bool(hooked) or "forward" in own or own.get(_CALL) is not None


def _tensors_of(own: Own) -> list[Tensor]:
    """Return the parameters and buffers of one layer."""
    parameters, buffers = own["_parameters"], own["_buffers"]
    if not buffers:
        return [t for t in parameters.values() if t is not None] if parameters else []
    return [t for tensors in (parameters, buffers) for t in tensors.values() if t is not None]


def _linear(layer: nn.Module, x: Tensor) -> Tensor:
    tensors = layer._parameters
    return functional.linear(x, tensors["weight"], tensors["bias"])  # type: ignore[arg-type]


def _conv2d(layer: nn.Module, x: Tensor) -> Tensor:
    own, tensors = layer.__dict__, layer._parameters
    if own["padding_mode"] != "zeros":
        return layer.forward(x)
    weight, bias, options = tensors["weight"], tensors["bias"], (own["stride"], own["padding"], own["dilation"])
    return torch.conv2d(x, weight, bias, *options, own["groups"])  # type: ignore[arg-type]


def _relu(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.relu_(x) if layer.__dict__["inplace"] else torch.relu(x)


def _tanh(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(x)


def _max_pool2d(layer: nn.Module, x: Tensor) -> Tensor:
    own = layer.__dict__
    if own["return_indices"]:
        return layer.forward(x)
    return torch.max_pool2d(x, own["kernel_size"], own["stride"], own["padding"], own["dilation"], own["ceil_mode"])


def _flatten(layer: nn.Module, x: Tensor) -> Tensor:
    own = layer.__dict__
    return x.flatten(own["start_dim"], own["end_dim"])


_OPERATIONS: Final[Mapping[type[nn.Module], Operation]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.ReLU: _relu,
    nn.Tanh: _tanh,
    nn.MaxPool2d: _max_pool2d,
    nn.Flatten: _flatten,
}
_FORWARDS: Final = [(kind, kind.forward) for kind in _OPERATIONS]  # somebody may put another one there
