"""Gather parameters of which each rank holds a piece, when a layer needs them, and drop them afterwards.

In a copy of such a network (`sharded.py`), every parameter is a stand-in: one NaN, seen in the whole shape, so that
whoever reads it without gathering it notices. While a module runs, the gathered parameters are in their places
(`present`). Whatever autograd would keep of them for the way back is kept as a name, and is gathered again there. A
stand-in that requires grad is the leaf of autograd's graph: gradients of gathered parameters go to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, distributed, nn
from torch._C import _autograd
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from laplace.distributed.ranks import SERVICES, Ranks
from laplace.distributed.together import ranks_together
from laplace.errors import UnsupportedError

_SERVICE: Final = "pieces of parameters"
_SMALL: Final = 2**20  # bytes of a parameter: up to these, those of a layer are sent together, which takes a copy
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


def gather(pieces: Sequence[Piece], ranks: Ranks | None = None) -> list[Tensor]:
    """Return whole parameters of one network. All ranks take part: one of them asks for all of these at once."""
    ranks = ranks_together() if ranks is None else ranks
    there = max((piece.own.device_mesh.size() for piece in pieces), default=1)
    if ranks is None and there > 1:
        raise UnsupportedError(
            "the network is sharded by fully_shard, and each run gathers its layers from all ranks. Make this call on "
            "all of them, with group=torch.distributed.group.WORLD: la.predict(x, group=...), where each rank may have "
            "inputs of its own, la.fit(loader, group=...), la.save(path, group=...), Laplace.load(path, model, "
            "group=...); or `with laplace.distributed.together(group):` around any other call."
        )
    if ranks is not None and there > ranks.size:
        raise UnsupportedError(
            f"the network is sharded by fully_shard over {there} ranks, and group= has {ranks.size}. Give the group of "
            "all ranks that have pieces of it, such as torch.distributed.group.WORLD."
        )
    if not pieces:
        return []
    key = pieces[0].network, tuple(piece.index for piece in pieces)
    with _plain_torch():
        return _gathered(key, []) if ranks is None else ranks.ask(_SERVICE, key)


def _gathered(key: tuple[int, tuple[int, ...]], _: list[Any]) -> list[Tensor]:
    """Gather parameters: small ones together, each large one by itself. All ranks do so in the same order."""
    network, indices = key
    found: dict[int, Tensor] = {}
    small: dict[tuple[Any, torch.dtype], list[int]] = {}
    with _plain_torch():
        for index in indices:
            own = _networks[network][index]
            if own.numel() * own.element_size() <= _SMALL and _is_in_rows(own):
                small.setdefault((own.device_mesh, own.dtype), []).append(index)
            else:
                found[index] = own.full_tensor().detach()
        for (mesh, _dtype), chosen in small.items():
            values = _in_one_exchange([_networks[network][index] for index in chosen], mesh)
            found.update(zip(chosen, values, strict=True))
    return [found[index] for index in indices]


SERVICES[_SERVICE] = _gathered


def _is_in_rows(own: Any) -> bool:
    """Return whether each rank has some of the rows, as fully_shard cuts a parameter unless it is told otherwise."""
    return own.device_mesh.ndim == 1 and own.placements[0].is_shard(0)


def _in_one_exchange(pieces: list[Any], mesh: Any) -> list[Tensor]:
    """Gather parameters of one dtype of which each rank has some rows: the first ranks equally many, the last fewer."""
    size = mesh.size()
    shares = [-(-own.shape[0] // size) * own.shape[1:].numel() for own in pieces]
    sent = pieces[0].to_local().new_zeros(sum(shares))
    for own, room in zip(pieces, sent.split(shares), strict=True):
        local = own.to_local().flatten()
        room[: len(local)] = local
    everyone = sent.new_empty(size, len(sent))
    distributed.all_gather(list(everyone), sent, group=mesh.get_group())
    parts = everyone.split(shares, 1)
    return [part.flatten()[: own.numel()].clone().view(own.shape) for own, part in zip(pieces, parts, strict=True)]


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
    return t if piece is None else gather([piece])[0]


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
    stand_ins = {getattr(p, _PIECE): p for _, _, p in found}
    values = dict(zip(stand_ins, gather([*stand_ins]), strict=True))
    try:
        tensors = {
            piece: cast("Tensor", Gathered.apply(p, [values[piece]]))
            if tracing and p.requires_grad
            else _parameter(values[piece])
            for piece, p in stand_ins.items()
        }
        for owner, key, p in found:
            owner._parameters[key] = tensors[getattr(p, _PIECE)]  # type: ignore[assignment]
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
    named: dict[Piece, None] = {}

    def keep(t: Tensor) -> Any:
        piece = memory.get(t.untyped_storage().data_ptr()) if t.layout is torch.strided else None
        if piece is None:
            return t
        named[piece] = None
        return piece, t.size(), t.stride(), t.storage_offset()

    def get(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        piece, *place = kept
        return _on_the_way_back(named, ranks)[piece].as_strided(*place)

    return keep, get


_Held = tuple[dict[Piece, None], dict[Piece, Tensor]]
_held: list[_Held] = []  # what the way back has gathered last


def _on_the_way_back(named: dict[Piece, None], ranks: Ranks | None) -> dict[Piece, Tensor]:
    """Gather what autograd has kept of one run of a layer, and keep it until another layer is asked for or the end."""
    held = next((held for held in _held if held[0] is named), None)
    if held is None:
        _held.clear()
        held = named, dict(zip(named, gather([*named], ranks), strict=True))
        with suppress(RuntimeError):  # if somebody else reads what autograd has kept, nothing says when that ends
            torch.autograd.Variable._execution_engine.queue_callback(_held.clear)  # type: ignore[attr-defined]
            _held.append(held)
    return held[1]
