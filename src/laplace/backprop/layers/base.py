"""What a rule is: from one call of a module, and the gradients at its outputs, to the uses of its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

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

    def read(self, name: str) -> Tensor:
        """The module's main input, given by position or as the keyword `name`."""
        return self.args[0] if self.args else self.kwargs[name]

    def gradient(self, g: Tensor) -> Tensor:  # (K, *output shape) -> (K, N, ...)
        """A gradient at an output with its examples after the vectors."""
        split = self.arrangement.split(g, self.n, 1)
        if split is None:
            raise ValueError(f"an output of shape {tuple(g.shape[1:])} does not hold {self.n} examples")
        return split

    def by_example(self, tensor: Tensor) -> Tensor:  # -> (N, ...)
        """An input with its examples first; a batch of one from which all examples' outputs are made is repeated."""
        split = self.arrangement.split(tensor, self.n)
        if split is None and tensor.shape[0] != 1:
            raise ValueError(f"an input of shape {tuple(tensor.shape)} does not hold {self.n} examples")
        return tensor.expand(self.n, *tensor.shape[1:]) if split is None else split


@dataclass(frozen=True)
class Inner:
    """Linear maps inside a module that is opened: what they read and returned, and the parameters they used."""

    part: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    keys: tuple[str, ...]


class Rule(ABC):
    """One kind of layer."""

    name: str
    whole = False  # whether it explains the network as a whole, not the calls of a module
    opens = False  # whether it runs the module itself, to see its inner maps: they take the place of the module's calls
    checked = False  # whether it is the user's own: that it is wrong is an error, not a reason to take another
    below: tuple[str, ...] = ()  # parameters of submodules that are never called

    def opened(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Inner]]:
        """What the module returns, computed step by step; raises what it likes where it cannot."""
        raise NotImplementedError

    @abstractmethod
    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        """The use of each asked parameter, by its name in the module; `gs` are (K, *output shape), one per output."""
