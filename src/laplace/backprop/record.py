"""Recording: which modules were called, on what, and where gradients at their outputs can be had."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from laplace.backprop.arrangement import is_float, version
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


class Recorder:
    """Hooks on some modules of a replica; records while `active`."""

    def __init__(self, replica: nn.Module, names: Iterable[str], repeated: Collection[str]) -> None:
        self.calls: list[Recorded] = []
        self.repeated, self.active, self.n, self.attached = repeated, False, 0, False
        self.handles = [
            replica.get_submodule(name).register_forward_hook(self._hook(name), with_kwargs=True) for name in names
        ]

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self.handles:
            handle.remove()

    def start(self, n: int | None, attached: bool = False) -> None:
        """Forget what was recorded; `n` examples are to come, whose activations stay in the graph if `attached`."""
        self.calls, self.active, self.n, self.attached = [], True, n or 0, attached

    def stop(self) -> None:
        """Record no more, and hold nothing."""
        self.calls, self.active = [], False

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not self.active:
                return None
            if name in self.repeated:
                output = map_tensors(output, self._repeat)
            outputs = [t for t in tensors_in(output) if is_float(t)]
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
            return output

        return hook

    def _repeat(self, output: Tensor) -> Tensor:
        """What is computed once for the whole batch, (1, ...), given to each example apart."""
        if self.n > 1 and output.dim() > 1 and output.shape[0] == 1 and is_float(output):
            return output.expand(self.n, *output.shape[1:])
        return output
