"""Define what a batch is, and read the batches of a loader.

A batch of training data is a pair `(x, y)`, or a mapping that holds the labels under a key. Weights of the examples, or
of their positions, are a third element, or stand under the key `weights`. A batch may also be graphs of PyTorch
Geometric with their labels in `y`.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from laplace.checks import shown
from laplace.errors import InputError, MissingKeyError, OptionError, note
from laplace.network.arrays import as_tensors, dtype_of, is_array
from laplace.network.graphs import is_graph, labels_in
from laplace.network.inputs import MASK, Inputs, Keys, described, read_entries, reads_mask
from laplace.network.loaders import ArrayBatches, dataloader_of, is_pair
from laplace.network.progress import with_bar
from laplace.network.pytree import tensors_in


@dataclass(frozen=True)
class Batch:
    """Holds inputs and labels, and the number of the batch in its loader."""

    index: int
    inputs: Inputs
    y: Tensor
    given: Mapping[str, Tensor] = field(default_factory=dict)  # what else is given, such as `weights`
    start: int = 0  # the number of its first example, if it is a part of the loader's batch

    def tensors(self) -> list[Tensor]:
        """Return all tensors: inputs, labels, and what else is given."""
        return [*self.inputs.tensors(), self.y, *self.given.values()]

    def labels(self, start: int, stop: int) -> Batch:
        """Return the batch with the labels, weights and so on of some examples. Inputs stay whole."""
        return self.at(slice(start, stop))

    def at(self, index: slice | Tensor) -> Batch:
        """Return the batch with the labels, weights and so on at some indices. Inputs stay whole."""
        return replace(self, y=self.y[index], given={key: value[index] for key, value in self.given.items()})


def split(batch: Any, keys: Keys, index: int, model: nn.Module) -> Batch:
    """Split the `index`-th batch of a loader into inputs, labels and what else is given."""
    if is_graph(batch):
        x, (y, given) = batch, labels_in(batch, index, keys.given)
    elif isinstance(batch, Mapping):
        if keys.y not in batch:
            raise MissingKeyError(
                f"batch {index} is a mapping with keys {sorted(map(str, batch))}, none of which is the label key "
                f"{keys.y!r}. Say where the labels are: Laplace(..., dict_key_y='...')."
            )
        apart = keys.given if reads_mask(model, batch, keys) else (*keys.given, MASK)
        y, x, given = batch[keys.y], batch, {key: batch[key] for key in apart if key in batch}
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)) and 2 <= len(batch) <= 2 + len(keys.given):
        x, y = batch[:2]
        given = dict(zip(keys.given, batch[2:], strict=False))
    else:
        length = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise InputError(
            f"batch {index} is a {type(batch).__name__}{length}. A batch is a pair (x, y), or {_form(keys)}, or a "
            "mapping with the labels under dict_key_y; several inputs go into a tuple: ((x1, x2), y)."
        )
    x = x if isinstance(x, Tensor) else as_tensors(x, dtype_of(model))
    y, given = as_tensors(y), as_tensors(given) if given else given
    if isinstance(y, numbers.Number) or (isinstance(y, Tensor) and not y.dim()):
        if not isinstance(batch, Mapping):
            raise InputError(
                f"batch {index} is a pair with the one label {shown(y)}: a single example. Write (x[0:1], y[0:1]); a "
                "DataLoader(dataset, batch_size=128) joins examples to batches."
            )
        raise InputError(
            f"batch {index} is a mapping with the one label {shown(y)}: a single example. Examples are joined to "
            "batches by a collator, such as a data collator of transformers: write la.fit(examples, collate_fn=...), "
            "or in other calls DataLoader(examples, batch_size=32, collate_fn=...)."
        )
    for what, value in {"labels": y, **given}.items():
        if not isinstance(value, Tensor):
            came = f"{'is' if what == MASK else 'are'} a {type(value).__name__}"
            raise InputError(f"the {what} of batch {index} {came}; a tensor is needed: torch.as_tensor(...).")
    inputs = Inputs.of(x, {}, keys, keys.pairs)
    if keys.pairs and any(t.dim() < 2 or t.shape[:2] != (*y.shape[:1], 2) for t in _inputs_of(x, keys, model)):
        raise InputError(
            f"batch {index} has {described(x, {})} for {len(y)} labels; preferences are between the two inputs of "
            "pairs, (B, 2, ...): torch.stack([first, second], 1). A network that returns the scores of both inputs, "
            "(B, 2), is a classifier: take likelihood='classification'."
        )
    if keys.pairs and isinstance(x, Mapping):
        inputs = replace(inputs, x=read_entries(model, x, keys))
    return Batch(index, inputs, y, given)


def _form(keys: Keys) -> str:
    return f"(x, y, {', '.join(keys.given)})"


def _inputs_of(x: Any, keys: Keys, model: nn.Module) -> list[Tensor]:
    """Return all tensors of x, without those of a mapping that describe the labels."""
    return tensors_in(read_entries(model, x, keys) if isinstance(x, Mapping) else x)


def training_batches(
    loader: Iterable[Any], model: nn.Module, keys: Keys, progress: bool | None, what: str
) -> Iterator[Batch]:
    """Yield the batches of a loader on the network's device. Skips empty batches.

    Each batch is valid only until the next one is read.
    """
    if isinstance(loader, Tensor) or hasattr(loader, "__array__"):
        raise InputError(
            f"the loader is a {type(loader).__name__}, which has no labels. Write la.fit(x, y), or (x, y) for data to "
            "tune with; or give a DataLoader or another iterable of batches."
        )
    require_iterable(loader)
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise InputError(f"a {type(loader).__name__} gives single examples. Write DataLoader(dataset, batch_size=128).")
    if isinstance(loader, list) and is_pair(tuple(loader)):
        raise InputError(
            "the loader is a list of 2 arrays or tensors, as a batch is. Write [(x, y)] for all data in one batch, or "
            "the tuple (x, y) to have it cut into batches."
        )
    if is_pair(loader):
        loader = ArrayBatches(*loader)
    device = device_of(model)
    for index, batch in enumerate(_numbered(with_bar(loader, progress, what))):
        found = split(batch, keys, index, model)
        if found.y.shape[:1] != (0,):
            given = found.inputs.tensors()
            if given and all(t.shape[:1] == (0,) for t in given):
                raise InputError(f"batch {index}: {len(found.y)} labels for 0 inputs.")
            yield on_device(found, device)


def require_iterable(loader: Any) -> None:
    """Refuse what has no batches."""
    if not (isinstance(loader, Iterable) or hasattr(loader, "__getitem__")):
        raise InputError(
            f"the loader is a {type(loader).__name__}; a DataLoader or another iterable of batches is needed."
        )


def _numbered(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a loader. If the loader itself fails, its error gets a note of the batch."""
    unread, index = iter(batches), 0
    while True:
        try:
            batch = next(unread)
        except StopIteration:
            return
        except Exception as error:
            note(error, f"raised by the loader while it read batch {index}")
            raise
        yield batch
        index += 1


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to the network's device and copy its labels.

    Moments, metrics and scores keep labels and weights longer than the batch exists, and a loader may refill its
    tensors. They are small, so we always copy them. Inputs are copied by whoever keeps them.
    """
    given = {key: value.to(device, copy=True) for key, value in batch.given.items()}
    return Batch(batch.index, batch.inputs.to(device), batch.y.to(device, copy=True), given)


def given_by_name(x: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the inputs and keywords of a call: without `x`, the keywords are the inputs, as in la(**batch)."""
    if x is not None:
        return x, kwargs
    if not kwargs:
        raise OptionError("there are no inputs. Write la(x), or la(**batch) with the entries of a mapping.")
    return kwargs, {}


