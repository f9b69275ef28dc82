"""Compute digests of tensors, to check that files are intact and that networks and data are unchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace.network.pieces import whole
from laplace.network.replica import plain_name, unwrap
from laplace.network.sharded import is_gathering

_SHOWN = 3  # differences in a message
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # numpy has no bfloat16
_FLEETING = {"fleeting": True}


class Digest:
    """Computes a running SHA-256 of words and tensors, with their dtypes and shapes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *values: str | Tensor) -> Digest:
        """Add words or tensors."""
        for value in values:
            if isinstance(value, Tensor):
                self._hash.update(json.dumps(["tensor", str(value.dtype), list(value.shape)]).encode())
                dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
                flat = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
                self._hash.update(flat.view(_WHOLE[flat.element_size()]).numpy().data)
            else:
                self._hash.update(json.dumps(value).encode())
        return self

    def hex(self) -> str:
        """Return the digest of everything added so far."""
        return self._hash.hexdigest()


def of_tensors(tensors: Mapping[str, Tensor], words: str = "") -> str:
    """Return the digest of named tensors. Their order does not matter."""
    digest = Digest().add(words)
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.hex()


def of_network(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return shape, dtype and digest of every parameter and buffer of a network, by name.

    Buffers outside of the network's `state_dict` are marked as fleeting. They are compared only if both networks have
    them in the same shape, because some are created while the network runs (tables of positions, as long as the longest
    input so far).
    """
    network = unwrap(model)
    if is_gathering(network):  # its `state_dict` has stand-ins
        return of_state(network)
    state = {plain_name(name): t for name, t in network.state_dict().items() if isinstance(t, Tensor)}
    others = {plain_name(name): t for name, t in network.named_buffers() if plain_name(name) not in state}
    return {name: _told(t) for name, t in state.items()} | {name: _told(t) | _FLEETING for name, t in others.items()}


def of_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the same as `of_network`, without the network's own `state_dict`, which may gather, rename or refuse."""
    network = unwrap(model)
    fleeting = {
        f"{path}.{key}" if path else key
        for path, module in network.named_modules()
        for key in getattr(module, "_non_persistent_buffers_set", ())
    }
    tensors = (*network.named_parameters(), *network.named_buffers())
    return {plain_name(name): _told(t) | (_FLEETING if name in fleeting else {}) for name, t in tensors}


def _told(t: Tensor) -> dict[str, Any]:
    t = whole(t)
    return {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "digest": Digest().add(t).hex()}


def differing(then: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe how two networks differ, for the first few tensors. Returns '' if they are equal."""
    said = [f"{name!r} {said}" for name in (then | now) if (said := _difference(then.get(name), now.get(name)))]  # type: ignore[operator]
    return listed(said)


def listed(differences: Iterable[str]) -> str:
    """Return the first few differences, and how many more there are."""
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
