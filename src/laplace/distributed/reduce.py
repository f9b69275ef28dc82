"""Say what processes that fit one posterior ask of each other. One process alone asks nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class Reduce:
    """Is a process alone, with nobody to agree with: every method returns at once what it was given.

    `Ranks` does the same over a process group. All ranks must call the same methods in the same order.

    Attributes:
        rank: the number of this process, from 0.
        size: how many processes there are.
    """

    rank: int = 0
    size: int = 1

    def session(self, name: str = "") -> AbstractContextManager[None]:
        """Begin work that all ranks end alike: whatever one raises inside, all raise.

        A session with a name is a call of its own: ranks that are in different ones refuse each other.
        """
        return nullcontext()

    def attempt(self) -> AbstractContextManager[None]:
        """Begin work inside a session that may fail: what one rank raises inside, all raise, and the session goes on.

        All ranks must catch it.
        """
        return nullcontext()

    def agree(self, work: Callable[[], Value]) -> list[Value]:
        """Do some work on every rank, and return what each of them found, by rank."""
        return [work()]

    def share(self, source: int, value: Value) -> Value:
        """Return the value that rank `source` has."""
        return value

    def total(self, sums: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return the sums of all ranks, on `device`. A key that a rank lacks counts as zeros there.

        The given tensors may be overwritten.
        """
        return dict(sums)


alone: Final = Reduce()
