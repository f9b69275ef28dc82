"""What users write for `subset_of_weights`, turned into the choice that it stands for."""

from __future__ import annotations

from typing import Any

from torch import nn

from laplace.batches import Inputs
from laplace.checks import shown
from laplace.errors import OptionError
from laplace.weights.all_weights import All
from laplace.weights.last_layer import LastLayer, find_last_layer
from laplace.weights.named import GLOB, Named, matches, nearest
from laplace.weights.predicate import Where
from laplace.weights.selection import Subset
from laplace.weights.subnetwork import Subnetwork

WORDS = ("last_layer", "all", "subnetwork")


class Last(Subset):
    """The last layer, by its name or by running the network on an example."""

    label = "last_layer"

    def __init__(self, name: str | None, reduction: str | None) -> None:
        if name is not None and not isinstance(name, str):
            raise OptionError(f"last_layer_name={shown(name)} must be the name of a module, as in 'head'.")
        self.name, self.reduction = name, reduction

    def find(self, model: nn.Module, inputs: Inputs) -> LastLayer:
        return find_last_layer(model, inputs.part(0, 1), self.name, self.reduction)


def subset_named(value: Any, indices: Any, last: Last, model: nn.Module) -> Subset:
    """A word, globs over names, or a predicate; `indices` belong to 'subnetwork' alone."""
    subset = _subset(value, indices, last, model)
    if indices is not None and not isinstance(subset, Subnetwork):
        raise OptionError(
            f"subnetwork_indices= belongs to subset_of_weights='subnetwork'; this is subset_of_weights={shown(value)}."
        )
    return subset


def _subset(value: Any, indices: Any, last: Last, model: nn.Module) -> Subset:
    word = getattr(value, "value", value)
    if isinstance(word, str):
        return _of_word(word, indices, last, model)
    if isinstance(value, (list, tuple, set)) and all(isinstance(pattern, str) for pattern in value):
        return Named(list(value))
    if callable(value) and not isinstance(value, (type, nn.Module)):
        return Where(value)
    raise OptionError(
        f"subset_of_weights={shown(value)} is a {type(value).__name__}. Valid: {', '.join(map(repr, WORDS))}, names or "
        "globs of parameters and modules as in ['encoder.*', 'head'], or a predicate (name, parameter) -> bool."
    )


def _of_word(word: str, indices: Any, last: Last, model: nn.Module) -> Subset:
    if word == "subnetwork":
        if indices is None:
            raise OptionError(
                "subset_of_weights='subnetwork' needs subnetwork_indices=, a vector of indices into all trainable "
                "weights. Selectors of laplace.utils give one: RandomSubnetMask(model, 100).select()."
            )
        return Subnetwork(indices)
    if word == "all":
        return All()
    if word == "last_layer":
        return last
    if any(c in word for c in GLOB) or matches(model, word):
        return Named([word])
    raise OptionError(
        f"subset_of_weights={word!r} is not an option, nor a name. Valid: {', '.join(map(repr, WORDS))}, or names of "
        f"parameters and modules. {nearest(model, word)}"
    )
