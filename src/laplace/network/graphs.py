"""Batches of graphs, as PyTorch Geometric makes them: one object that holds nodes, edges and labels.

They are recognised by what they have, so that nothing is imported. A graph cannot be cut into examples like a tensor:
its network always runs on the whole batch. Labels belong to graphs or to nodes, whichever the outputs have one row of.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace.errors import InputError

LABELS = "y"  # the attribute of labels
_PLAIN = frozenset({Tensor, tuple, list, dict, type(None)})  # what nearly all values are


def is_graph(value: object) -> bool:
    """Return whether a value is graph data: an object with edges that can apply a function to its tensors."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    return callable(getattr(kind, "apply", None)) and callable(getattr(kind, "to_dict", None)) and _has_edges(value)


def map_graph(graph: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of the graph with f applied to every tensor in it."""
    return copy.copy(graph).apply(f)


def tensors_of(graph: Any) -> list[Tensor]:
    """Return the tensors of a graph, in the order in which `map_graph` visits them."""
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    map_graph(graph, note)
    return found


def labels_in(graph: Any, index: int, given: tuple[str, ...]) -> tuple[Tensor, dict[str, Any]]:
    """Return the labels of a graph and what belongs to them: weights, or a mask of the nodes that count."""
    keys = set(graph.to_dict())
    if LABELS not in keys or graph[LABELS] is None:
        raise InputError(f"batch {index} is a {type(graph).__name__} without labels: write batch.y = ...")
    if "mask" not in keys and "batch_size" in keys and "n_id" in keys:
        raise InputError(
            f"batch {index} is a sampled part of a graph, whose first {graph['batch_size']} nodes are meant. Say so: "
            "batch.mask = torch.arange(batch.num_nodes) < batch.batch_size."
        )
    if "mask" not in keys and "train_mask" in keys:
        raise InputError(
            f"batch {index} is a graph with a train_mask; say which of its labels count: data.mask = data.train_mask "
            "for fit, data.mask = data.val_mask for validation data."
        )
    return graph[LABELS], {key: graph[key] for key in (*given, "mask") if key in keys}


def lacks_batch(model: nn.Module, graph: Any) -> bool:
    """Return whether `forward` takes the number of each node's graph, which only batches of graphs have."""
    return "batch" in inspect.signature(model.forward).parameters and graph.to_dict().get("batch") is None


def arguments_of(model: nn.Module, graph: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `forward`: x, edge_index, batch and others by name if it names them, else the graph."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = {p.name for p in named if p.default is p.empty}
    held: Mapping[str, Any] = graph.to_dict()
    if len(required) > 1 and required <= set(held):
        return (), {p.name: held[p.name] for p in named if p.name in held}
    return (graph,), {}


def _has_edges(value: Any) -> bool:
    held = getattr(value, "edge_index", None)
    return isinstance(held, Tensor) and held.layout is torch.strided
