"""Record which modules were called, on what, and where to get gradients at their outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from laplace.backprop.arrangement import is_float, version
from laplace.backprop.graph import Leaves, next_number
from laplace.backprop.layers.base import Kept, Room, Rule
from laplace.errors import ModelError
from laplace.network.inputs import Inputs
from laplace.network.pieces import present
from laplace.network.pytree import map_tensors, tensors_in

_KEPT = 2**22  # numbers of all layers together that are kept for the next vectors


@dataclass(frozen=True)
class Recorded:
    """Holds one call of a module."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    edges: list[GradientEdge]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    versions: list[int]  # version counters of the input tensors
    reached: tuple[int, ...]  # indices of outputs that gradients reach, that is not constant ones
    span: range  # sequence numbers of the graph nodes made in it
    kept: Kept  # what its rule keeps for the next vectors
    source: Tensor | None = None  # its input with its graph, if it is a single tensor

    def check_unwritten(self) -> None:
        """Refuse inputs that were overwritten after the module had read them."""
        if [version(t) for t in tensors_in((self.args, self.kwargs))] != self.versions:
            raise ModelError(
                f"the input of layer {self.name!r} is written to in place after the layer has read it, so its "
                "gradients are unknown. Replace the in-place operation (out = out + x instead of out += x)."
            )


class NotSeen(ModelError):
    """Raised if modules' inner calculation cannot be recorded as planned. A module above explains their parameters."""

    def __init__(self, paths: Collection[str]) -> None:
        self.paths = set(paths)
        super().__init__(f"calls inside {', '.join(sorted(self.paths))} cannot be recorded.")


class Recorder:
    """Hooks some modules of a replica, and records while `active`. Opened modules record their inner maps."""

    def __init__(
        self,
        replica: nn.Module,
        names: Iterable[str],
        repeated: Collection[str],
        opened: Mapping[str, tuple[Rule, Collection[str]]],  # the rule of each, and its asked parameters
        compare: bool = False,
        lifted: Collection[str] = (),  # modules whose output gets a dimension of examples
    ) -> None:
        self.calls: list[Recorded] = []
        self.lifted = lifted
        self.repeated, self.active, self.n, self.attached = repeated, False, 0, False
        self._room = Room(0)
        self._gave: set[str] = set()  # modules whose single row was repeated for each example
        self.compare = compare  # whether opened modules' outputs are compared with their own forward
        self.leaves = Leaves(replica)
        self._starts: dict[str, list[int]] = {}  # start numbers of calls that have not returned yet
        self.handles: list[RemovableHandle] = []
        for name in names:
            module = replica.get_submodule(name)  # the user's own hooks run inside of ours
            self.handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            self.handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        self.opened = [(replica.get_submodule(name), name, *rule) for name, rule in opened.items()]
        for module, name, rule, keys in self.opened:
            module.__dict__["forward"] = self._forward(module, name, rule, keys)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        for module, *_ in self.opened:
            module.__dict__.pop("forward", None)

    def run(self, inputs: Inputs, replica: nn.Module, attached: bool = False) -> tuple[Tensor, list[Recorded]]:
        """Return the outputs and the calls that led to them. Activations stay in the graph if `attached`."""
        self.calls, self.active, self.n, self.attached = [], True, inputs.size or 0, attached
        self._gave, self._starts, self._room = set(), {}, Room(_KEPT)
        try:
            return inputs.call(replica), self.calls
        except NotSeen:
            raise
        except Exception as error:
            if not self._gave:
                raise
            raise NotSeen(self._gave) from error  # the repeated row belonged to one example
        finally:
            self.calls, self.active = [], False

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self.active:
                self._starts.setdefault(name, []).append(next_number())

        return enter

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not self.active:
                return None
            if name in self.repeated:
                once, output = output, map_tensors(output, self._repeat)
                if any(a is not b for a, b in zip(tensors_in(once), tensors_in(output), strict=True)):
                    self._gave.add(name)
            if name in self.lifted and self.n:
                output = map_tensors(output, self._lift)
                args, kwargs = map_tensors((args, kwargs), lambda t: t.unsqueeze(0))
                self._gave.add(name)
            span = range(self._starts[name].pop(), next_number())
            self._record(name, module, args, kwargs, [t for t in tensors_in(output) if is_float(t)], span)
            return output

        return hook

    def _forward(self, module: nn.Module, name: str, rule: Rule, keys: Collection[str]) -> Callable[..., Any]:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return own(*args, **kwargs)
            start = next_number()
            with present(module):
                try:
                    output, inner = rule.opened(module, args, kwargs)
                except Exception as error:
                    raise NotSeen({name}) from error
                span = range(start, next_number())
                if self.compare and not alike(output, own(*args, **kwargs)):
                    raise NotSeen({name})
            for one in inner:
                if set(one.keys) & set(keys):
                    self._record(name, module, one.inputs, {"part": one.part}, list(one.outputs), span)
            return output

        return forward

    def _record(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
                outputs: list[Tensor], span: range) -> None:  # fmt: skip
        reached = tuple(i for i, t in enumerate(outputs) if t.requires_grad)
        if outputs and not reached:
            raise ModelError(
                f"no gradient reaches the output of layer {name!r}: it runs under no_grad, or in a reentrant "
                "checkpoint. Leave out the no_grad, or write checkpoint(..., use_reentrant=False)."
            )
        outputs = [outputs[i] for i in reached]
        read = tensors_in((args, kwargs))
        if not self.attached:
            args, kwargs = map_tensors((args, kwargs), lambda t: t.detach())
        self.calls.append(
            Recorded(
                name,
                module,
                args,
                kwargs,
                [get_gradient_edge(t) for t in outputs],
                [t.shape for t in outputs],
                [t.dtype for t in outputs],
                [version(t) for t in read],
                reached,
                span,
                Kept(self._room),
                read[0] if len(read) == 1 else None,
            )
        )

    def _repeat(self, output: Tensor) -> Tensor:
        """Give each example its own row of what is computed once for the whole batch, (1, ...)."""
        if self.n > 1 and output.dim() > 1 and output.shape[0] == 1 and is_float(output):
            return output.expand(self.n, *output.shape[1:])
        return output

    def _lift(self, output: Tensor) -> Tensor:
        """Give each example its own copy of what is computed without a dimension of examples, (T, D) -> (N, T, D)."""
        return output.unsqueeze(0).expand(self.n, *output.shape) if is_float(output) else output


def alike(output: Any, other: Any) -> bool:
    """Return whether two values hold the same tensors, up to rounding."""
    pairs = tensors_in(output), tensors_in(other)
    if [t.shape for t in pairs[0]] != [t.shape for t in pairs[1]]:
        return False
    for a, b in zip(*pairs, strict=True):
        near = min(10 * torch.finfo(b.dtype).eps ** 0.5, 0.05) if is_float(b) else 0.0
        size = float(b.detach().nan_to_num().abs().max()) if b.numel() else 0.0
        if not torch.allclose(a, b, rtol=0, atol=near * size, equal_nan=True):
            return False
    return True
