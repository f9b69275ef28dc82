"""Digests of tensors, by which files are found to be whole and networks and data to be the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace.replica import plain_name, unwrap

_SHOWN = 3  # differences in a message
_FLEETING = {"fleeting": True}


class Digest:
    """A running SHA-256 of words and tensors, with their dtypes and shapes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *values: str | Tensor) -> Digest:
        """Count further ones."""
        for value in values:
            if isinstance(value, Tensor):
                self._hash.update(json.dumps(["tensor", str(value.dtype), list(value.shape)]).encode())
                flat = value.detach().cpu().contiguous().reshape(-1)
                self._hash.update(flat.view(torch.uint8).numpy().data)
            else:
                self._hash.update(json.dumps(value).encode())
        return self

    def hex(self) -> str:
        """The digest of all so far."""
        return self._hash.hexdigest()


def of_tensors(tensors: Mapping[str, Tensor], words: str = "") -> str:
    """The digest of named tensors, whatever their order."""
    digest = Digest().add(words)
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.hex()


def of_network(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Shape, dtype and digest of every parameter and buffer of a network, by name.

    Buffers that its own state does not hold are marked: they are compared where both networks have them in one shape,
    since some are made on the way (tables of positions, as long as the longest input so far).
    """
    network = unwrap(model)
    state = {plain_name(name): t for name, t in network.state_dict().items() if isinstance(t, Tensor)}
    others = {plain_name(name): t for name, t in network.named_buffers() if plain_name(name) not in state}
    return {name: _told(t) for name, t in state.items()} | {name: _told(t) | _FLEETING for name, t in others.items()}


def _told(t: Tensor) -> dict[str, Any]:
    return {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "digest": Digest().add(t).hex()}


def differing(then: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> str:
    """In words, in what two networks differ, the first few tensors; '' where they are the same."""
    said = [f"{name!r} {said}" for name in (then | now) if (said := _difference(then.get(name), now.get(name)))]  # type: ignore[operator]
    return listed(said)


def listed(differences: Iterable[str]) -> str:
    """The first few, and how many more."""
    said = [*differences]
    more = f" and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    return "; ".join(said[:_SHOWN]) + more


def _difference(then: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    fleeting = any(told.get("fleeting", False) for told in (then, now) if told is not None)
    if fleeting and (then is None or now is None or then["shape"] != now["shape"]):
        return ""
    if then is None:
        return "is in this network alone"
    if now is None:
        return "is not in this network"
    for what in ("shape", "dtype"):
        if then[what] != now[what]:
            shown = [tuple(x[what]) if what == "shape" else x[what] for x in (then, now)]
            return f"has {what} {shown[0]} there and {shown[1]} here"
    return "" if then["digest"] == now["digest"] else "has other values"
