"""Turn a value of `subset_of_weights` into an object that chooses weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from laplace.checks import choice, did_you_mean, shown
from laplace.errors import ArgumentError, OptionError
from laplace.network.inputs import Inputs
from laplace.weights.all_weights import All
from laplace.weights.last_layer import REDUCTIONS, FoundLastLayer, find_last_layer
from laplace.weights.named import GLOB, Named, matches, nearest
from laplace.weights.predicate import Where
from laplace.weights.selection import Subset
from laplace.weights.subnetwork import Subnetwork, ascending

_EXAMPLES = 5  # on which the last layer is looked for: padded sequences of several lengths, where there are
WORDS = ("last_layer", "all", "subnetwork")


class LastLayer(Subset):
    """Takes the last layer, by its name or by running the network on an example.

    Args:
        name: the name of the module. None finds it by running the network.
        reduction: how the network reduces a sequence after this layer: 'pick_first', 'average', or 'pick_last', which
            of padded sequences is the token of each row that the network itself is seen to pick. None finds it by
            running the network, with a warning.

    Raises:
        OptionError: the name is not a string, or the reduction is unknown.
    """

    label = "last_layer"
    options = ("name", "reduction")

    def __init__(self, name: str | None = None, reduction: str | None = None) -> None:
        self.name, self.reduction = _module(name, "name"), _reduction(reduction, "reduction")

    def find(self, model: nn.Module, inputs: Inputs) -> FoundLastLayer:
        return find_last_layer(model, inputs.spread(_EXAMPLES), self.name, self.reduction)


def subset_named(value: Any, indices: Any, name: str | None, reduction: str | None, model: nn.Module) -> Subset:
    """Return the object for a word, globs over names, a predicate, or an object.

    Args:
        value: the user's `subset_of_weights`.
        indices: the user's `subnetwork_indices`, allowed only with 'subnetwork'.
        name: the user's `last_layer_name`.
        reduction: the user's `feature_reduction`.
        model: the network. A word may name one of its modules or parameters.

    Raises:
        OptionError: the value is unknown, or an option belongs to another value.
    """
    last = LastLayer(_module(name, "last_layer_name"), _reduction(reduction, "feature_reduction"))
    if isinstance(value, Subset):
        _require_same(value, indices, last)
        return value
    subset = _subset(value, indices, last, model)
    if indices is not None and not isinstance(subset, Subnetwork):
        raise OptionError(
            f"subnetwork_indices= belongs to subset_of_weights='subnetwork'; this is subset_of_weights={shown(value)}."
        )
    return subset


def _require_same(subset: Subset, indices: Any, last: LastLayer) -> None:
    """Refuse keywords that contradict the object given as `subset_of_weights`."""
    if last != LastLayer() and last != subset:
        raise OptionError(
            "last_layer_name= and feature_reduction= contradict the object given as "
            f"subset_of_weights={shown(subset)}. Write only subset_of_weights={last!r}."
        )
    if indices is not None and Subnetwork(ascending(indices, "subnetwork_indices")) != subset:
        raise OptionError(
            f"subnetwork_indices= contradicts the object given as subset_of_weights={shown(subset)}. Write only "
            "subset_of_weights=Subnetwork(indices)."
        )


def _module(name: Any, what: str) -> str | None:
    if name is not None and not isinstance(name, str):
        raise OptionError(f"{what}={shown(name)} must be the name of a module, as in {what}='head'.")
    return name


def _reduction(value: Any, what: str) -> str | None:
    return None if value is None else choice(value, REDUCTIONS, what)


def _subset(value: Any, indices: Any, last: LastLayer, model: nn.Module) -> Subset:
    word = getattr(value, "value", value)
    if isinstance(word, str):
        return _of_word(word, indices, last, model)
    if isinstance(value, type) and issubclass(value, Subset):
        raise OptionError(f"subset_of_weights={value.__name__} is a class; give an object: {value.__name__}(...).")
    if isinstance(value, (list, tuple, set)) and all(isinstance(pattern, str) for pattern in value):
        if not value:
            raise OptionError("subset_of_weights is an empty list. Name parameters or modules: ['encoder.*', 'head'].")
        return Named(value)
    if callable(value) and not isinstance(value, (type, nn.Module)):
        return Where(value)
    raise OptionError(
        f"subset_of_weights={shown(value)} is a {type(value).__name__}. Valid: {', '.join(map(repr, WORDS))}, names or "
        "globs of parameters and modules as in ['encoder.*', 'head'], or a predicate (name, parameter) -> bool."
    )


def _of_word(word: str, indices: Any, last: LastLayer, model: nn.Module) -> Subset:
    if word == "subnetwork":
        if indices is None:
            raise ArgumentError(
                "subset_of_weights='subnetwork' needs subnetwork_indices=, a vector of indices into all trainable "
                "weights. Selectors of laplace.utils give one: RandomSubnetMask(model, 100).select()."
            )
        return Subnetwork(ascending(indices, "subnetwork_indices"))
    if word == "all":
        return All()
    if word == "last_layer":
        return last
    if any(c in word for c in GLOB) or matches(model, word):
        return Named([word])
    raise OptionError(
        f"subset_of_weights={word!r} is neither an option nor a name in the network.{did_you_mean(word, WORDS)} Valid: "
        f"{', '.join(map(repr, WORDS))}, or names of parameters and modules. {nearest(model, word)}"
    )
