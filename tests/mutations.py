"""Files and states that were changed by someone who knows how to make a checksum: keys, shapes, dtypes, values."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor

JUNK: list[Any] = [None, -1, 0, 1, 7, 2**70, 0.5, -2.5, float("nan"), float("inf"), "", "os.system", [], {}, [[1]],
                   True, False, [1, 2], {"a": 1}, ("a",)]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a nest of mappings, lists and tuples."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def mutated(value: Any, rng: random.Random, times: int = 1) -> tuple[Any, str]:
    """A copy with so many changes, and what they are in words."""
    value, said = copy.deepcopy(value), []
    for _ in range(times):
        value, words = _once(value, rng)
        said.append(words)
    return value, "; ".join(said)


def _once(value: Any, rng: random.Random) -> tuple[Any, str]:
    where = rng.choice(places(value))
    nest = [value]
    for key in where[:-1]:
        nest.append(nest[-1][key])
    if rng.random() < 0.2 and isinstance(nest[-1], (dict, list)):
        if isinstance(nest[-1], dict) and rng.random() < 0.3:
            nest[-1][f"{where[-1]}x"] = nest[-1].pop(where[-1])
            return value, f"{where} renamed"
        del nest[-1][where[-1]]
        return value, f"{where} dropped"
    old = nest[-1][where[-1]]
    new = changed(old, rng)
    for container, key in zip(reversed(nest), reversed(where), strict=True):
        if isinstance(container, tuple):
            new = (*container[:key], new, *container[key + 1 :])
        else:
            container[key] = new
            return value, f"{where}: {_shown(old)} -> {_shown(new)}"
    return new, f"{where}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]


def changed(value: Any, rng: random.Random) -> Any:
    """Another value of the same kind, or of none."""
    if isinstance(value, Tensor):
        return _tensor(value, rng)
    if rng.random() < 0.4:
        return rng.choice([*JUNK, torch.ones(2), torch.tensor(1.0)])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, -value, 0, value * 10, float(value)])
    if isinstance(value, float):
        return rng.choice([-value, 0.0, value * 1e30, float("nan"), int(value)])
    if isinstance(value, str):
        return rng.choice([value[1:], value + "x", value.upper(), "full", "kron", "diag", "0", "weight", "mean"])
    if isinstance(value, (list, tuple)) and value:
        kept = list(value)
        how = rng.choice(["short", "long", "turned", "twice", "empty"])
        if how == "short":
            kept.pop(rng.randrange(len(kept)))
        elif how == "long":
            kept.insert(rng.randrange(len(kept) + 1), copy.deepcopy(rng.choice(kept)))
        elif how == "turned":
            kept.reverse()
        else:
            kept = [*kept, *copy.deepcopy(kept)] if how == "twice" else []
        return type(value)(kept)
    return rng.choice(JUNK)


def _tensor(t: Tensor, rng: random.Random) -> Any:
    how = rng.choice(["dtype", "shape", "shape", "shape", "values", "junk"])
    if how == "junk":
        return rng.choice(JUNK)
    if how == "dtype":
        kinds = [
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.int64,
            torch.int32,
            torch.bool,
            torch.uint8,
        ]
        return t.to(rng.choice([kind for kind in kinds if kind != t.dtype]))
    if how == "values":
        if not t.numel():
            return torch.ones(2)
        made = t.clone(memory_format=torch.contiguous_format)
        if t.dtype == torch.bool:
            return ~made
        bad = [-1.0, 0.0, 1e30, -1e30, 1e-30, float("nan"), float("inf")]
        if not t.is_floating_point():
            bad = [0, 1, torch.iinfo(t.dtype).max]
        made.view(-1)[rng.randrange(t.numel())] = rng.choice(bad)
        return rng.choice([made, -made, made * 0, made * 1000])
    ways = [lambda: t.unsqueeze(0), lambda: t.unsqueeze(-1), lambda: t.reshape(-1), lambda: t.new_zeros(0)]
    if t.dim():
        dim = rng.randrange(t.dim())
        size = t.shape[dim]
        ways += [lambda: t.transpose(0, -1).contiguous(), lambda: torch.cat([t, t], dim), lambda: t.sum(dim)]
        ways += [lambda: t.narrow(dim, 0, size - 1).clone()] if size else []
        ways += [lambda: torch.cat([t, t.narrow(dim, 0, 1)], dim)] if size else []
    return rng.choice(ways)()
