"""Find and replace tensors in tuples, lists, mappings, dataclasses and graphs, nested in any way, of any type."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from laplace.network.graphs import is_graph, map_graph, tensors_of


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors, in the order in which `map_tensors` visits them."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in (tuple, list) and all(type(item) is Tensor for item in value):
        return list(value)
    return [tensor for item in _items(value) for tensor in tensors_in(item)]


def map_tensors(value: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """Return the value with f applied to every tensor. The value itself is not changed."""
    return map_leaves(value, lambda leaf: isinstance(leaf, Tensor), f)


def map_leaves(value: Any, chosen: Callable[[Any], bool], f: Callable[[Any], Any]) -> Any:
    """Return the value with f applied to everything in it that is `chosen`. The value itself is not changed."""
    if chosen(value):
        return f(value)
    if is_graph(value):
        return map_graph(value, lambda t: f(t) if chosen(t) else t)
    if isinstance(value, (tuple, list)):
        items = [map_leaves(item, chosen, f) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_dataclass(value):
        return _map_fields(value, chosen, f)
    if isinstance(value, Mapping):
        entries = {key: map_leaves(item, chosen, f) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, (dict, UserDict)):
            return entries  # a copy of an unknown mapping may share its entries
        same = copy.copy(value)  # a BatchEncoding stays one
        same.update(entries)
        return same
    return value


def replace_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the value with its tensors replaced one after the other."""
    return map_tensors(value, lambda _: next(tensors))


def _items(value: Any) -> Any:
    if is_graph(value):
        return tensors_of(value)
    if isinstance(value, (tuple, list)):
        return value
    if _is_dataclass(value):
        return [getattr(value, name) for name in value.__dataclass_fields__]
    return value.values() if isinstance(value, Mapping) else ()


def _map_fields(value: Any, chosen: Callable[[Any], bool], f: Callable[[Any], Any]) -> Any:
    same = copy.copy(value)
    put = object.__setattr__ if value.__dataclass_params__.frozen else setattr
    for name in value.__dataclass_fields__:
        put(same, name, map_leaves(getattr(value, name), chosen, f))
    return same


def _is_dataclass(value: object) -> bool:
    return hasattr(type(value), "__dataclass_fields__")
