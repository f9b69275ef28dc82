"""Parameters of a network that are uncertain, whole or in part, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from laplace.checks import written
from laplace.errors import ModelError
from laplace.network.batches import Inputs
from laplace.network.replica import plain_name, unwrap
from laplace.weights.last_layer import FoundLastLayer
from laplace.weights.layout import Layout


@dataclass(frozen=True)
class Selection:
    """The uncertain weights of any layers."""

    layout: Layout
    module: None = None  # of which single layer they are, and what is done with a sequence behind it
    reduction: None = None

    @property
    def described(self) -> str:
        """In words."""
        return "the network"

    def tensors(self, model: nn.Module) -> list[Tensor]:
        """The whole tensors that hold them, as they are in the network now."""
        parameters = {name: p.detach() for name, p in parameters_of(model)}
        return [parameters[name] for name in self.layout.names]


class Subset(ABC):
    """A way of choosing the uncertain weights, as `subset_of_weights` takes it.

    Attributes:
        label: in a word, or as it was written.
    """

    label: str

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that make another one like it."""
        return {}

    def __repr__(self) -> str:
        """The call that makes it: `LastLayer(name='head')`."""
        return written(self, self.options)

    def __eq__(self, other: object) -> bool:
        """Equal to a subset of the same class with the same arguments."""
        if not isinstance(other, Subset):
            return NotImplemented
        return type(self) is type(other) and self.options == other.options

    def __hash__(self) -> int:
        return hash((type(self), self.label))

    @abstractmethod
    def find(self, model: nn.Module, inputs: Inputs) -> FoundLastLayer | Selection:
        """Return the weights of a network, given a batch of its inputs.

        Args:
            model: the network.
            inputs: a batch of its inputs.
        """


class Choice(Subset):
    """A choice that can be made without running the network, so that a wrong one is refused at once."""

    @abstractmethod
    def select(self, model: nn.Module) -> Selection:
        """Return the weights of a network.

        Args:
            model: the network.
        """

    def find(self, model: nn.Module, inputs: Inputs) -> Selection:
        return self.select(model)


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters of a network by their plain names, each tied tensor once."""
    for name, p in unwrap(model).named_parameters():
        yield plain_name(name), p


def trainable_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters with requires_grad, in the order in which a flat vector of them is read."""
    found = [(name, p) for name, p in parameters_of(model) if p.requires_grad]
    if not found:
        raise ModelError(
            "no parameter of the network requires grad, so that none is uncertain. Write model.requires_grad_(), or "
            "requires_grad_() on the layers that should be."
        )
    return found
