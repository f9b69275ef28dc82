"""What a batch is, how the network is called on one, and where its logits are.

A batch of training data is a pair `(x, y)` or a mapping that holds the labels under a key. `x` is a tensor, a tuple of
tensors (several inputs, passed positionally), or a mapping. A mapping goes to the network as keyword arguments where
its `forward` names the mapping's keys (Hugging Face), and as one positional argument where it does not. A third
element, or a key `mask` beside those that `forward` names, says at which positions labels count.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset, IterableDataset
from tqdm.auto import tqdm

from laplace.errors import InputError, LaplaceError, ModelError
from laplace.precision import as_called

MASK = "mask"  # the key of a mapping's mask


@dataclass(frozen=True)
class Keys:
    """Under which keys a mapping holds the main input and the labels."""

    x: str = "input_ids"
    y: str = "labels"


@dataclass(frozen=True)
class Inputs:
    """Everything that the network is called with, apart from the labels."""

    x: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    keys: Keys = field(default_factory=Keys)

    def map(self, f: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with f of every tensor in x."""
        return Inputs(_map_tensors(self.x, f), self.kwargs, self.keys)

    def to(self, device: torch.device) -> Inputs:
        """The same inputs on `device`."""
        kwargs = _map_tensors(dict(self.kwargs), lambda t: t.to(device))
        return Inputs(_map_tensors(self.x, lambda t: t.to(device)), kwargs, self.keys)

    def normal_tensors(self) -> Inputs:
        """The same with tensors that were made in inference mode copied, so that autograd can work on them."""
        if not any(t.is_inference() for t in _tensors(self.x)):
            return self
        with torch.inference_mode(False):
            return self.map(torch.clone)

    @property
    def size(self) -> int | None:
        """The number of examples, where every tensor has the same leading size; else None."""
        sizes = {t.shape[0] if t.dim() else 0 for t in _tensors(self.x)}
        return sizes.pop() or None if len(sizes) == 1 else None

    def part(self, start: int, stop: int) -> Inputs:
        """Some of the examples; the whole batch where they cannot be told apart."""
        if self.size is None:
            return self
        kwargs = {k: v[start:stop] if _leads(v, self.size) else v for k, v in self.kwargs.items()}
        return Inputs(self.map(lambda t: t[start:stop]).x, kwargs, self.keys)

    def tensors(self) -> list[Tensor]:
        """All tensors in x."""
        return list(_tensors(self.x))

    def with_tensors(self, tensors: Iterable[Tensor]) -> Inputs:
        """The same with other tensors, in the order of `tensors()`."""
        others = iter(tensors)
        return self.map(lambda _: next(others))

    def call_with(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> Tensor:
        """The network's logits with some parameters replaced; the network itself is not written to."""
        args, named = self._arguments(model)
        with as_called():
            return logits(functional_call(model, dict(parameters), args, {**named, **self.kwargs}))

    def call(self, model: nn.Module) -> Tensor:
        """The network's logits on these inputs."""
        args, named = self._arguments(model)
        try:
            with as_called():
                output = model(*args, **named, **self.kwargs)
        except (TypeError, RuntimeError) as error:
            if isinstance(error, (LaplaceError, torch.OutOfMemoryError)):
                raise
            raise ModelError(f"the network failed on {described(self.x, self.kwargs)}: {error}") from error
        return logits(output)

    def _arguments(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self.x, Mapping) and _takes_keywords(model, self.x, self.keys):
            left = {self.keys.y} if _reads_mask(model, self.x, self.keys) else {self.keys.y, MASK}
            return (), {k: v for k, v in self.x.items() if k not in left}
        return (tuple(self.x), {}) if isinstance(self.x, (tuple, list)) else ((self.x,), {})


@dataclass(frozen=True)
class Batch:
    """Inputs and labels, and the number of the batch in its loader."""

    index: int
    inputs: Inputs
    y: Tensor
    mask: Tensor | None = None  # (N, *positions), true where a label counts; None where all do

    def part(self, start: int, stop: int) -> Batch:
        """Some of the examples."""
        mask = None if self.mask is None else self.mask[start:stop]
        return Batch(self.index, self.inputs.part(start, stop), self.y[start:stop], mask)


def split(batch: Any, keys: Keys, index: int, model: nn.Module) -> Batch:
    """The `index`-th batch of a loader of `model`."""
    mask = None
    if isinstance(batch, Mapping):
        if keys.y not in batch:
            raise InputError(
                f"batch {index} is a mapping with keys {sorted(map(str, batch))}, none of which is the label key "
                f"{keys.y!r}. Say where the labels are: Laplace(..., dict_key_y='...')."
            )
        y, x = batch[keys.y], batch
        mask = None if _reads_mask(model, batch, keys) else batch.get(MASK)
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)) and len(batch) in (2, 3):
        x, y, mask = batch if len(batch) == 3 else (*batch, None)
    else:
        length = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise InputError(
            f"batch {index} is a {type(batch).__name__}{length}. A batch is a pair (x, y), or a mapping with the "
            "labels under dict_key_y; several inputs go into a tuple: ((x1, x2), y); a mask of labels comes third: "
            "(x, y, mask)."
        )
    if mask is not None and not isinstance(mask, Tensor):
        raise InputError(
            f"the mask of batch {index}, its third part, is a {type(mask).__name__}; needed is a tensor, true where a "
            "label counts. Several inputs go into a tuple: ((x1, x2), y)."
        )
    if not isinstance(y, Tensor):
        raise InputError(
            f"the labels of batch {index} are a {type(y).__name__}; needed is a tensor: torch.as_tensor(y)."
        )
    return Batch(index, Inputs(x, keys=keys), y, mask)


