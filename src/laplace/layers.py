"""Register rules for your own layers: how gradients follow from a layer's input and the gradients at its output."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from laplace.backprop.layers import RULES
from laplace.backprop.layers.registered import Given, Registered, RuleFunction
from laplace.checks import shown
from laplace.errors import OptionError

__all__ = ["outer", "register_rule"]


def register_rule(layer: type[nn.Module]) -> Callable[[RuleFunction], RuleFunction]:
    """Return a decorator that makes `rule(layer, x, g)` explain modules of exactly this type from now on.

    x is the input, (N, ...), and g holds the gradients of K functions of the output at the output, (K, N, ...). The
    rule returns a mapping from each parameter's name to its gradients per function and example, (K, N, *shape), or to
    `outer(a, g)`. On the first batch these are compared with autograd's.

    Args:
        layer: the class of a layer.

    Returns:
        The decorator, which returns the rule unchanged.

    Raises:
        OptionError: `layer` is not the class of a layer, or the rule is not callable.
        ModelError: in `fit`, the rule's gradients differ from autograd's.
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise OptionError(f"register_rule({shown(layer)}): give the class of a layer, as in @register_rule(MyLayer).")

    def register(function: RuleFunction) -> RuleFunction:
        if not callable(function):
            raise OptionError(f"{shown(function)} is not a rule: give a function of (layer, x, g).")
        RULES[layer] = Registered(layer, function)
        return function

    return register


def outer(
    a: Tensor,  # (N, I) or (N, ..., I)
    g: Tensor,  # (K, N, O) or (K, N, ..., O)
) -> Given:
    """Describe a weight's gradient as the sum of g a^T over all positions, which gives it a Kronecker form.

    The weight has shape (O, I).

    Args:
        a: the input that the weight multiplies; examples first, features last.
        g: the gradients at the product, with the K functions as one more dimension in front.

    Returns:
        A value that a rule may return for that weight.
    """
    return Given(a, g)


def __dir__() -> list[str]:
    return __all__
