"""Define a rule: from one call of a module, and the gradients at its outputs, to the uses of its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from laplace.backprop.arrangement import Arrangement
from laplace.backprop.uses import Use


class Room:
    """Counts the numbers that all calls of one run of the network may keep together for the next vectors."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers

    def take(self, numbers: int) -> bool:
        """Return whether there is room for so many numbers. If there is, it is taken."""
        fits = numbers <= self.numbers
        self.numbers -= numbers if fits else 0
        return fits


@dataclass(frozen=True)
class Kept:
    """Holds what a rule has made of one call, for all vectors that are sent back through it."""

    room: Room
    made: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[Room], Any]) -> Any:
        """Return what `make` returned when it was first asked for."""
        if name not in self.made:
            self.made[name] = make(self.room)
        return self.made[name]


@dataclass(frozen=True)
class Call:
    """Holds one call of a module on a batch of n examples."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arrangement: Arrangement
    n: int
    reached: tuple[int, ...] = (0,)  # indices of floating-point outputs with gradients, that is not constant ones
    kept: Kept = field(default_factory=lambda: Kept(Room(0)))

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
    """Holds the linear maps inside an opened module: their inputs and outputs, and the parameters that they use."""

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
    """Explains one kind of layer."""

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
