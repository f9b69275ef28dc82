"""Recording: which modules were called, on what, and where gradients at their outputs can be had."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from laplace.backprop.arrangement import is_float, version
from laplace.backprop.layers.base import Rule
from laplace.batches import Inputs
from laplace.errors import ModelError
from laplace.nested import map_tensors, tensors_in


@dataclass(frozen=True)
class Recorded:
    """One call of a module."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    edges: list[GradientEdge]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    versions: list[int]  # of the input tensors

    def check_unwritten(self) -> None:
        """Refuse inputs that were overwritten after the module had read them."""
        if [version(t) for t in tensors_in((self.args, self.kwargs))] != self.versions:
            raise ModelError(
                f"the input of layer {self.name!r} is written to in place after the layer has read it, so that its "
                "gradients cannot be told. Replace the in-place operation (out = out + x instead of out += x)."
            )


class NotSeen(ModelError):
    """Modules that cannot be looked into as planned: their parameters are explained further up."""

    def __init__(self, paths: Collection[str]) -> None:
        self.paths = set(paths)
        super().__init__(f"what happens in {', '.join(sorted(self.paths))} cannot be seen.")


class Recorder:
    """Hooks on some modules of a replica; records while `active`. Modules that are opened record their inner maps."""

    def __init__(
        self,
        replica: nn.Module,
        names: Iterable[str],
        repeated: Collection[str],
        opened: Mapping[str, tuple[Rule, Collection[str]]],  # the rule of each, and the parameters that are asked for
        compare: bool = False,
    ) -> None:
        self.calls: list[Recorded] = []
        self.repeated, self.active, self.n, self.attached = repeated, False, 0, False
        self._gave: set[str] = set()  # modules whose one row was given to each example
        self.compare = compare  # whether what opened modules return is compared with what they would have returned
        self.handles = [
            replica.get_submodule(name).register_forward_hook(self._hook(name), with_kwargs=True) for name in names
        ]
        self.opened = [(replica.get_submodule(name), name, *rule) for name, rule in opened.items()]
        for module, name, rule, keys in self.opened:
            module.__dict__["forward"] = self._forward(module, name, rule, keys)

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self.handles:
            handle.remove()
        for module, *_ in self.opened:
            module.__dict__.pop("forward", None)

    def run(self, inputs: Inputs, replica: nn.Module, attached: bool = False) -> tuple[Tensor, list[Recorded]]:
        """The outputs and the calls that lead to them, whose activations stay in the graph if `attached`."""
        self.calls, self.active, self.n, self.attached = [], True, inputs.size or 0, attached
        self._gave = set()
        try:
            return inputs.call(replica), self.calls
        except NotSeen:
            raise
        except Exception as error:
            if not self._gave:
                raise
            raise NotSeen(self._gave) from error  # the one row that each example was given was one example's own
        finally:
            self.calls, self.active = [], False

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not self.active:
                return None
            if name in self.repeated:
                once, output = output, map_tensors(output, self._repeat)
                if any(a is not b for a, b in zip(tensors_in(once), tensors_in(output), strict=True)):
                    self._gave.add(name)
            self._record(name, module, args, kwargs, [t for t in tensors_in(output) if is_float(t)])
            return output

        return hook

    def _forward(self, module: nn.Module, name: str, rule: Rule, keys: Collection[str]) -> Callable[..., Any]:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return own(*args, **kwargs)
            try:
                output, inner = rule.opened(module, args, kwargs)
            except Exception as error:
                raise NotSeen({name}) from error
            if self.compare and not _alike(output, own(*args, **kwargs)):
                raise NotSeen({name})
            for one in inner:
                if set(one.keys) & set(keys):
                    self._record(name, module, one.inputs, {"part": one.part}, list(one.outputs))
            return output

        return forward

    def _record(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
    ) -> None:
        missing = [t for t in outputs if not t.requires_grad]
        if missing:
            raise ModelError(
                f"no gradient reaches the output of layer {name!r}: it runs under no_grad, or in a reentrant "
                "checkpoint. Leave out the no_grad, or write checkpoint(..., use_reentrant=False)."
            )
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
            )
        )

    def _repeat(self, output: Tensor) -> Tensor:
        """What is computed once for the whole batch, (1, ...), given to each example apart."""
        if self.n > 1 and output.dim() > 1 and output.shape[0] == 1 and is_float(output):
            return output.expand(self.n, *output.shape[1:])
        return output


def _alike(output: Any, other: Any) -> bool:
    """Whether two values hold the same tensors, up to rounding."""
    pairs = tensors_in(output), tensors_in(other)
    if [t.shape for t in pairs[0]] != [t.shape for t in pairs[1]]:
        return False
    for a, b in zip(*pairs, strict=True):
        near = min(10 * torch.finfo(b.dtype).eps ** 0.5, 0.05) if is_float(b) else 0.0
        size = float(b.detach().nan_to_num().abs().max()) if b.numel() else 0.0
        if not torch.allclose(a, b, rtol=0, atol=near * size, equal_nan=True):
            return False
    return True
