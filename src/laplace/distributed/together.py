"""Say that all ranks of a group make the same calls now, so that each may ask for what only the others have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from laplace.distributed.groups import reduce_over
from laplace.distributed.ranks import Ranks
from laplace.distributed.reduce import Reduce

_ranks: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


@contextmanager
def together(group: Any) -> Iterator[None]:
    """Make calls on all ranks of a group together: `with together(group): la.sample(5)`.

    A posterior that was fitted with `shard_factors=True` answers only if all ranks ask. `la.predict` and `la.tune` have
    `group=` for that; every other call can be made in this block. All ranks must make the same calls in the same order.
    An error on one rank ends the block on all of them.

    Args:
        group: the process group of `fit`, as `torch.distributed.group.WORLD`. None: this process alone.

    Raises:
        OptionError: `group` is no process group of this process.
        RankError: another rank has failed; the message names it and its error.
    """
    reduce = reduce_over(group, None, None)
    with reduce.session(), joined(reduce):
        yield


@contextmanager
def joined(reduce: Reduce) -> Iterator[None]:
    """Let what happens inside ask the other ranks. All of them must be there, too. One process alone asks nobody."""
    token = _ranks.set(reduce if isinstance(reduce, Ranks) and reduce.size > 1 else _ranks.get())
    try:
        yield
    finally:
        _ranks.reset(token)


def ranks_together() -> Ranks | None:
    """Return the ranks that make this call together; None if this process makes it alone."""
    return _ranks.get()
