"""Choose weights by a function of the user, which gets each parameter and its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

from laplace.checks import shown
from laplace.errors import OptionError
from laplace.weights.layout import Layout
from laplace.weights.named import listed
from laplace.weights.selection import Choice, Selection, parameters_of


class Where(Choice):
    """Takes the trainable parameters for which your function returns True. It sees each tied tensor once.

    Args:
        predicate: a function (name, parameter) -> bool.

    Raises:
        OptionError: `predicate` cannot be called with two arguments.
    """

    label = "predicate"
    options = ("predicate",)

    def __init__(self, predicate: Callable[[str, nn.Parameter], object]) -> None:
        self.predicate = predicate
        if not _takes_two(predicate):
            raise OptionError(
                f"predicate={shown(predicate)} cannot be called with two arguments; it gets a parameter's name and "
                "the parameter: write lambda name, p: name.startswith('encoder')."
            )

    def select(self, model: nn.Module) -> Selection:
        chosen = [(name, p) for name, p in parameters_of(model) if self._takes(name, p)]
        trainable = [(name, p) for name, p in chosen if p.requires_grad]
        if not trainable:
            frozen = f"only parameters with requires_grad=False ({listed(name for name, _ in chosen)})"
            raise OptionError(
                f"the predicate of subset_of_weights takes {frozen if chosen else 'no parameter'} of "
                f"{listed(name for name, _ in parameters_of(model))}. It must take at least one trainable parameter."
            )
        return Selection(Layout.of(trainable))

    def _takes(self, name: str, p: nn.Parameter) -> bool:
        answer = self.predicate(name, p)
        if not isinstance(answer, bool):
            raise OptionError(
                f"the predicate of subset_of_weights returned {shown(answer)}, a {type(answer).__name__}, for "
                f"{name!r}; it must return True or False: write bool(...) around the result."
            )
        return answer


def _takes_two(predicate: object) -> bool:
    if not callable(predicate):
        return False
    try:
        inspect.signature(predicate).bind("", None)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        return True
    return True
