"""Copy everything that leads to a module: containers, objects, functions and weak references. Share the rest.

Lists, dicts and other built-in containers are always copied, because a network may write to them. A function or an
object is copied only if it leads to a module, or to a tensor that has a copy.
"""

from __future__ import annotations

import functools
import typing
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

LONG = 512  # longer containers without modules are shared, not copied (vocabularies)
_MOST = 5_000  # most objects inspected for one replica: a network may hold a whole trainer, or its data
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class is written in Python

ATOMS: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type, range, slice, property, BuiltinFunctionType, ModuleType,
     torch.Size, torch.dtype, torch.device, torch.Generator}
)  # fmt: skip
_FLAT: Final = ATOMS | {Tensor}
_FROZEN: Final = (tuple, frozenset)
_MAPPINGS: Final = (OrderedDict, defaultdict, dict)  # subclasses of dict first
_CONTAINERS: Final = (*_MAPPINGS, list, set, deque, *_FROZEN)
_VISIBLE: Final = {
    object,
    SimpleNamespace,
    typing.Generic,
    *_CONTAINERS,
}  # classes without hidden state

Value = TypeVar("Value")


class Copies:
    """Holds all copies made for one replica, by the identity of the original."""

    def __init__(self, module: Callable[[nn.Module, Copies], nn.Module]) -> None:
        self.elsewhere = False  # whether a parameter is also kept outside of its modules
        self.held: list[Any] = []  # targets of weak references, kept alive
        self._module = module
        self._memo: dict[int, tuple[Any, Any]] = {}  # keeps the originals alive, so that ids stay unique
        self._dead_ends: dict[int, Any] = {}  # values that lead to no module
        self._looked = 0

    @property
    def complete(self) -> bool:
        """Return whether everything was looked at that may lead to a module."""
        return self._looked <= _MOST

    def pairs(self) -> Iterable[tuple[Any, Any]]:
        """Return everything that has a copy, with its copy."""
        return self._memo.values()

    def dead_ends(self) -> Iterable[Any]:
        """Return everything that was looked at and leads to no module, so that the copy shares it."""
        return self._dead_ends.values()

    def put(self, value: object, copied: Value) -> Value:
        """Record the copy of a value, and return the copy."""
        self._memo[id(value)] = value, copied
        return copied

    def own(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return a module's own parameters, each replaced by its copy if it has one."""
        memo = self._memo
        return {key: memo.get(id(t), (t, t))[1] for key, t in tensors.items()}

    def of(self, value: Any) -> Any:
        """Return the value with every module in it replaced by its copy."""
        kind = type(value)
        if kind in ATOMS:
            return value
        found = self._memo.get(id(value))
        if found is not None:
            if isinstance(value, nn.Parameter):
                self.elsewhere = True
            return found[1]
        if kind is Tensor:
            return value
        if kind in (dict, OrderedDict) and len(value) <= LONG:
            mapping = self.put(value, kind())
            for key, item in tuple(value.items()):
                key = key if type(key) is str else self.of(key)
                mapping[key] = item if type(item) in ATOMS else self.of(item)
            return mapping
        if kind in weakref.ProxyTypes:
            return weakref.proxy(self._held(_target(value))) if self._leads(value) else value
        if isinstance(value, nn.Module):
            return self._module(value, self)
        if (kind in _CONTAINERS or kind is Counter) and len(value) <= LONG:
            return self._object(value)
        return self._opaque(value) if self._leads(value) else value

    def _opaque(self, value: Any) -> Any:
        """Copy something that is known to lead to a module."""
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            return functools.partial(self.of(value.func), *self.of(value.args), **self.of(value.keywords))
        if isinstance(value, weakref.WeakMethod):
            return weakref.WeakMethod(self._held(value()))
        if isinstance(value, weakref.ref):
            return weakref.ref(self._held(value()))
        if isinstance(value, (weakref.WeakValueDictionary, weakref.WeakKeyDictionary)):
            return self.put(value, type(value)({self._held(k): self._held(v) for k, v in value.items()}))
        if isinstance(value, weakref.WeakSet):
            return self.put(value, type(value)([self._held(item) for item in value]))
        return self._object(value)

    def _held(self, target: Any) -> Any:
        self.held.append(self.of(target))
        return self.held[-1]

    def _object(self, value: Any) -> Any:
        """Copy a container, an object, or something that is both (a namedtuple, a subclass of dict)."""
        kind: Any = type(value)
        if isinstance(value, _FROZEN):
            base: Any = tuple if isinstance(value, tuple) else frozenset
            clone = base.__new__(kind, [self.of(item) for item in value])
            if kind not in _FROZEN:
                self.put(value, clone)
        else:
            base = next((base for base in (*_CONTAINERS, SimpleNamespace) if isinstance(value, base)), object)
            clone = self.put(value, base.__new__(kind))
        if isinstance(value, dict):
            if isinstance(value, defaultdict):
                clone.default_factory = self.of(value.default_factory)
            for key, item in tuple(value.items()):
                base.__setitem__(clone, self.of(key), self.of(item))
        elif isinstance(value, list):
            list.extend(clone, [self.of(item) for item in tuple(value)])
        elif isinstance(value, set):
            set.update(clone, [self.of(item) for item in tuple(value)])
        elif isinstance(value, deque):
            deque.__init__(clone, [self.of(item) for item in tuple(value)], value.maxlen)
        if kind not in _CONTAINERS:
            for key, item in tuple(getattr(value, "__dict__", {}).items()):
                clone.__dict__[key] = self.of(item)
            for key, item in _slots(value):
                object.__setattr__(clone, key, self.of(item))
        return clone

    def _function(self, function: FunctionType) -> FunctionType:
        """Copy a function whose closure or defaults lead to a module (`lambda x: self.block(x)`)."""
        cells, closure = function.__closure__ or (), []
        for cell in cells:
            copied = self._memo.get(id(cell), (cell, None))[1]
            if copied is None:
                copied = self.put(cell, CellType()) if self._leads(_content(cell)) else cell
            closure.append(copied)
        clone = FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(closure))
        self.put(function, clone)  # before its closure is filled: it may contain itself
        for cell, copied in zip(cells, closure, strict=True):
            if copied is not cell:
                copied.cell_contents = self.of(_content(cell))
        clone.__defaults__, clone.__kwdefaults__ = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        clone.__dict__.update(function.__dict__)
        return clone

    def _leads(self, value: Any) -> bool:
        """Return whether a value leads to a module or to something that has a copy. Remembers values that do not."""
        memo, seen = self._memo, dict[int, Any]()
        stack = [value]
        while stack:
            one = stack.pop()
            if type(one) in ATOMS or id(one) in seen or id(one) in self._dead_ends:
                continue
            if id(one) in memo or isinstance(one, nn.Module):
                return True
            self._looked += 1
            if self._looked > _MOST:
                return False
            seen[id(one)] = one
            stack.extend(held_by(one))
        self._dead_ends |= seen
        return False


