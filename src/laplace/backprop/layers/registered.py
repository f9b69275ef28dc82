"""Rules that users write for their own layers: functions of the layer, its input and gradients at its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from laplace.backprop.activations import Stored
from laplace.backprop.layers.base import Call, Rule
from laplace.backprop.outer import Outer
from laplace.backprop.uses import DenseUse, Use
from laplace.errors import ModelError


class Given:
    """Holds inputs and gradients whose outer products, summed over positions, are a weight's gradient."""

    def __init__(self, a: Tensor, g: Tensor) -> None:
        self.a, self.g = a, g


RuleFunction = Callable[[nn.Module, Tensor, Tensor], Mapping[str, "Tensor | Given"]]


class Registered(Rule):
    """Calls a user's function, which returns gradients or the two sides of outer products per parameter."""

    checked = True

    def __init__(self, layer: type[nn.Module], function: RuleFunction) -> None:
        self.name, self.function = f"registered for {layer.__name__}", function

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        g = call.gradient(gs[0])
        given = [*call.args, *call.kwargs.values()]
        x = call.by_example(given[0])
        x = x.to(g.dtype) if x.is_floating_point() else x
        with torch.set_grad_enabled(x.requires_grad or g.requires_grad):
            found = self.function(call.module, x, g)
        missing = [key for key in keys if key not in found]
        if missing:
            raise ModelError(f"the rule {self.name} returns nothing for {missing[0]!r}; it returned {sorted(found)}.")
        return {key: self._use(call, key, found[key], g, reduce, first) for key in keys}

    def _use(self, call: Call, key: str, found: Tensor | Given, g: Tensor, reduce: bool, first: bool) -> Use:
        k, n, shape = *g.shape[:2], tuple(call.module.get_parameter(key).shape)
        if isinstance(found, Given):
            a, side = found.a.reshape(n, -1, found.a.shape[-1]), found.g.reshape(k, n, -1, found.g.shape[-1])
            if a.shape[1] == side.shape[2] and (side.shape[3], a.shape[2]) == (shape[0], torch.Size(shape[1:]).numel()):
                return Outer(Stored(a.mT.unsqueeze(1)), side.mT.unsqueeze(2), reduce, first)
            came = f"outer({tuple(found.a.shape)}, {tuple(found.g.shape)})"
        elif found.shape == (k, n, *shape):
            return DenseUse(found.flatten(2) if shape else found.unsqueeze(2))
        else:
            came = f"a tensor of shape {tuple(found.shape)}"
        raise ModelError(
            f"the rule {self.name} gives {came} for {key!r} of shape {shape}. Return gradients of shape "
            f"{(k, n, *shape)}, or outer(a, g) with a: ({n}, T, inputs) and g: ({k}, {n}, T, outputs)."
        )
