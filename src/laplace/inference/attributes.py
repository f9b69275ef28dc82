"""Bind functions to a class as attributes: at run time they are properties, and type checkers see their values."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from laplace.errors import UnreadableError, UnsupportedError

__all__ = ["holds", "reads"]

if TYPE_CHECKING:
    Value = TypeVar("Value")

    def reads(function: Callable[[Any], Value], change: Callable[[Any, Value], None] | None = None) -> Value:
        """Show type checkers `property(function, change)` as an attribute with the type of its value."""
        ...

    class holds(Generic[Value]):
        """Shows type checkers a property that is read as a tensor, and may be set to a number."""

        def __init__(self, function: Callable[[Any], Value], change: Callable[[Any, Any], None]) -> None: ...

        def __get__(self, la: Any, owner: Any) -> Value: ...

        def __set__(self, la: Any, value: float | Value) -> None: ...

else:

    def reads(function: Callable[[Any], Any], change: Callable[[Any, Any], None] | None = None) -> property:
        """Return a property whose UnsupportedError is an AttributeError, too, as `hasattr` expects."""

        @wraps(function)
        def read(la: Any) -> Any:
            try:
                return function(la)
            except UnsupportedError as error:
                raise UnreadableError(str(error)) from error

        return property(read, change)

    holds = reads
