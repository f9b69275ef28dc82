"""Run torch's own layers by the operations that they stand for, on the tensors and options that they hold.

A call of a layer looks for hooks, finds `forward`, and each of its parameters by a search that fails at first. That is
two microseconds before an operation that may take as many. Here the operation of a layer whose class is known is
called at once, as in eval mode, with whatever the layer holds at that moment. A hook, a compiled call, or a `forward`
that is not torch's is always respected.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as of_all_modules

_FORWARD_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS: Final = ("_backward_hooks", "_backward_pre_hooks")
_HOOKS: Final = _FORWARD_HOOKS + _BACKWARD_HOOKS
_HOOKS_OF_ALL: Final = tuple(vars(of_all_modules)[f"_global{name}"] for name in _HOOKS)
_CALL: Final = "_compiled_call_impl"  # where `module.compile()` puts what is called instead

Own = Mapping[str, Any]  # the __dict__ of a layer
Step = tuple[Callable[..., Tensor], tuple[Any, ...]]  # an operation, and what it takes behind its input


class Steps:
    """Runs a sequence of known layers up to its last one by their operations.

    What these take is looked up once. Before each run, `are_current` tells whether the layers still hold the same.

    Args:
        steps: the operations, in their order.
        layers: the network, all layers and sequences in it, and the last layer at the end.
    """

    def __init__(self, steps: list[Step], layers: list[nn.Module]) -> None:
        self._steps, self._layers, self._kinds = steps, layers, [*map(type, layers)]
        self._forwards = [(kind, kind.forward) for kind in dict.fromkeys(self._kinds) if kind in _KNOWN]
        self._hooks = [layer.__dict__[name] for layer in layers for name in _FORWARD_HOOKS]
        self._held = [_held(layer) for layer in layers]
        self._inside = [(layer, [*layer._modules.values()]) for layer in layers if type(layer) is nn.Sequential]
        self.begin_anew = bool(steps) and steps[0][0] in _ANEW  # so that x is neither written to nor passed on
        self.tensors = [t for *_, weight, bias in self._held for t in (weight, bias) if t is not None]

    @classmethod
    def of(cls, network: nn.Module, last: nn.Module) -> Steps | None:
        """Return the steps of a network as it is now. The last layer may be of any kind: it is not run.

        None if the network is not such a sequence, has hooks, or holds tensors of other classes.
        """
        if any(_HOOKS_OF_ALL) or any(kind.forward is not forward for kind, forward in _FORWARDS):
            return None
        waiting, steps, layers = [network], list[Step](), list[nn.Module]()
        while waiting:
            module = waiting.pop()
            own, kind = module.__dict__, type(module)
            tensors = own["_parameters"].values()
            if _is_called_otherwise(own) or any(type(t) not in _TENSORS for t in tensors):
                return None
            layers.append(module)
            if module is last:
                return None if waiting else cls(_in_less_memory(steps), layers)
            if kind is nn.Sequential:
                waiting += reversed(own["_modules"].values())
            elif kind in _KNOWN:
                steps.append(_KNOWN[kind](module))
            else:
                return None
        return None

    def are_current(self) -> bool:
        """Return whether all layers are those of which this was made, hold the same, and have no hooks.

        Hooks of the backward pass are looked for where there may be one.
        """
        if any(_HOOKS_OF_ALL) or any(self._hooks) or [*map(type, self._layers)] != self._kinds:
            return False
        if torch.is_grad_enabled() and any(own[name] for own in map(vars, self._layers) for name in _BACKWARD_HOOKS):
            return False
        try:
            for layer, read, held, weight, bias in self._held:
                own = layer.__dict__
                # Hooks in another dictionary differ from what was held: that one is empty.
                if read(own) != held or "forward" in own or own.get(_CALL) is not None:
                    return False
                if weight is not None:
                    tensors = own["_parameters"]
                    if tensors["weight"] is not weight or tensors["bias"] is not bias:
                        return False
            for layer, modules in self._inside:
                if [*layer.__dict__["_modules"].values()] != modules:
                    return False
        except (KeyError, RuntimeError, TypeError, ValueError):  # an entry has gone, or is compared to no single answer
            return False
        return not any(kind.forward is not forward for kind, forward in self._forwards)

    def __call__(self, x: Tensor) -> Tensor:
        """Return what reaches the last layer; x may be written to."""
        for run, given in self._steps:
            x = run(x, *given)
        return x


class Line:
    """Runs a network that is a sequence of known layers, without a replica: it runs no code but torch's.

    It reads the network as it is, and writes nothing.

    Args:
        steps: the operations before the last layer.
        last: the last layer.
    """

    def __init__(self, steps: Steps, last: nn.Linear) -> None:
        self._steps, self._last = steps, last
        self._places = places(steps.tensors)
        self._clones = not steps.begin_anew

    @classmethod
    def of(cls, network: nn.Module, last: nn.Module) -> Line | None:
        """Return the line of a network; None if it is not such a sequence, or ends with another layer."""
        steps = Steps.of(network, last) if is_line(network, last) and type(last) is nn.Linear else None
        return None if steps is None else cls(steps, last)  # type: ignore[arg-type]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the outputs, and the input of the last layer, which share no memory with x.

        None if a layer is of another kind by now, has hooks or other options, or if a tensor was replaced, moved or
        written to.
        """
        steps, tensors = self._steps, self._last._parameters
        if not steps.are_current():
            return None
        phi = steps(x.clone() if self._clones else x)
        f = functional.linear(phi, tensors["weight"], tensors["bias"])  # type: ignore[arg-type]
        return (f, phi) if places(steps.tensors) == self._places else None


