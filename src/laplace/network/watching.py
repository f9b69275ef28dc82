"""Watch the first run of a replica: does it use the user's own tensors, and which tensors does it write to?

A replica cannot follow a network that reaches its layers through a global variable. There the user's own modules would
run, in their own mode and without our hooks. And some networks write to their weights or buffers even in eval mode
(`Embedding(max_norm=)`, counters). The replica must not share these tensors. Both are noticed before anything is
changed, operation by operation, on a few examples. Which tensors are written to is remembered for later replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from laplace.errors import ModelError
from laplace.network.replica import UNWATCHED, known_writes, plain_name, replicate, unwrap

EXAMPLES = 5  # examples in a watched run
_TRAINING = {"native_batch_norm": (3, 4, 5), "cudnn_batch_norm": (3, 4, 5), "miopen_batch_norm": (3, 4, 5)}

Value = TypeVar("Value")

_unregistered: WeakKeyDictionary[nn.Module, list[tuple[int, ...]]] = WeakKeyDictionary()


def unregistered_in(model: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of trainable parameters that a network uses but has not registered."""
    return _unregistered.get(unwrap(model), [])


def watch_again(model: nn.Module) -> None:
    """Forget what was seen, so that the next run of a replica is watched. The network may have changed."""
    known_writes.pop(unwrap(model), None)


def is_unwatched(replica: nn.Module) -> bool:
    """Return whether the next run of this replica must be watched first."""
    return UNWATCHED in replica.__dict__


def watch(replica: nn.Module, run: Callable[[nn.Module], Value]) -> Value | None:
    """Run a second replica under watch, then give this one its own copy of every tensor that is written to.

    Returns what the run gave, or None if it failed.

    Raises:
        ModelError: the network reaches its own modules other than through the replica.
    """
    model: nn.Module = replica.__dict__.pop(UNWATCHED)
    written: frozenset[str] = frozenset()
    while True:
        copy, found = replicate(model, written=written), None
        guard = _Guard(model, copy)
        try:
            with guard:
                found = run(copy)
        except Exception:  # noqa: S110  any error of the network: the actual run raises it again and reports it
            pass
        if guard.outside is not None:
            raise ModelError(
                f"the network uses {guard.outside!r} past its own attributes: through a global variable, a class, or "
                "an object that cannot be copied. We run copies of the modules, and cannot replace the original "
                "there. Use the layer as an attribute of the network (self.layer) in forward."
            )
        if guard.written <= written:
            break
        written |= guard.written
    known_writes[model] = written
    _unregistered[model] = [tuple(t.shape) for t in guard.unregistered.values()]
    if written:
        theirs = {id(t) for _, t in _state(model)}  # scripted modules are not copied
        for t in {id(t): t for name, t in _state(replica) if name in written and id(t) not in theirs}.values():
            _unshare(t)
    return found


def _unshare(t: Tensor) -> None:
    """Give a tensor its own memory and version counter, wherever it is kept."""
    with torch.no_grad():
        own = t.detach().clone()
    try:
        swap_tensors(t, nn.Parameter(own, t.requires_grad) if isinstance(t, nn.Parameter) else own)
    except RuntimeError:  # a weak reference to it exists
        t.data = own


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        yield plain_name(name), t


class _Watched(Exception):
    """Raised to end a watched run."""


class _Guard(TorchDispatchMode):
    """Ends a run before an operation that uses a tensor of the original, or writes to memory shared with it."""

    def __init__(self, model: nn.Module, replica: nn.Module) -> None:
        super().__init__()
        own, theirs = {id(t) for _, t in _state(replica)}, [*_state(model)]
        self.originals = {id(t): name for name, t in theirs if id(t) not in own}  # scripted modules are not copied
        self.shared: dict[int, set[str]] = {}
        for name, t in theirs:
            if (address := _memory(t)) != 0:
                self.shared.setdefault(address, set()).add(name)
        self.known = own | {id(t) for _, t in theirs}
        self.unregistered: dict[int, Tensor] = {}
        self.outside: str | None = None
        self.written: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave `__torch_dispatch__` as it is: to keep torch.compile out, torch would import all of it (2 s)."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for t in value if isinstance(value, (list, tuple)) else (value,):
                if id(t) in self.originals:
                    self.outside = self.originals[id(t)]
                    raise _Watched
                if isinstance(t, nn.Parameter) and t.requires_grad and id(t) not in self.known:
                    self.unregistered[id(t)] = t
        for t in _written_to(func, args, kwargs):
            if names := self.shared.get(_memory(t)):
                self.written |= names
                raise _Watched
        return func(*args, **kwargs)


def _written_to(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to."""
    given = dict(enumerate(args))
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(i, kwargs.get(argument.name))
            yield from (t for t in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(t, Tensor))
    *statistics, training = _TRAINING.get(func._schema.name.removeprefix("aten::"), (0,))
    if statistics and given.get(training):  # their schemas do not declare these writes
        yield from (given[i] for i in statistics if isinstance(given.get(i), Tensor))


def _memory(t: Tensor) -> int:
    """Return the address of the memory behind a tensor, or 0 if it has none (sparse, meta, empty)."""
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
