"""Our exceptions and warnings. Every message says what came, what is allowed, and what to write instead."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "BoundaryWarning",
    "CheckpointError",
    "FormChangedError",
    "InputError",
    "LaplaceError",
    "LaplaceWarning",
    "MemoryBudgetError",
    "ModelError",
    "NotFittedError",
    "NumericalError",
    "OptionError",
    "StaleWarning",
    "UnsupportedError",
]

_SLOW = "There is a performance drop"


class LaplaceError(Exception):
    """Base of every exception that this library raises on purpose."""


class OptionError(LaplaceError, ValueError):
    """An option that does not exist, or a value outside its range."""


class InputError(LaplaceError, ValueError):
    """Data that does not fit: shapes, dtypes, labels out of range, NaN."""


class CheckpointError(InputError):
    """A file that is damaged, foreign, or of another network, other data or other options."""


class NotFittedError(LaplaceError, RuntimeError):
    """Something was asked of a posterior that has seen no data yet."""


class UnsupportedError(LaplaceError, NotImplementedError):
    """A combination that does not exist; the message names one that does."""


class ModelError(LaplaceError, RuntimeError):
    """A network that cannot be treated as asked; the message names the layer."""


class FormChangedError(ModelError):
    """A later batch uses a weight in another way than the first, and the data cannot be read again."""


class NumericalError(LaplaceError, ArithmeticError):
    """A matrix or a score that is not usable: not positive definite, NaN, infinite."""


class MemoryBudgetError(LaplaceError, MemoryError):
    """Something that would not fit into memory; the message has the bytes and what would fit."""


class LaplaceWarning(UserWarning):
    """Base of our warnings: something was chosen for you, or is not as you may think."""


class BoundaryWarning(LaplaceWarning):
    """An optimum lies at the edge of the range in which it was looked for."""


class StaleWarning(LaplaceWarning):
    """The network's weights are no longer those that the posterior was fitted at."""


def numbered(error: LaplaceError, where: str) -> LaplaceError:
    """The same error, with which batch it was; those that others look for stay as they are."""
    return type(error)(f"{where}: {error}") if type(error) in (InputError, ModelError) else error


def warn(message: str, category: type[LaplaceWarning] = LaplaceWarning) -> None:
    """Warn, pointing at the line outside this package that led here."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "laplace":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


@contextmanager
def quiet() -> Iterator[None]:
    """Without notes of torch on operations that it vectorises slowly: they would be about our choice, not the user's.

    The filter stays: to take it out again is not safe where several threads predict.
    """
    if not any(filter_[1] is not None and filter_[1].pattern == _SLOW for filter_ in warnings.filters):
        warnings.filterwarnings("ignore", message=_SLOW)
    yield