def _in_less_memory(steps: list[Step]) -> list[Step]:
    """Return steps with the same results: a ReLU after the pooling before which it stood, and in place where it may be.

    ReLU is monotone, so that it commutes with max, and pooled there are fewer numbers. It may write to what the step
    before it has made, which nobody else has. A second ReLU does nothing.
    """
    found = list[Step]()
    for run, given in steps:
        before = found[-1][0] if found else None
        if before in _RELUS and run in _RELUS:
            continue
        if before in _RELUS and run is torch.max_pool2d and not _may_see_padding_alone(*given):
            found[-1:] = [(run, given), (torch.relu_, ())]
        elif run is torch.relu and before in _NOT_KEPT:
            found.append((torch.relu_, ()))
        else:
            found.append((run, given))
    return found


def _may_see_padding_alone(kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> bool:
    """Return whether all inputs of a maximum may be padding: it is -inf then, which a ReLU would set to zero."""
    return padding not in (0, (0, 0)) and dilation not in (1, (1, 1))


def is_line(network: nn.Module, last: nn.Module) -> bool:
    """Return whether a network is a sequence of known layers, and then the last one, which may be of any kind."""
    layers = [module for module in network.modules() if type(module) is not nn.Sequential]
    return type(network) is nn.Sequential and layers[-1] is last and all(type(m) in _KNOWN for m in layers[:-1])


def shorten(replica: nn.Module) -> None:
    """Let a replica call the operations of its known layers."""
    for module in replica.modules():
        own, known = module.__dict__, _KNOWN.get(type(module))
        if known is not None and own.get(_CALL) is None:
            own[_CALL] = _unless_hooked(module, known)


def places(tensors: list[Tensor]) -> list[Any]:
    """Return where tensors lie in memory, and how often they were written to."""
    return [(t.data_ptr(), t._version, t.stride()) for t in tensors]


def _unless_hooked(module: nn.Module, known: Callable[[nn.Module], Step]) -> Callable[..., Any]:
    own, kind, forward = module.__dict__, type(module), type(module).forward
    (a, b, c, d), (e, f, g, h) = (own[name] for name in _HOOKS), _HOOKS_OF_ALL

    def call(*args: Any, **kwargs: Any) -> Any:
        hooked = a or b or c or d or e or f or g or h
        otherwise = kwargs or len(args) != 1 or "forward" in own
        if hooked or otherwise or type(module) is not kind or kind.forward is not forward:
            return module._call_impl(*args, **kwargs)
        run, given = known(module)
        return run(*args, *given)

    return call


def _is_called_otherwise(own: Own) -> bool:
    """Return whether a call of a layer is more than its class says."""
    return any(own[name] for name in _HOOKS) or "forward" in own or own.get(_CALL) is not None


def _held(layer: nn.Module) -> tuple[nn.Module, Callable[[Own], Any], Any, Tensor | None, Tensor | None]:
    """Return a layer, what reads its hooks and options, what these are, and its tensors."""
    read = operator.itemgetter(*_FORWARD_HOOKS, *_OPTIONS.get(type(layer), ()))
    tensors = layer._parameters
    return layer, read, read(layer.__dict__), tensors.get("weight"), tensors.get("bias")


def _linear(layer: nn.Module) -> Step:
    tensors = layer._parameters
    return functional.linear, (tensors["weight"], tensors["bias"])


def _conv2d(layer: nn.Module) -> Step:
    own, tensors = layer.__dict__, layer._parameters
    if own["padding_mode"] != "zeros":
        return layer.forward, ()
    options = (own["stride"], own["padding"], own["dilation"], own["groups"])
    return torch.conv2d, (tensors["weight"], tensors["bias"], *options)


def _relu(layer: nn.Module) -> Step:
    return (torch.relu_ if layer.__dict__["inplace"] else torch.relu), ()


def _tanh(layer: nn.Module) -> Step:
    return torch.tanh, ()


def _max_pool2d(layer: nn.Module) -> Step:
    own = layer.__dict__
    if own["return_indices"]:
        return layer.forward, ()
    options = (own["kernel_size"], own["stride"], own["padding"], own["dilation"], own["ceil_mode"])
    return torch.max_pool2d, options


def _flatten(layer: nn.Module) -> Step:
    own = layer.__dict__
    return torch.flatten, (own["start_dim"], own["end_dim"])


_KNOWN: Final[Mapping[type[nn.Module], Callable[[nn.Module], Step]]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.ReLU: _relu,
    nn.Tanh: _tanh,
    nn.MaxPool2d: _max_pool2d,
    nn.Flatten: _flatten,
}
_OPTIONS: Final[Mapping[type[nn.Module], tuple[str, ...]]] = {  # what they read of a layer beside its tensors
    nn.Conv2d: ("padding_mode", "stride", "padding", "dilation", "groups"),
    nn.ReLU: ("inplace",),
    nn.MaxPool2d: ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    nn.Flatten: ("start_dim", "end_dim"),
}
_ANEW: Final = (
    functional.linear,
    torch.conv2d,
    torch.relu,
    torch.tanh,
    torch.max_pool2d,
)  # make a tensor
_NOT_KEPT: Final = (functional.linear, torch.conv2d, torch.max_pool2d)  # make a tensor that no gradient is taken from
_RELUS: Final = (torch.relu, torch.relu_)
_FORWARDS: Final = [(kind, kind.forward) for kind in _KNOWN]  # somebody may put another one there
_TENSORS: Final = (Tensor, nn.Parameter, type(None))
