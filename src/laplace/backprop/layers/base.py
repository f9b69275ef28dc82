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

    def by_example(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """The tensor with its examples first (after `lead` dimensions); what is the same for all is repeated."""
        split = self.arrangement.split(tensor, self.n, lead)
        if split is not None:
            return split
        shape = (*tensor.shape[:lead], self.n, *tensor.shape[lead + 1 :])
        return (
            tensor.expand(shape)
            if tensor.shape[lead] == 1
            else tensor.unsqueeze(lead).expand(*tensor.shape[:lead], self.n, *tensor.shape[lead:])
        )


class Rule(ABC):
    """One kind of layer."""

    name: str

    @abstractmethod
    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        """The use of each asked parameter, by its name in the module; `gs` are (K, *output shape), one per output."""
