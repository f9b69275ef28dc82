"""Define what a fit tells about its progress, so that it can go on after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from laplace.network.batches import Batch
from laplace.network.inputs import Inputs


class Progress(Protocol):
    """Stores the partial sums of a fit, so that an interrupted fit can continue.

    Attributes:
        every: the number of batches between two writes.
    """

    every: int

    def restart(self) -> None:
        """Forget what was read: a new run over the data begins."""
        ...

    def resumed(self) -> dict[str, Any] | None:
        """Return the state that an interrupted fit left, if there is one."""
        ...

    def unread(self, batches: Iterable[Batch], run: Callable[[Inputs], Any]) -> Iterator[Batch]:
        """Yield the batches that are not in the sums yet."""
        ...

    def trusting(self) -> AbstractContextManager[None]:
        """Turn errors into those of a damaged file, while values that an interrupted fit left are used."""
        ...

    def counted(self, batches: Sequence[Batch], sums: Callable[[], dict[str, Any]]) -> None:
        """Note that these batches are in the sums now."""
        ...
