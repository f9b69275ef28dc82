"""Rename parameters while loading: `names={old: new}`, for parameters or for the modules that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from laplace.checkpoints.state import EARLIER, INDEX, SUMS
from laplace.errors import OptionError

Rename = Callable[[str], str]


def renaming(names: Mapping[str, str], known: Iterable[str]) -> Rename:
    """Return a function from a name in the file to its name here.

    The longest entry that is the name itself, or a module above it, decides.
    """
    entries = sorted(names.items(), key=lambda entry: -len(entry[0]))

    def rename(name: str) -> str:
        for old, new in entries:
            if name == old:
                return new
            if not old or name.startswith(f"{old}."):
                return f"{new}.{name.removeprefix(old).removeprefix('.')}".removeprefix(".")
        return name

    known = list(known)
    idle = [old for old in names if old and not any(name == old or name.startswith(f"{old}.") for name in known)]
    if idle:
        raise OptionError(
            f"names= has {idle[0]!r}; the file has no such parameter or module. It has: {', '.join(known[:6])}."
        )
    if len({*map(rename, known)}) < len(known):
        raise OptionError(
            "names= gives two parameters of the file the same name. Give each old name a different new one."
        )
    return rename


def renamed_state(state: Mapping[str, Any], rename: Rename) -> dict[str, Any]:
    """Return a state with its parameters, and its last layer, renamed."""
    names = sorted(state["names"], key=len, reverse=True)
    out = {_key(key, names, rename): value for key, value in state.items()}
    out["names"] = [rename(name) for name in state["names"]]
    if state["last_layer"] is not None:
        out["last_layer"] = rename(state["last_layer"])
    return out


def _key(key: str, names: Iterable[str], rename: Rename) -> str:
    for prefix in (SUMS, INDEX, EARLIER):
        if key.startswith(prefix):
            rest = key.removeprefix(prefix)
            for name in names:
                if rest == name or rest.startswith(f"{name}/"):
                    return prefix + rename(name) + rest.removeprefix(name)
    return key
