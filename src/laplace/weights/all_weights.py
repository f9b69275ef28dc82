"""All weights: every parameter that requires grad. Freezing some is one way to choose (a head, adapters)."""

from __future__ import annotations

from torch import nn

from laplace.network.batches import Inputs
from laplace.weights.layout import Layout
from laplace.weights.selection import Selection, Subset, trainable_of


class All(Subset):
    """Take all parameters with requires_grad, each tied tensor once."""

    label = "all"

    def find(self, model: nn.Module, inputs: Inputs) -> Selection:
        return Selection(Layout.of(trainable_of(model)))
