"""Say what two loaders have in common, by identity and without reading them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from laplace.network.loaders import ArrayBatches


def overlap(used: Any, given: Any, for_what: str = "that la was fitted on") -> str:
    """Say what two loaders have in common, by identity: the loader, the dataset, its rows, or their tensors."""
    if used is None:
        return ""
    if used is given:
        return f"is the loader {for_what}"
    (data, rows), (other, others) = (_rows_of(getattr(each, "dataset", each)) for each in (used, given))
    if data is other:
        if rows is None or others is None:
            return f"has the dataset {for_what}"
        common = len({*rows} & {*others})
        return f"has {common:,} examples {for_what}" if common else ""
    known = {*_places(data)}
    if rows is None and others is None and any(place in known for place in _places(other)):
        return f"holds the tensors {for_what}"
    return ""


def _rows_of(dataset: Any) -> tuple[Any, list[int] | None]:
    """Return the dataset below subsets, and which of its rows are taken. None means all."""
    rows: list[int] | None = None
    while isinstance(dataset, Subset):
        taken = list(dataset.indices)
        rows = taken if rows is None else [taken[row] for row in rows]
        dataset = dataset.dataset
    return dataset, rows


Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # address, shape, steps in memory


def _places(data: Any) -> Iterator[Place]:
    """Yield where the tensors of a dataset, of whole arrays, or of a list of batches lie in memory.

    Empty ones lie nowhere, and sparse ones in several places: these are left out.
    """
    if isinstance(data, TensorDataset):
        yield from _places(data.tensors)
    elif isinstance(data, ArrayBatches):
        yield from _places([data.x, data.y])
    elif isinstance(data, np.ndarray) and data.nbytes:
        yield data.ctypes.data, data.shape, tuple(step // data.itemsize for step in data.strides)
    elif isinstance(data, Tensor) and data.layout is torch.strided and data.numel():
        yield data.data_ptr(), tuple(data.shape), data.stride()
    elif isinstance(data, Mapping):
        yield from (place for value in data.values() for place in _places(value))
    elif isinstance(data, (list, tuple)):
        yield from (place for value in data for place in _places(value))