def prediction_batches(
    x: Any, keys: Keys, kwargs: Mapping[str, Any], progress: bool | None, what: str = "batch"
) -> Iterator[tuple[str, Inputs]]:
    """Yield the inputs in `x`, which is one batch or a loader.

    The batches of a loader may be `x`, `(x,)`, `(x, y)`, `(x, y, weights)` or mappings. Each comes with its name for
    error messages: `what` and its number, or nothing if `x` is not a loader.
    """
    x = dataloader_of(x, "predict")
    if is_one_batch(x):
        yield "", Inputs.of(x, kwargs, keys)
        return
    if not isinstance(x, Iterable):
        raise InputError(
            f"x is a {type(x).__name__}; a tensor, an array, a DataFrame, a mapping, a tuple of inputs or a DataLoader "
            "is needed."
        )
    for index, batch in enumerate(_numbered(with_bar(x, progress, "predict"))):
        one = isinstance(batch, (tuple, list)) and 1 <= len(batch) <= 2 + len(keys.given) and not is_array(batch)
        yield f"{what} {index}", Inputs(batch[0] if one else batch, kwargs, keys)


def is_one_batch(x: Any) -> bool:
    """Return whether `x` is the inputs of one batch, and not a loader."""
    return isinstance(x, (Tensor, Mapping, tuple)) or is_array(x) or is_graph(x)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the network's first parameter or buffer."""
    for tensor in _state(model):
        return tensor.device
    return torch.device("cpu")


def _state(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
