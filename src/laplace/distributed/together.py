"""Say that all ranks of a group make the same calls now, so that each may ask for what only the others have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from laplace.distributed.groups import is_group_here, reduce_over
from laplace.distributed.ranks import Ranks, ranks_of
from laplace.distributed.reduce import Reduce

P = ParamSpec("P")
R = TypeVar("R")
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
    with reduce.session("laplace.distributed.together"), joined(reduce):
        yield


def jointly(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of a call with `group=`: an error of one rank's arguments is an error of all ranks at once.

    Args:
        name: of the call, as users write it. Ranks that make another call with the same group are refused.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = list(inspect.signature(function).parameters.values())
        names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        at = names.index("group") if "group" in names else None  # as an argument without its name

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            group = args[at] if at is not None and len(args) > at else kwargs.get("group")
            if not is_group_here(group):  # or something else, which the call itself refuses
                return function(*args, **kwargs)
            with ranks_of(group).call(name):
                return function(*args, **kwargs)

        return called

    return decorate


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
