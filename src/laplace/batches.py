"""What a batch is, how the network is called on one, and where its logits are.

A batch of training data is a pair `(x, y)` or a mapping that holds the labels under a key; weights of the examples, or
of their positions, are a third element, or under the key `weights`. `x` is a tensor, a tuple of tensors (several
inputs, passed positionally), or a mapping. A mapping goes to the network as keyword arguments where its `forward` names
the mapping's keys (Hugging Face), and as one positional argument where it does not. Its key `mask`, unless the network
reads it, says which labels count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset, IterableDataset
from tqdm.auto import tqdm

from laplace.errors import InputError, LaplaceError, ModelError
from laplace.nested import map_tensors, tensors_in
from laplace.precision import as_called

MASK = "mask"  # the key of a mapping's mask


@dataclass(frozen=True)
class Keys:
    """Under which keys a mapping holds the main input, the labels and what else belongs to them; what an example is."""

    x: str = "input_ids"
    y: str = "labels"
    further: tuple[str, ...] = ()  # what a likelihood needs beside the labels, the tuple's elements after them
    pairs: bool = False  # whether examples are pairs of inputs

    @property
    def given(self) -> tuple[str, ...]:
        """What a batch may hold after its labels."""
        return (*self.further, "weights")


@dataclass(frozen=True)
class Inputs:
    """Everything that the network is called with, apart from the labels."""

    x: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    keys: Keys = field(default_factory=Keys)
    pairs: bool = False  # whether every tensor is of pairs, (B, 2, ...), and the output is that of their differences

    def map(self, f: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with f of every tensor in x."""
        return replace(self, x=map_tensors(self.x, f))

    @classmethod
    def paired(cls, first: Any, second: Any, kwargs: Mapping[str, Any], keys: Keys) -> Inputs:
        """Pairs of two batches of inputs."""
        others = tensors_in(second)
        shapes = [t.shape for t in tensors_in(first)]
        if type(first) is not type(second) or not shapes or shapes != [t.shape for t in others]:
            raise InputError(
                f"{described(first, {})} and {described(second, {})} cannot be compared one by one; two batches of the "
                "same shapes are needed."
            )
        rest = iter(others)
        return cls(map_tensors(first, lambda t: torch.stack([t, next(rest)], 1)), kwargs, keys, pairs=True)

    def singles(self) -> Inputs:
        """The inputs of all pairs one after the other, (2 B, ...)."""
        return replace(self.map(lambda t: t.flatten(0, 1)), pairs=False) if self.pairs else self

    def combined(self, t: Tensor) -> Tensor:  # (2 B, ...) -> (B, ...)
        """What the examples have of what the single inputs have: of a pair the second minus the first."""
        return t.unflatten(0, (-1, 2)).diff(dim=1).squeeze(1) if self.pairs else t

    def to(self, device: torch.device) -> Inputs:
        """The same inputs on `device`."""
        if all(t.device == device for t in (*tensors_in(self.x), *tensors_in(self.kwargs))):
            return self
        kwargs = map_tensors(dict(self.kwargs), lambda t: t.to(device))
        return replace(self.map(lambda t: t.to(device)), kwargs=kwargs)

    def normal_tensors(self) -> Inputs:
        """The same with tensors that were made in inference mode copied, so that autograd can work on them."""
        if not any(t.is_inference() for t in tensors_in(self.x)):
            return self
        with torch.inference_mode(False):
            return self.map(torch.clone)

    @property
    def size(self) -> int | None:
        """The number of examples, where every tensor has the same leading size; else None."""
        sizes = {t.shape[0] if t.dim() else 0 for t in tensors_in(self.x)}
        return sizes.pop() or None if len(sizes) == 1 else None

    def part(self, start: int, stop: int) -> Inputs:
        """Some of the examples; the whole batch where they cannot be told apart."""
        if self.size is None:
            return self
        kwargs = {k: v[start:stop] if _leads(v, self.size) else v for k, v in self.kwargs.items()}
        return replace(self.map(lambda t: t[start:stop]), kwargs=kwargs)

    def tensors(self) -> list[Tensor]:
        """All tensors in x."""
        return tensors_in(self.x)

    def with_tensors(self, tensors: Iterable[Tensor]) -> Inputs:
        """The same with other tensors, in the order of `tensors()`."""
        others = iter(tensors)
        return self.map(lambda _: next(others))

    def call_with(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> Tensor:
        """The network's logits with some parameters replaced; the network itself is not written to."""
        if isinstance(model, nn.DataParallel):  # which cannot be called with other parameters
            parameters = {name.removeprefix("module."): t for name, t in parameters.items()}
            model = model.module
        args, named = self.singles()._arguments(model)
        with as_called():
            return self.combined(logits(functional_call(model, dict(parameters), args, {**named, **self.kwargs})))

    def call(self, model: nn.Module) -> Tensor:
        """The network's logits on these inputs."""
        args, named = self.singles()._arguments(model)
        try:
            with as_called():
                output = model(*args, **named, **self.kwargs)
        except (LaplaceError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a network may raise
            raise ModelError(f"the network failed on {described(self.singles().x, self.kwargs)}: {error}") from error
        return self.combined(logits(output))

    def _arguments(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self.x, Mapping) and _takes_keywords(model, self.x, self.keys):
            return (), _read(model, self.x, self.keys)
        return (tuple(self.x), {}) if isinstance(self.x, (tuple, list)) else ((self.x,), {})


@dataclass(frozen=True)
class Batch:
    """Inputs and labels, and the number of the batch in its loader."""

    index: int
    inputs: Inputs
    y: Tensor
    given: Mapping[str, Tensor] = field(default_factory=dict)  # what else is said of the examples, such as `weights`

    def tensors(self) -> list[Tensor]:
        """All tensors: of the inputs, the labels, and what else is said."""
        return [*self.inputs.tensors(), self.y, *self.given.values()]

    def labels(self, start: int, stop: int) -> Batch:
        """With the labels of some of its examples, and what is said of them."""
        return self.at(slice(start, stop))

    def at(self, index: slice | Tensor) -> Batch:
        """With the labels at some indices, and what is said of them."""
        return replace(self, y=self.y[index], given={key: value[index] for key, value in self.given.items()})


def split(batch: Any, keys: Keys, index: int, model: nn.Module) -> Batch:
    """The `index`-th batch of a loader of `model`."""
    if isinstance(batch, Mapping):
        if keys.y not in batch:
            raise InputError(
                f"batch {index} is a mapping with keys {sorted(map(str, batch))}, none of which is the label key "
                f"{keys.y!r}. Say where the labels are: Laplace(..., dict_key_y='...')."
            )
        apart = keys.given if _reads_mask(model, batch, keys) else (*keys.given, MASK)
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
    for what, value in {"labels": y, **given}.items():
        if not isinstance(value, Tensor):
            came = f"{'is' if what == MASK else 'are'} a {type(value).__name__}"
            raise InputError(f"the {what} of batch {index} {came}; needed is a tensor: torch.as_tensor(...).")
    inputs = Inputs(x, keys=keys, pairs=keys.pairs)
    if keys.pairs and any(t.dim() < 2 or t.shape[:2] != (*y.shape[:1], 2) for t in _inputs_of(x, keys, model)):
        raise InputError(
            f"batch {index} has {described(x, {})} for {len(y)} labels; preferences are between the two inputs of "
            "pairs, (B, 2, ...): torch.stack([first, second], 1)."
        )
    if keys.pairs and isinstance(x, Mapping):
        inputs = replace(inputs, x=_read(model, x, keys))
    return Batch(index, inputs, y, given)


def _form(keys: Keys) -> str:
    return f"(x, y, {', '.join(keys.given)})"


def _inputs_of(x: Any, keys: Keys, model: nn.Module) -> list[Tensor]:
    """All tensors of x but what a mapping says about its examples."""
    return tensors_in(_read(model, x, keys) if isinstance(x, Mapping) else x)


def _read(model: nn.Module, mapping: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """What of a mapping is the network's: all but the labels and what is said of them."""
    apart = {keys.y, *keys.given} | (set() if _reads_mask(model, mapping, keys) else {MASK})
    return {key: value for key, value in mapping.items() if key not in apart}


def training_batches(loader: Iterable[Any], model: nn.Module, keys: Keys, progress: bool, what: str) -> Iterator[Batch]:
    """The batches of a loader, the inputs on the network's device; no empty batches."""
    if isinstance(loader, Tensor) or not (isinstance(loader, Iterable) or hasattr(loader, "__getitem__")):
        raise InputError(
            f"the loader is a {type(loader).__name__}; a DataLoader or another iterable of batches is needed."
        )
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise InputError(f"a {type(loader).__name__} gives single examples. Write DataLoader(dataset, batch_size=128).")
    if isinstance(loader, (tuple, list)) and len(loader) == 2 and all(isinstance(part, Tensor) for part in loader):
        raise InputError(
            f"the loader is a {type(loader).__name__} of 2 tensors, as a batch is. Write [(x, y)] for all "
            "data in one batch, or DataLoader(TensorDataset(x, y), batch_size=128)."
        )
    device = device_of(model)
    for index, batch in enumerate(_bar(loader, progress, what)):
        found = split(batch, keys, index, model)
        if found.y.shape[:1] != (0,):
            if found.inputs.tensors() and all(t.shape[:1] == (0,) for t in found.inputs.tensors()):
                raise InputError(f"batch {index}: {len(found.y)} labels for 0 inputs.")
            inputs = found.inputs.to(device)
            yield found if inputs is found.inputs else replace(found, inputs=inputs)


def prediction_batches(x: Any, keys: Keys, kwargs: Mapping[str, Any], progress: bool) -> Iterator[Inputs]:
    """The inputs in `x`: one batch, or the batches `x`, `(x,)`, `(x, y)`, `(x, y, weights)` or mappings of a loader."""
    if isinstance(x, (Tensor, Mapping, tuple)):
        yield Inputs(x, kwargs, keys)
        return
    if not isinstance(x, Iterable) or hasattr(x, "__array__"):
        raise InputError(
            f"x is a {type(x).__name__}; a tensor, a mapping, a tuple of inputs or a DataLoader is needed."
        )
    for batch in _bar(x, progress, "predict"):
        one = isinstance(batch, (tuple, list)) and 1 <= len(batch) <= 2 + len(keys.given)
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
