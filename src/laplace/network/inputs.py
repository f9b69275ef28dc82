"""Define the inputs of a batch, how the network is called on them, and where the logits are in what it returns.

Inputs are a tensor, a tuple of tensors (several inputs, passed by position), or a mapping. A mapping is passed as
keyword arguments if the network's `forward` names its keys (Hugging Face), and otherwise as one positional argument.
Its key `mask` says which labels count, unless the network itself reads it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace.checks import shown
from laplace.errors import InputError, LaplaceError, ModelError, OptionError
from laplace.linalg.autocast import as_called
from laplace.network.arrays import as_tensors, dtype_of
from laplace.network.graphs import arguments_of, is_graph, lacks_batch
from laplace.network.pytree import map_tensors, tensors_in
from laplace.network.replica import call_with
from laplace.network.watching import EXAMPLES, is_unwatched, watch

MASK = "mask"  # the key of a mapping's mask
_CASTS = {  # how inputs get the dtype of the weights
    torch.float32: ".float()",
    torch.float64: ".double()",
    torch.float16: ".half()",
    torch.bfloat16: ".bfloat16()",
}
_WHOLE = re.compile(r"\b(Long|Int|Short|Byte|Char|long int|int|unsigned char)\b")  # dtypes in torch's errors
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True)
class Keys:
    """Names the keys under which a mapping holds the main input, the labels, and what belongs to the labels."""

    x: str = "input_ids"
    y: str = "labels"
    further: tuple[str, ...] = ()  # what the likelihood needs besides labels: elements after them in a tuple
    pairs: bool = False  # whether examples are pairs of inputs

    def __post_init__(self) -> None:
        for name, key in {"dict_key_x": self.x, "dict_key_y": self.y}.items():
            if not isinstance(key, str):
                raise OptionError(f"{name}={shown(key)} must be a string: a key of the mapping.")

    @property
    def given(self) -> tuple[str, ...]:
        """Return the names of what a batch may hold after its labels."""
        return (*self.further, "weights")


@dataclass(frozen=True)
class Inputs:
    """Holds all arguments of one call of the network, without the labels."""

    x: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    keys: Keys = field(default_factory=Keys)
    pairs: bool = False  # whether tensors hold pairs, (B, 2, ...), and the output is their difference
    shared: frozenset[int] | None = None  # indices of tensors that all examples share; None if unknown

    @classmethod
    def of(cls, x: Any, kwargs: Mapping[str, Any], keys: Keys, pairs: bool = False) -> Inputs:
        """Return the inputs of a call. A single tensor is known to belong to the examples."""
        return cls(x, kwargs, keys, pairs, frozenset() if isinstance(x, Tensor) and not kwargs else None)

    def map(self, f: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the inputs with f applied to every tensor, keyword arguments included."""
        if isinstance(self.x, Tensor) and not self.kwargs:
            return Inputs(f(self.x), self.kwargs, self.keys, self.pairs, self.shared)
        x = map_tensors(self.x, f)  # x first, as in `tensors`
        return replace(self, x=x, kwargs=map_tensors(dict(self.kwargs), f) if self.kwargs else self.kwargs)

    @classmethod
    def paired(cls, first: Any, second: Any, kwargs: Mapping[str, Any], keys: Keys) -> Inputs:
        """Pair two batches of inputs, example by example."""
        first, second = as_tensors(first), as_tensors(second)
        others = tensors_in(second)
        shapes = [t.shape for t in tensors_in(first)]
        if type(first) is not type(second) or not shapes or shapes != [t.shape for t in others]:
            raise InputError(
                f"{described(first, {})} and {described(second, {})} cannot be paired; give two batches of the "
                "same shapes."
            )
        rest = iter(others)
        return cls(map_tensors(first, lambda t: torch.stack([t, next(rest)], 1)), kwargs, keys, pairs=True)

    def singles(self) -> Inputs:
        """Return the inputs of all pairs one after the other, (2 B, ...)."""
        return replace(self, x=map_tensors(self.x, lambda t: t.flatten(0, 1)), pairs=False) if self.pairs else self

    def combined(self, t: Tensor) -> Tensor:  # (2 B, ...) -> (B, ...)
        """Combine values of single inputs to values of examples: for a pair, the second minus the first."""
        return t.unflatten(0, (-1, 2)).diff(dim=1).squeeze(1) if self.pairs else t

    def to(self, device: torch.device) -> Inputs:
        """Return the inputs on `device`. Refuses sparse tensors, which cannot be split into examples."""
        given = self.tensors()
        if sparse := [t for t in given if t.layout in _SPARSE]:
            raise InputError(
                f"an input of shape {tuple(sparse[0].shape)} is sparse ({sparse[0].layout}); inputs are dense tensors, "
                "whose examples can be taken apart. Write x.to_dense(); where the network needs a sparse one, let its "
                "forward call x.to_sparse()."
            )
        return self if all(t.device == device for t in given) else self.map(lambda t: t.to(device))

    def as_tensors(self, model: nn.Module) -> Inputs:
        """Return the inputs with arrays, DataFrames and lists of numbers as tensors in the dtype of the weights."""
        kwargs = as_tensors(dict(self.kwargs), dtype_of(model)) if self.kwargs else self.kwargs
        x = self.x if isinstance(self.x, Tensor) else as_tensors(self.x, dtype_of(model))
        return self if x is self.x and kwargs is self.kwargs else replace(self, x=x, kwargs=kwargs)

    def copied(self) -> Inputs:
        """Copy the inputs. Whoever keeps inputs must copy them, because a loader may refill its tensors."""
        return self.map(torch.clone)

    def normal_tensors(self) -> Inputs:
        """Copy tensors that were made in inference mode, so that autograd can use them."""
        if not any(t.is_inference() for t in self.tensors()):
            return self
        with torch.inference_mode(False):
            return self.map(torch.clone)

    @property
    def size(self) -> int | None:
        """Return the number of examples, or None if the examples' tensors differ in their leading size."""
        if isinstance(self.x, Tensor) and not self.shared:
            return (self.x.shape[0] or None) if self.x.dim() else None
        if is_graph(self.x):  # cannot be cut by rows
            return None
        own = tensors_in(self.x)
        if self.shared:
            own = [t for i, t in enumerate(self.tensors()) if i not in self.shared]
        sizes = {t.shape[0] if t.dim() else 0 for t in own}
        return sizes.pop() or None if len(sizes) == 1 else None

    def own(self, n: int) -> list[bool]:
        """Return for each tensor whether it belongs to the n examples. If that is unknown, the shape decides."""
        if self.shared is None:
            return [t.shape[:1] == (n,) for t in self.tensors()]
        return [i not in self.shared for i in range(len(self.tensors()))]

    def part(self, start: int, stop: int) -> Inputs:
        """Return some of the examples, or the whole batch if it cannot be split."""
        return self if self.size is None else self._taken(lambda t: t[start:stop])

    def spread(self, k: int) -> Inputs:
        """Return up to k examples, evenly spaced over the batch, or the whole batch if it cannot be split."""
        if self.size is None or self.size <= k:
            return self
        return self.at(torch.linspace(0, self.size - 1, k).round().long())

    def at(self, index: Tensor) -> Inputs:  # (k,)
        """Return a copy of the examples at these indices."""
        return self._taken(lambda t: t[index.to(t.device)])

    def _taken(self, f: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the inputs with f applied to the tensors that belong to the examples."""
        own = iter(self.own(self.size or 0))
        return self.map(lambda t: f(t) if next(own) else t)

    def tensors(self) -> list[Tensor]:
        """Return all tensors: those in x, then those in keyword arguments."""
        if isinstance(self.x, Tensor) and not self.kwargs:
            return [self.x]
        return [*tensors_in(self.x), *tensors_in(self.kwargs)] if self.kwargs else tensors_in(self.x)

    def with_tensors(self, tensors: Iterable[Tensor]) -> Inputs:
        """Return the inputs with other tensors, in the order of `tensors()`."""
        others = iter(tensors)
        return self.map(lambda _: next(others))

    def call_with(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the network's logits with some parameters replaced. The network itself is not written to."""
        self._watch(model)
        if isinstance(model, nn.DataParallel):  # cannot be called with other parameters
            parameters = {name.removeprefix("module."): t for name, t in parameters.items()}
            model = model.module
        args, named = self.singles()._arguments(model)
        with as_called():
            return self.combined(logits(call_with(model, dict(parameters), args, {**named, **self.kwargs})))

    def call(self, model: nn.Module) -> Tensor:
        """Return the network's logits on these inputs."""
        self._watch(model)
        args, named = self.singles()._arguments(model)
        try:
            with as_called():
                output = model(*args, **named, **self.kwargs)
        except (LaplaceError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any error of the network
            came = f"the network failed on {described(self.singles().x, self.kwargs)}"
            hint = self._remedy(model, named, str(error))
            raise ModelError(f"{came}. {hint} Its error: {error}" if hint else f"{came}: {error}") from error
        return self.combined(logits(output))

    def _remedy(self, model: nn.Module, named: Mapping[str, Any], error: str) -> str:
        """Return what to write if the network failed on inputs of a kind that it probably does not take, else ''."""
        if isinstance(self.x, DataLoader) or (isinstance(self.x, list) and _are_batches(self.x)):
            return "la(x) takes the inputs of one batch; write la.predict(loader) for a loader."
        if isinstance(self.x, Mapping) and not named:
            return (
                "The whole mapping was its one argument. Its entries are passed as keywords if forward names the key "
                f"{self.keys.x!r} (dict_key_x=), or if its keys are the arguments of forward: write "
                "forward(self, inputs, ...) for a key 'inputs'."
            )
        if is_graph(self.x) and lacks_batch(model, self.x):
            return (
                "forward takes `batch`, which a single graph does not have: give the batches of a "
                "torch_geometric.loader.DataLoader, or Batch.from_data_list([graph])."
            )
        weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        others = {t.dtype for t in self.tensors() if t.is_floating_point()} - {weights}
        if weights in _CASTS and others:
            return f"Its weights are {weights}; write x{_CASTS[weights]}."
        if weights in _CASTS and _WHOLE.search(error) and not any(t.is_floating_point() for t in self.tensors()):
            array = str(weights).removeprefix("torch.")
            return (
                f"Its weights are {weights}, and the inputs are whole numbers; write x{_CASTS[weights]}, or "
                f"x.astype({array!r}) for an array."
            )
        if isinstance(self.x, Tensor) and self.x.dim() == 1 and self.x.is_floating_point():
            return "Each example is one number here. If the network takes columns of features, write x.reshape(-1, 1)."
        decoder = {"decoder_input_ids", "decoder_inputs_embeds"}
        if named and not decoder & set(named) and "decoder_input_ids" in inspect.signature(model.forward).parameters:
            return (
                "The network runs without its labels, from which it would make decoder_input_ids. Put them into the "
                "batch: batch['decoder_input_ids'] = model.prepare_decoder_input_ids_from_labels(batch['labels'])."
            )
        return ""

    def _watch(self, model: nn.Module) -> None:
        """Watch what a replica reads and writes, before its first run."""
        if is_unwatched(model):
            self.part(0, EXAMPLES).watched(model)

    def watched(self, model: nn.Module) -> Tensor | None:
        """Watch a run on these inputs, of another replica. Return its logits, or None if it failed."""

        def run(replica: nn.Module) -> Any:
            own = self.map(torch.clone)  # a network may write to its inputs
            args, named = own.singles()._arguments(replica)
            with as_called():
                return replica(*args, **named, **own.kwargs)

        output = watch(model, run)
        try:
            return None if output is None else self.combined(logits(output))
        except LaplaceError:  # the actual run raises it again
            return None

    def call_with_labels(self, model: nn.Module, y: Tensor) -> Any:
        """Call the network with its labels, too, and return all its outputs, such as a loss of its own."""
        args, named = self._arguments(model)
        if args and isinstance(self.x, Mapping):  # the whole mapping is one argument
            x = map_tensors(self.x, lambda t: t)
            x[self.keys.y] = y
            args, labels = (x,), {}
        else:
            labels = {self.keys.y: y}
        with as_called():
            return model(*args, **named, **self.kwargs, **labels)

    def _arguments(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if is_graph(self.x):
            return arguments_of(model, self.x)
        if isinstance(self.x, Mapping) and _takes_keywords(model, self.x, self.keys):
            return (), read_entries(model, self.x, self.keys)
        return (tuple(self.x), {}) if isinstance(self.x, (tuple, list)) else ((self.x,), {})


def logits(output: Any) -> Tensor:
    """Return the tensor of outputs in what a network returned: itself, `.logits`, `['logits']` or a tuple of one."""
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
    if found.is_complex():
        raise ModelError(
            f"the network's outputs are complex ({found.dtype}); likelihoods need real outputs. Return the real and "
            "imaginary parts as outputs of their own: torch.view_as_real(f).flatten(-2)."
        )
    return found


def described(x: Any, kwargs: Mapping[str, Any]) -> str:
    """Describe in words what a network was called with."""
    if isinstance(x, Tensor):
        text = f"a tensor of shape {tuple(x.shape)} and dtype {x.dtype}"
    elif is_graph(x):
        text = f"graphs {x}"
    elif isinstance(x, Mapping):
        text = "a mapping of " + ", ".join(f"{k}: {described(v, {})}" for k, v in list(x.items())[:4])
    elif isinstance(x, (tuple, list)):
        text = f"{len(x)} inputs, the first {described(x[0], {})}" if len(x) else "no input"
    else:
        text = f"a {type(x).__module__}.{type(x).__name__} (a tensor is needed: torch.as_tensor)"
    return text + (f" and keywords {sorted(kwargs)}" if kwargs else "")


def read_entries(model: nn.Module, mapping: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Return the entries of a mapping that the network reads: all but the labels and what belongs to them."""
    apart = {keys.y, *keys.given} | (set() if reads_mask(model, mapping, keys) else {MASK})
    return {key: value for key, value in mapping.items() if key not in apart}


def _takes_keywords(model: nn.Module, mapping: Mapping[str, Any], keys: Keys) -> bool:
    """Return whether `forward` takes the mapping's entries by name.

    It does if it names the main input's key, or if the mapping holds all arguments that it requires.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in parameters if p.default is p.empty and p.name in names}
    if keys.x in names:
        return True
    return required <= set(mapping) and bool(names & set(mapping) or any(p.kind is p.VAR_KEYWORD for p in parameters))


def reads_mask(model: nn.Module, mapping: Mapping[str, Any], keys: Keys) -> bool:
    """Return whether the network reads a mapping's mask: it takes `mask`, any keyword, or the whole mapping."""
    parameters = inspect.signature(model.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return anything or MASK in parameters or not _takes_keywords(model, mapping, keys)


def _are_batches(x: list[Any]) -> bool:
    """Return whether a list holds batches (x, y), not inputs."""
    return bool(x) and all(isinstance(part, (tuple, list)) for part in x)
