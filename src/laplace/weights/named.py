"""Choose weights by name, with globs over parameters and modules. A module means all its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from laplace.checks import shown
from laplace.errors import OptionError
from laplace.network.replica import plain_name, unwrap
from laplace.weights.layout import Layout
from laplace.weights.selection import Choice, Selection, parameters_of

GLOB = "*?["


class Named(Choice):
    """Takes the trainable parameters that match one of the patterns.

    Args:
        patterns: names or globs of parameters and modules. A module means all its parameters.

    Raises:
        OptionError: there is no pattern, or one is not a string.
    """

    options = ("patterns",)

    def __init__(self, patterns: str | Iterable[str]) -> None:
        given = [patterns] if isinstance(patterns, str) else patterns
        listed = list(given) if isinstance(given, Iterable) else [None]
        if not listed or not all(isinstance(pattern, str) for pattern in listed):
            what = "is empty" if not listed else "must be names or globs of parameters and modules"
            raise OptionError(f"patterns={shown(patterns)} {what}. Write Named(['encoder.*', 'head']).")
        self.patterns = [plain_name(pattern) for pattern in listed if pattern is not None]
        self.label = str(self.patterns)

    def select(self, model: nn.Module) -> Selection:
        names: set[str] = set()
        for pattern in self.patterns:
            names |= trainable_named(model, pattern)
        return Selection(Layout.of((name, p) for name, p in parameters_of(model) if name in names))


def trainable_named(model: nn.Module, pattern: str) -> set[str]:
    """Return the first names of the trainable parameters that match a pattern. Refuses a pattern that matches none."""
    found = matches(model, pattern)
    parameters = dict(parameters_of(model))
    trainable = {name for name in found if parameters[name].requires_grad}
    if not found:
        raise OptionError(f"{pattern!r} matches no parameter or module of the network. {nearest(model, pattern)}")
    if not trainable:
        raise OptionError(
            f"{pattern!r} matches only parameters with requires_grad=False ({listed(sorted(found))}), which are never "
            "uncertain. Write requires_grad_() on those that should be."
        )
    return trainable


def matches(model: nn.Module, pattern: str) -> set[str]:
    """Return the parameters whose name, or whose module's name, matches. A tied tensor has one name."""
    first = {id(p): name for name, p in parameters_of(model)}
    found: set[str] = set()
    for name, p in unwrap(model).named_parameters(remove_duplicate=False):
        parts = plain_name(name).split(".")
        paths = (".".join(parts[: i + 1]) for i in range(len(parts)))  # the modules that hold it, and itself
        if any(fnmatchcase(path, pattern) for path in paths):
            found.add(first[id(p)])
    return found


def nearest(model: nn.Module, pattern: str) -> str:
    """List the modules and parameters whose names are closest to a pattern, for a message."""
    modules = [plain_name(name) for name, _ in unwrap(model).named_modules() if name]
    return nearest_of([*modules, *(name for name, _ in parameters_of(model))], pattern)


def nearest_of(names: Sequence[str], pattern: str) -> str:
    """List the names that are closest to a pattern, or all, for a message."""
    close = get_close_matches(pattern, names, n=3, cutoff=0.5)
    return f"Nearest: {listed(close)}." if close else f"The network has: {listed(names)}."


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return the first few names, quoted, for a message."""
    quoted = [repr(name) for name in names]
    return ", ".join(quoted[:most]) + (f" and {len(quoted) - most} more" if len(quoted) > most else "")