def held_by(value: Any) -> Iterable[Any]:
    """Return what a value holds, one step away."""
    kind = type(value)
    if kind in weakref.ProxyTypes:
        return (_target(value),)
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, FunctionType):
        cells = (_content(cell) for cell in value.__closure__ or ())
        return (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if isinstance(value, CellType):
        return (_content(value),)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, weakref.ref):
        return (value(),)
    if isinstance(value, (weakref.WeakValueDictionary, weakref.WeakKeyDictionary)):
        return [item for pair in value.items() for item in pair]
    if isinstance(value, weakref.WeakSet):
        return tuple(value)
    return (*_entries(value), *_attributes(value))


def _entries(value: Any) -> Iterable[Any]:
    if not isinstance(value, _CONTAINERS):
        return ()
    if isinstance(value, defaultdict):
        return (value.default_factory, *value.keys(), *value.values())
    entries = (*value.keys(), *value.values()) if isinstance(value, dict) else tuple(value)
    return () if len(entries) > LONG and set(map(type, entries)) <= ATOMS else entries


def _attributes(value: Any) -> Iterator[Any]:
    """Yield the attributes of an object whose class is written in Python. Yields nothing if it must not be copied."""
    kind = type(value)
    if kind in _CONTAINERS or hasattr(kind, "__del__"):  # __del__ would run for the copy, too
        return
    if all(base.__flags__ & _HEAP or base in _VISIBLE for base in kind.__mro__):
        yield from tuple(getattr(value, "__dict__", {}).values())
        yield from (item for _, item in _slots(value))


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for base in type(value).__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            own = f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if own not in ("__dict__", "__weakref__") and hasattr(value, own):
                yield own, getattr(value, own)


def _target(proxy: Any) -> Any:
    """Return what a weak proxy refers to, or None if it is gone."""
    try:
        return proxy.__reduce_ex__.__self__
    except ReferenceError:
        return None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
