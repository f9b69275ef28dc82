"""Choose all parameters that require grad. To choose fewer (a head, adapters), freeze the others."""

from __future__ import annotations

from torch import nn

from laplace.network.inputs import Inputs
from laplace.weights.layout import Layout
from laplace.weights.selection import Selection, Subset, trainable_of


class All(Subset):
    """Takes all parameters with requires_grad=True. A tied tensor counts once."""

    label = "all"

    def find(self, model: nn.Module, inputs: Inputs) -> Selection:
        return Selection(Layout.of(trainable_of(model)))