def training_batches(loader: Iterable[Any], model: nn.Module, keys: Keys, progress: bool, what: str) -> Iterator[Batch]:
    """The batches of a loader, the inputs on the network's device; no empty batches."""
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise InputError(
            f"the loader is a {type(loader).__name__}; a DataLoader or another iterable of batches is needed."
        )
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise InputError(f"a {type(loader).__name__} gives single examples. Write DataLoader(dataset, batch_size=128).")
    device = device_of(model)
    for index, batch in enumerate(_bar(loader, progress, what)):
        found = split(batch, keys, index, model)
        if found.y.shape[:1] != (0,):
            yield replace(found, inputs=found.inputs.to(device))


def prediction_batches(x: Any, keys: Keys, kwargs: Mapping[str, Any], progress: bool) -> Iterator[Inputs]:
    """The inputs in `x`: one batch, or the batches `x`, `(x,)`, `(x, y)`, `(x, y, mask)` or mappings of a loader."""
    if isinstance(x, (Tensor, Mapping, tuple)):
        yield Inputs(x, kwargs, keys)
        return
    if not isinstance(x, Iterable) or hasattr(x, "__array__"):
        raise InputError(
            f"x is a {type(x).__name__}; a tensor, a mapping, a tuple of inputs or a DataLoader is needed."
        )
    for batch in _bar(x, progress, "predict"):
        one = isinstance(batch, (tuple, list)) and len(batch) in (1, 2, 3)
        yield Inputs(batch[0] if one else batch, kwargs, keys)


def _bar(loader: Iterable[Any], progress: bool, what: str) -> Iterable[Any]:
    total = length_hint(loader, 0) or None  # a loader over an iterable dataset has a len() that fails
    return tqdm(loader, desc=what, total=total, disable=not progress, unit="batch", leave=False)


def described(x: Any, kwargs: Mapping[str, Any]) -> str:
    """What a network was called with, in words."""
    if isinstance(x, Tensor):
        text = f"a tensor of shape {tuple(x.shape)} and dtype {x.dtype}"
    elif isinstance(x, Mapping):
        text = "a mapping of " + ", ".join(f"{k}: {described(v, {})}" for k, v in list(x.items())[:4])
    elif isinstance(x, (tuple, list)):
        text = f"{len(x)} inputs, the first {described(x[0], {})}" if len(x) else "no input"
    else:
        text = f"a {type(x).__module__}.{type(x).__name__} (a tensor is needed: torch.as_tensor)"
    return text + (f" and keywords {sorted(kwargs)}" if kwargs else "")


def logits(output: Any) -> Tensor:
    """The tensor of outputs in whatever a network returns: itself, `.logits`, `['logits']` or a tuple of one."""
    found = output
    if isinstance(found, Mapping):
        found = found.get("logits", found)
    elif not isinstance(found, Tensor):
        found = getattr(found, "logits", found)
    if isinstance(found, (tuple, list)) and len(found) == 1:
        found = found[0]
    if not isinstance(found, Tensor):
        keys = f" with keys {sorted(map(str, output))}" if isinstance(output, Mapping) else ""
        raise ModelError(
            f"the network returned a {type(output).__name__}{keys}. Needed: a tensor, or an object or mapping with "
            "`logits`. Wrap the network in a module that returns the tensor."
        )
    return found


def device_of(model: nn.Module) -> torch.device:
    """The device of the network's first parameter or buffer."""
    for tensor in _state(model):
        return tensor.device
    return torch.device("cpu")


def _state(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _takes_keywords(model: nn.Module, mapping: Mapping[str, Any], keys: Keys) -> bool:
    """Whether `forward` wants the mapping's entries by name: it names the main one, or all it requires are there."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in parameters if p.default is p.empty and p.name in names}
    if keys.x in names:
        return True
    return required <= set(mapping) and bool(names & set(mapping) or any(p.kind is p.VAR_KEYWORD for p in parameters))


def _reads_mask(model: nn.Module, mapping: Mapping[str, Any], keys: Keys) -> bool:
    """Whether a mapping's mask is the network's own: it takes one by name, any keyword, or the whole mapping."""
    parameters = inspect.signature(model.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return anything or MASK in parameters or not _takes_keywords(model, mapping, keys)


def _leads(value: Any, n: int | None) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == n


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        for value in x.values():
            yield from _tensors(value)
    elif isinstance(x, (tuple, list)):
        for value in x:
            yield from _tensors(value)


def _map_tensors(x: Any, f: Any) -> Any:
    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, Mapping):
        entries = {key: _map_tensors(value, f) for key, value in x.items()}
        if not isinstance(x, MutableMapping) or type(x) is dict:
            return entries
        same = copy.copy(x)  # a BatchEncoding stays one
        same.update(entries)
        return same
    if isinstance(x, (tuple, list)):
        mapped = [_map_tensors(value, f) for value in x]
        return type(x)(*mapped) if hasattr(x, "_fields") else type(x)(mapped)
    return x
