"""Run our algebra outside the caller's inference mode and autocast, and the network inside the caller's autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

_DEVICES = ("cpu", "cuda")
_callers: ContextVar[tuple[tuple[str, torch.dtype], ...]] = ContextVar("callers_autocast", default=())
Function = TypeVar("Function", bound=Callable[..., Any])


def plain() -> AbstractContextManager[None]:
    """Turn off inference mode, whose tensors must not be cached, and autocast, which would round our sums."""
    return nullcontext() if _is_plain() else _plain()


def _is_plain() -> bool:
    return not (
        torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    )


@contextmanager
def _plain() -> Iterator[None]:
    cast = tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))
    token = _callers.set(cast) if cast else None
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device, _ in cast:
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            yield
        finally:
            if token is not None:
                _callers.reset(token)


def is_cast() -> bool:
    """Return whether the caller of `plain` had autocast on."""
    return bool(_callers.get())


def as_called() -> AbstractContextManager[None]:
    """Restore the autocast that the caller of `plain` had. Used around the network."""
    return _as_called() if _callers.get() else nullcontext()


@contextmanager
def _as_called() -> Iterator[None]:
    with ExitStack() as stack:
        for device, dtype in _callers.get():
            stack.enter_context(torch.autocast(device, dtype))
        yield


def rounding(dtypes: Iterable[torch.dtype]) -> float:
    """Return the relative error of one operation in the coarsest of these dtypes and the caller's autocast dtypes."""
    return max(torch.finfo(dtype).eps for dtype in (*dtypes, *(dtype for _, dtype in _callers.get())))


def plainly(function: Function) -> Function:
    """Make a method run under `plain`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _is_plain():
            return function(*args, **kwargs)
        with _plain():
            return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]
