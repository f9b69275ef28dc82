"""Rules for layers of your own: how a layer's gradients follow from its input and from the gradients at its output."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from laplace.backprop.layers import RULES
from laplace.backprop.layers.registered import Given, Registered, RuleFunction
from laplace.checks import shown
from laplace.errors import OptionError

__all__ = ["outer", "register_rule"]


def register_rule(layer: type[nn.Module]) -> Callable[[RuleFunction], RuleFunction]:
    """A decorator: `rule(layer, x, g)` explains modules of exactly this type from now on.

    x is the input, (N, ...), and g the gradients of K functions of the output at the output, (K, N, ...). It returns,
    for each parameter by name, its gradients per function and example, (K, N, *shape), or `outer(a, g)`. On the first
    batch these are compared with autograd's.

    Args:
        layer: the class of a layer.

    Returns:
        The decorator, which returns the rule as it is.

    Raises:
        OptionError: what is no class of a layer, or no function.
        ModelError: in `fit`, a rule whose gradients are not autograd's.
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise OptionError(f"register_rule({shown(layer)}): give the class of a layer, as in @register_rule(MyLayer).")

    def register(function: RuleFunction) -> RuleFunction:
        if not callable(function):
            raise OptionError(f"{shown(function)} is no rule: give a function of (layer, x, g).")
        RULES[layer] = Registered(layer, function)
        return function

    return register


def outer(
    a: Tensor,  # (N, I) or (N, ..., I)
    g: Tensor,  # (K, N, O) or (K, N, ..., O)
) -> Given:
    """The gradients sum of g a^T of a weight (O, I), over all positions between: they have a Kronecker form.

    Args:
        a: what the weight is multiplied with, the examples first, the features last.
        g: the gradients at the product, with one more dimension in front.

    Returns:
        What a rule returns for that weight.
    """
    return Given(a, g)
