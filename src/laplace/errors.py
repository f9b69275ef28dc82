"""Define our exceptions and warnings. Every message says what came, what is allowed, and what to write instead."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "ArgumentError",
    "BoundaryWarning",
    "CheckpointError",
    "FormChangedError",
    "InputError",
    "LaplaceError",
    "LaplaceWarning",
    "MemoryBudgetError",
    "MissingKeyError",
    "ModelError",
    "NotFittedError",
    "NumericalError",
    "OptionError",
    "ProcessesWarning",
    "RankError",
    "StaleWarning",
    "UnknownAttributeError",
    "UnknownNameError",
    "UnreadableError",
    "UnsupportedError",
]

_SLOW = "There is a performance drop"


class LaplaceError(Exception):
    """Is the base of every exception that this library raises on purpose."""


class OptionError(LaplaceError, ValueError):
    """Raised if an option is unknown, or its value is out of range."""


class ArgumentError(OptionError, TypeError):
    """Raised if a call lacks a required argument, or has an unknown one."""


class UnknownNameError(OptionError, KeyError):
    """Raised if a module or parameter that an option names is not in the network."""

    __str__ = Exception.__str__  # KeyError's own would quote the message


class UnknownAttributeError(OptionError, AttributeError):
    """Raised if an attribute that is set does not exist, and one with nearly the same name does."""


class InputError(LaplaceError, ValueError):
    """Raised if data does not fit: wrong shapes or dtypes, labels out of range, NaN."""


class MissingKeyError(InputError, KeyError):
    """Raised if a batch that is a mapping lacks a key."""

    __str__ = Exception.__str__


class CheckpointError(InputError):
    """Raised if a file is damaged, not ours, or belongs to another network, other data or other options."""


class NotFittedError(LaplaceError, RuntimeError, AttributeError):
    """Raised if a call needs a fitted posterior before `fit`. Until then, hasattr(la, 'mean') is False."""


class UnsupportedError(LaplaceError, NotImplementedError, ValueError):
    """Raised if a combination is not supported. The message names one that is."""


class UnreadableError(UnsupportedError, AttributeError):
    """Raised when an attribute has no value for this posterior, so that `hasattr` answers False."""


class ModelError(LaplaceError, RuntimeError):
    """Raised if a network cannot be treated as asked. The message names the layer."""


class FormChangedError(ModelError):
    """Raised if a later batch uses a weight in another way than the first, and the data cannot be read again."""


class NumericalError(LaplaceError, ArithmeticError):
    """Raised if a matrix or a score is unusable: not positive definite, NaN, or infinite."""


class MemoryBudgetError(LaplaceError, MemoryError):
    """Raised if a result would not fit into memory. The message says how many bytes it needs, and what would fit."""


class RankError(LaplaceError, RuntimeError):
    """Raised if another process of the group failed, or cannot be reached. The message has its rank and its error."""


class LaplaceWarning(UserWarning):
    """Is the base of our warnings: we chose something for you, or something is not as you may expect."""


class BoundaryWarning(LaplaceWarning):
    """Warns that an optimum lies at the edge of its search range."""


class ProcessesWarning(LaplaceWarning):
    """Warns that one of several processes fits its posterior only to the data that it reads itself."""


class StaleWarning(LaplaceWarning):
    """Warns that a network's weights have changed since its posterior was fitted."""


_NUMBERED = (InputError, MissingKeyError, ModelError, NumericalError)


def numbered(error: LaplaceError, where: str) -> LaplaceError:
    """Return the same error with the batch in its message. Subclasses, which callers catch by type, stay unchanged."""
    return type(error)(f"{where}: {error}") if type(error) in _NUMBERED else error


def note(error: BaseException, text: str) -> None:
    """Add a sentence to an error of somebody else, whose type and message stay. Python 3.11 shows it, too."""
    vars(error).setdefault("__notes__", []).append(text)


def notes_of(error: BaseException) -> list[str]:
    """Return the sentences that were added to an error."""
    return [text for text in getattr(error, "__notes__", []) if isinstance(text, str)]


@contextmanager
def noting(where: str) -> Iterator[None]:
    """Note in errors that are not ours, such as torch.OutOfMemoryError, where they were raised."""
    try:
        yield
    except LaplaceError:
        raise
    except Exception as error:
        if where and not notes_of(error):
            note(error, f"raised in {where}")
        raise


@contextmanager
def within(where: str, runs: bool = False) -> Iterator[None]:
    """Add the batch's name to errors about data or the network; note it in others. Nothing if `where` is empty.

    With `runs`, a ModelError gets the name only if the network itself raised it (it has a cause). Other ModelErrors do
    not depend on the batch.
    """
    try:
        with noting(where):
            yield
    except (InputError, ModelError, NumericalError) as error:
        if not where or (runs and isinstance(error, ModelError) and error.__cause__ is None):
            raise
        raise numbered(error, where) from error.__cause__


def warn(message: str, category: type[LaplaceWarning] = LaplaceWarning) -> None:
    """Warn, pointing at the line outside this package that led here."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


def _is_between(module: str) -> bool:
    """Return whether a module is part of this package, or torch's decorator around its functions."""
    return module.partition(".")[0] == "laplace" or module == "torch.utils._contextlib"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's notes about slow vectorised operations: they concern our choice, not the user's.

    The filter stays installed, because removing it is not safe while other threads predict.
    """
    if not any(filter_[1] is not None and filter_[1].pattern == _SLOW for filter_ in warnings.filters):
        warnings.filterwarnings("ignore", message=_SLOW)
    yield


def __dir__() -> list[str]:
    return __all__
