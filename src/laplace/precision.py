"""Our algebra runs outside the caller's inference mode and autocast; the network itself runs as the caller would."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

_DEVICES = ("cpu", "cuda")
_callers: ContextVar[tuple[tuple[str, torch.dtype], ...]] = ContextVar("callers_autocast", default=())
Function = TypeVar("Function", bound=Callable[..., Any])


@contextmanager
def plain() -> Iterator[None]:
    """Without inference mode, whose tensors no cache may hold, and without autocast, which would round our sums."""
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


@contextmanager
def as_called() -> Iterator[None]:
    """With the autocast that the caller of `plain` had, for the network."""
    with ExitStack() as stack:
        for device, dtype in _callers.get():
            stack.enter_context(torch.autocast(device, dtype))
        yield


def rounding(dtypes: Iterable[torch.dtype]) -> float:
    """The relative error of one operation in the coarsest of these dtypes, and of those that the network is cast to."""
    return max(torch.finfo(dtype).eps for dtype in (*dtypes, *(dtype for _, dtype in _callers.get())))


def plainly(function: Function) -> Function:
    """A method that runs under `plain`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with plain():
            return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]
