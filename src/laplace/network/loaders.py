"""Make batches of what users have instead of a loader: whole arrays, a Lightning DataModule, a dataset, a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from laplace.checks import shown, whole_number
from laplace.errors import InputError, OptionError
from laplace.network.arrays import is_array, numbers_in
from laplace.network.datasets import held_out_of, loader_of
from laplace.network.graphs import is_graph
from laplace.network.pytree import map_leaves

BATCH_SIZE = 128  # examples at a time, if whole arrays are given and nobody said how many
_STAGES = {"train": "fit", "val": "validate", "predict": "predict"}  # Lightning's names of them


class ArrayBatches:
    """Cut whole data into batches (x, y) of consecutive examples; may be read as often as needed.

    Args:
        x: the inputs: a tensor, an array, a DataFrame, a list of numbers, or a tuple or mapping of these, each with one
            entry per example.
        y: the labels, one entry per example.
        batch_size: examples per batch.
    """

    def __init__(self, x: Any, y: Any, batch_size: int = BATCH_SIZE) -> None:
        self.batch_size = whole_number(batch_size, "batch_size")
        self.y = y if isinstance(y, Tensor) else numbers_in(y)
        if not self.y.ndim:
            raise InputError(
                f"y={shown(y)} is the label of a single example, but a batch is needed. Write la.fit(x[0:1], y[0:1])."
            )
        self.x = map_leaves(x, is_array, _sliceable)
        sizes: list[int] = []
        map_leaves(self.x, _has_rows, lambda part: sizes.append(len(part) if part.ndim else 0))
        if not sizes or any(size != len(self.y) for size in sizes):
            came = " and ".join(map(str, dict.fromkeys(sizes))) or "no"
            raise InputError(f"x has {came} examples and y has {len(self.y)} labels; one label per example is needed.")

    def __len__(self) -> int:
        return -(-len(self.y) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for start in range(0, len(self.y), self.batch_size):
            part = slice(start, start + self.batch_size)
            yield map_leaves(self.x, _has_rows, lambda rows, part=part: rows[part]), self.y[part]


def training_data(
    loader: Any, override: Any, y: Any, batch_size: int | None, collate_fn: Callable[[list[Any]], Any] | None = None
) -> tuple[Any, Any]:
    """Return the loader of a fit and its option `override`, from what the user passed.

    `la.fit(x, y)` passes its labels as the second argument, which is `override` in laplace-torch's order.
    """
    if is_graph(loader):  # one batch
        loader = [loader]
    inputs = isinstance(loader, (Tensor, Mapping)) or is_array(loader) or _are_inputs(loader)
    if not isinstance(override, (bool, np.bool_)) and (inputs or isinstance(override, Tensor) or is_array(override)):
        if y is not None:
            raise OptionError("la.fit got labels twice, as second argument and as y=; give them once.")
        if not inputs:
            raise OptionError(
                f"override={shown(override)}; it is True or False. A {type(loader).__name__} has its own labels; write "
                "la.fit(x, y) if these are the labels of all data, with all inputs before them."
            )
        y, override = override, True
    if y is None:
        return loader_of(dataloader_of(loader, "train"), collate_fn, batch_size), override
    if collate_fn is not None:
        raise OptionError("collate_fn= is for a dataset of single examples; la.fit(x, y) needs none. Leave it out.")
    if not inputs:
        raise InputError(
            f"labels came beside a {type(loader).__name__}, which is no array of inputs. Write la.fit(x, y) for whole "
            "data, or la.fit(loader): a loader has its own labels."
        )
    return ArrayBatches(loader, y, BATCH_SIZE if batch_size is None else batch_size), override


def dataloader_of(data: Any, stage: str) -> Any:
    """Return the 'train', 'val' or 'predict' dataloader of a Lightning DataModule; anything else as it is.

    A DataModule that no Trainer has prepared is prepared and set up here, as a Trainer would.
    """
    make = getattr(data, f"{stage}_dataloader", None)
    if make is None or not callable(getattr(data, "setup", None)) or not callable(getattr(data, "prepare_data", None)):
        return data
    if getattr(data, "trainer", None) is None:
        data.prepare_data()
        data.setup(stage=_STAGES[stage])
    name = f"{type(data).__name__}.{stage}_dataloader()"
    try:
        loader = make()
    except Exception as error:  # Lightning's own error for a method that is not there, or one of the user's code
        raise InputError(f"{name} failed: {str(error) or repr(error)}") from error
    if isinstance(loader, (list, tuple, Mapping)) or hasattr(loader, "flattened"):
        raise InputError(
            f"{name} gives {type(loader).__name__} of several loaders; pass the one that is meant instead of the "
            "DataModule."
        )
    return loader


def held_out_batches(data: Any) -> Any:
    """Return batches of data that was not trained on, of a DataModule, trainer, dataset or graph, or as they are."""
    return [data] if is_graph(data) else held_out_of(dataloader_of(data, "val"))


def is_pair(loader: Any) -> bool:
    """Return whether a loader is whole data instead, a tuple (x, y) of tensors or arrays."""
    return isinstance(loader, tuple) and len(loader) == 2 and all(isinstance(p, Tensor) or is_array(p) for p in loader)


def examples_in(loader: Iterable[Any], first: int) -> int:
    """Return how many examples a loader says that it gives, 0 if it says nothing. Nothing is read.

    If it says only how many batches, these are at least so many examples, provided that all but the last batch are as
    large as the first, which has `first` examples.
    """
    batches = length_hint(loader, 0)  # a loader over an iterable dataset has a len() that fails
    if isinstance(loader, ArrayBatches):
        return len(loader.y)
    if batches and isinstance(loader, DataLoader) and loader.batch_size is not None and not loader.drop_last:
        return length_hint(loader.sampler, 0)
    return (batches - 1) * first + 1 if batches else 0


def _sliceable(array: Any) -> np.ndarray:
    """Return an array whose rows can be taken. The columns of a DataFrame are features: floating-point numbers."""
    values = numbers_in(array)
    return values.astype(np.float64) if hasattr(array, "columns") and values.dtype.kind in "biu" else values


def _has_rows(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _are_inputs(value: object) -> bool:
    """Return whether a tuple holds several inputs, and not batches."""
    return isinstance(value, tuple) and bool(value) and all(isinstance(p, Tensor) or is_array(p) for p in value)
