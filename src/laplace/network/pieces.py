"""Gather parameters of which each rank holds a piece, when a layer needs them, and drop them afterwards.

In a copy of such a network (`sharded.py`), every parameter is a stand-in: one NaN, seen in the whole shape, so that
whoever reads it without gathering it notices. While a module runs, the gathered parameters are in their places
(`present`). Whatever autograd would keep of them for the way back is kept as a name, and is gathered again there. A
stand-in that requires grad is the leaf of autograd's graph: gradients of gathered parameters go to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from laplace.distributed.ranks import SERVICES, Ranks
from laplace.distributed.together import ranks_together
from laplace.errors import UnsupportedError

_SERVICE: Final = "pieces of a parameter"
_PIECE: Final = "_laplace_piece"  # on a stand-in
SETTLED: Final = "_laplace_settled"  # on a parameter that was gathered for good: its stand-in
UNIT: Final = "_laplace_unit"  # on the copy of a module that FSDP gathers as a whole: modules around it leave it alone


class Pieces(list[Any]):
    """Holds this rank's pieces of a network's parameters, DTensors in their order. The other ranks may ask for them.

    They are the user's own parameters: FSDP may give them other memory.

    Attributes:
        source: the user's network.
        facts: of what it was made when it was copied, and the objects whose ids are among that.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source, self.number = source, next(_counter)
        self.facts: tuple[list[Any], list[Any]] = [], []
        _networks[self.number] = self

    def stand_in(self, p: Any) -> nn.Parameter:
        """Take a piece in, and return the stand-in of the whole parameter."""
        nan = torch.full((), float("nan"), dtype=p.dtype, device=p.to_local().device)
        made = nn.Parameter(nan.expand(p.shape), p.requires_grad)
        setattr(made, _PIECE, Piece(self.number, len(self)))
        self.append(p)
        return made


_counter = itertools.count()  # all ranks make their networks in the same order
_networks: WeakValueDictionary[int, Pieces] = WeakValueDictionary()


@dataclass(frozen=True)
class Piece:
    """Names a parameter of which each rank has a piece: the number of the network, and that of the parameter."""

    network: int
    index: int

    @property
    def own(self) -> Any:
        """Return the piece of this rank, a DTensor."""
        return _networks[self.network][self.index]

    def gather(self, ranks: Ranks | None = None) -> Tensor:
        """Return the whole parameter. All ranks take part."""
        ranks = ranks_together() if ranks is None else ranks
        there = self.own.device_mesh.size()
        if ranks is None and there > 1:
            raise UnsupportedError(
                "the network is sharded by fully_shard, and each run gathers its layers from all ranks. Make this call "
                "on all of them, with group=torch.distributed.group.WORLD: la.predict(x, group=...), where each rank "
                "may have inputs of its own, la.fit(loader, group=...), la.save(path, group=...), Laplace.load(path, "
                "model, group=...); or `with laplace.distributed.together(group):` around any other call."
            )
        if ranks is not None and there > ranks.size:
            raise UnsupportedError(
                f"the network is sharded by fully_shard over {there} ranks, and group= has {ranks.size}. Give the "
                "group of all ranks that have pieces of it, such as torch.distributed.group.WORLD."
            )
        with _plain_torch():
            return self.own.full_tensor() if ranks is None else ranks.ask(_SERVICE, (self.network, self.index))


def _gathered(key: tuple[int, int], _: list[Any]) -> Tensor:
    with _plain_torch():
        return Piece(*key).own.full_tensor().detach()


SERVICES[_SERVICE] = _gathered


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Compute outside of whatever surrounds the run that asks: gradients, inference mode, modes, vmap."""
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def is_stand_in(t: Any) -> bool:
    """Return whether a tensor stands for a parameter of which each rank has a piece."""
    return hasattr(t, _PIECE)


def whole(t: Tensor) -> Tensor:
    """Return a tensor of a network. One of which each rank has a piece is gathered."""
    piece = getattr(t, _PIECE, None)
    return t if piece is None else piece.gather()


def behind(tensors: Iterable[Tensor]) -> list[Any]:
    """Return this rank's pieces, DTensors of the user's own memory, of those tensors that are gathered from pieces."""
    stand_ins = (getattr(t, SETTLED, t) for t in tensors)
    return [getattr(t, _PIECE).own for t in stand_ins if is_stand_in(t)]


def written(pieces: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """Return where pieces are in memory, and how often they were written to. (It is the DTensor that counts.)"""
    return tuple((piece.to_local().data_ptr(), piece._version) for piece in pieces)


def detached(p: Tensor) -> Tensor:
    """Return a parameter without its graph. A stand-in stays one."""
    return p if is_stand_in(p) else p.detach()


def copied(p: nn.Parameter, copy: nn.Parameter) -> nn.Parameter:
    """Return the copy of a parameter, which is a stand-in if the original is one."""
    if is_stand_in(p):
        setattr(copy, _PIECE, getattr(p, _PIECE))
    return copy


def places(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield where the stand-ins that a module gathers are: not those of units inside of it, which gather their own."""
    for key, p in module._parameters.items():
        if p is not None and is_stand_in(p):
            yield module, key, p
    for child in module.children():
        if UNIT not in child.__dict__:
            yield from places(child)


@contextmanager
def present(module: nn.Module) -> Iterator[None]:
    """Gather the parameters of a module for a while. Autograd keeps their names, not their values.

    Inside of torch.func, whose graphs do not outlive the call, it keeps their values. Inside of `checkpoint` it keeps
    nothing, and runs the module again.
    """
    found = [*places(module)]
    if not found:
        yield
        return
    tracing = torch.is_grad_enabled() and peek_interpreter_stack() is None
    values: dict[Piece, Tensor] = {}
    tensors: dict[int, Tensor] = {}
    try:
        for owner, key, p in found:
            if id(p) not in tensors:
                piece = getattr(p, _PIECE)
                value = values[piece] = piece.gather()
                tracked = tracing and p.requires_grad
                tensors[id(p)] = cast("Tensor", Gathered.apply(p, [value])) if tracked else _parameter(value)
            owner._parameters[key] = tensors[id(p)]  # type: ignore[assignment]
        if not tracing or _is_kept_by_others():
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(*_by_name(values)):
            yield
    finally:
        for owner, key, p in found:
            owner._parameters[key] = p
            if isinstance(owner, nn.RNNBase):  # which has a list of them, and brings it up to date when it runs
                owner._flat_weights = [owner._parameters.get(name) for name in owner._flat_weights_names]


def _is_kept_by_others() -> bool:
    """Return whether somebody else says what autograd keeps, as `checkpoint` does: its two runs must keep the same."""
    top = getattr(_autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.6 lacks it
    hooks = None if top is None else top(True)
    return hooks is not None and hooks[0].__module__ != __name__


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


class Gathered(torch.autograd.Function):
    """Puts the gathered value in the place of a stand-in, which gets its gradient."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, value: list[Tensor]) -> Tensor:
        return value[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _by_name(gathered: dict[Piece, Tensor]) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return what autograd does to keep a tensor, and to get it back: gathered parameters are kept by their names."""
    memory = {t.untyped_storage().data_ptr(): piece for piece, t in gathered.items()}
    ranks = ranks_together()  # autograd may come back on another thread

    def keep(t: Tensor) -> Any:
        piece = memory.get(t.untyped_storage().data_ptr()) if t.layout is torch.strided else None
        return t if piece is None else (piece, t.size(), t.stride(), t.storage_offset())

    def get(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        piece, *place = kept
        return piece.gather(ranks).as_strided(*place)

    return keep, get
