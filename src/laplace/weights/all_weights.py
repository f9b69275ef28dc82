"""All weights: every parameter that requires grad. Freezing some is how to choose (a head, adapters, a few layers)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from laplace.errors import ModelError
from laplace.replica import plain_name, unwrap
from laplace.weights.layout import Layout


@dataclass(frozen=True)
class AllWeights:
    """The parameters that are uncertain, by name."""

    layout: Layout

    @property
    def described(self) -> str:
        """In words."""
        return "the network"

    def tensors(self, model: nn.Module) -> list[Tensor]:
        """The uncertain tensors, as they are in the network now."""
        parameters = {plain_name(name): p for name, p in unwrap(model).named_parameters()}
        return [parameters[name].detach() for name in self.layout.names]


def find_all_weights(model: nn.Module) -> AllWeights:
    """The parameters with requires_grad, each tied tensor once."""
    trainable = [(plain_name(name), p) for name, p in unwrap(model).named_parameters() if p.requires_grad]
    if not trainable:
        raise ModelError(
            "no parameter of the network requires grad, so that none is uncertain. Write model.requires_grad_(), or "
            "requires_grad_() on the layers that should be."
        )
    return AllWeights(Layout.of(trainable))
