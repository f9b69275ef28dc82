"""Define a rule: from one call of a module, and the gradients at its outputs, to the uses of its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace.backprop.arrangement import Arrangement
from laplace.backprop.uses import Use


@dataclass(frozen=True)
class Call:
    """One call of a module on a batch of n examples."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arrangement: Arrangement
    n: int
    reached: tuple[int, ...] = (0,)  # indices of floating-point outputs with gradients, that is not constant ones

    def read(self, name: str) -> Tensor:
        """Return the module's main input, given by position or as the keyword `name`."""
        return self.args[0] if self.args else self.kwargs[name]

    def gradient(self, g: Tensor) -> Tensor:  # (K, *output shape) -> (K, N, ...)
        """Return a gradient at an output, with the dimension of examples after that of vectors."""
        split = self.arrangement.split(g, self.n, 1)
        if split is None:
            raise ValueError(f"an output of shape {tuple(g.shape[1:])} does not hold {self.n} examples")
        return split

    def by_example(self, tensor: Tensor) -> Tensor:  # -> (N, ...)
        """Return an input with its examples first. An input of batch size one is repeated for each example."""
        split = self.arrangement.split(tensor, self.n)
        if split is None and tensor.shape[0] != 1:
            raise ValueError(f"an input of shape {tuple(tensor.shape)} does not hold {self.n} examples")
        return tensor.expand(self.n, *tensor.shape[1:]) if split is None else split


@dataclass(frozen=True)
class Inner:
    """Linear maps inside an opened module: their inputs and outputs, and the parameters that they use."""

    part: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    keys: tuple[str, ...]


def reached(t: Tensor, parameters: Iterable[Tensor | None]) -> Tensor:
    """Return a tensor at which gradients can be taken, even if it depends on none of the uncertain parameters."""
    if t.requires_grad or not torch.is_grad_enabled() or not any(p is not None and p.requires_grad for p in parameters):
        return t
    return t.detach().requires_grad_()


class Rule(ABC):
    """How to explain one kind of layer."""

    name: str
    whole = False  # whether it explains the whole network, not the calls of one module
    opens = False  # whether it runs the module itself, and records its inner maps instead of its calls
    checked = False  # whether it is the user's own: if it is wrong, that is an error, not a reason to take another rule
    below: tuple[str, ...] = ()  # parameters of submodules that are read without a call

    def opened(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Inner]]:
        """Compute what the module returns step by step. May raise anything if it cannot."""
        raise NotImplementedError

    @abstractmethod
    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        """Return the use of each asked parameter, by its name in the module.

        `gs` holds the gradients, (K, *output shape), one tensor per output.
        """
