"""Read the option `group=`: which processes fit one posterior together."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, TypeAlias, TypeGuard

from torch import distributed

from laplace.checks import shown
from laplace.distributed.ranks import ranks_of
from laplace.distributed.reduce import Reduce, alone
from laplace.distributed.shards import divided_by
from laplace.errors import OptionError

PIECES: Final = "fully_shard"  # what leaves a rank with pieces of a network, with which it can do nothing alone
_WRITE = (
    "Write group=torch.distributed.group.WORLD: each rank reads its own part of the data, and all end with the "
    "posterior of all of it."
)
_OR_ALONE = " Or group=None, to keep the posterior of this rank's own batches."


class Unsaid(Enum):
    """Marks that `group=` was not given: None is something that users say on purpose."""

    UNSAID = "not said"

    def __repr__(self) -> str:
        return "'not said'"


OWN: Final = Unsaid.UNSAID
Group: TypeAlias = "distributed.ProcessGroup | Unsaid | None"


def world_size() -> int:
    """Return how many processes torch.distributed has, 1 if it was not started."""
    started = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if started else 1


def global_rank() -> int:
    """Return the number of this process, 0 if torch.distributed was not started."""
    return distributed.get_rank() if world_size() > 1 else 0


def reduce_to_calibrate(group: Any, loader: Any, call: str) -> Reduce:
    """Return what the processes of `group` exchange. If nothing was said, every rank must read all data.

    Raises:
        OptionError: nothing was said, and this rank would see a part of the data alone.
    """
    if isinstance(group, Unsaid) and world_size() > 1 and (what := divided_by(loader)) is not None:
        raise OptionError(
            f"{call}: {what} gives this rank a part of the data, so that ranks would differ. Write "
            "group=torch.distributed.group.WORLD, and all ranks calibrate on the data of all. Or let every rank read "
            "all of it: DataLoader(dataset, batch_size) without that sampler."
        )
    return alone if isinstance(group, Unsaid) else reduce_over(group, None, None)


def require_whole(loader: Any, call: str) -> None:
    """Refuse data that is divided over several ranks, for a call that has no `group=`.

    Raises:
        OptionError: this rank would see a part of the data alone.
    """
    if world_size() > 1 and (what := divided_by(loader)) is not None:
        raise OptionError(
            f"{call}: {what} gives this rank a part of the data, and nothing would say so. Give all of it, on one rank "
            "or on each: DataLoader(dataset, batch_size) without that sampler."
        )


def is_group_here(group: Any) -> TypeGuard[distributed.ProcessGroup]:
    """Return whether this is a process group in which this process is."""
    known = distributed.is_available() and isinstance(group, distributed.ProcessGroup)
    return known and distributed.get_rank(group) >= 0


def reduce_to_tune(group: Any, ranks: int, loader: Any) -> Reduce:
    """Return what the processes of `group` exchange to tune a posterior that `ranks` of them have fitted together.

    Raises:
        OptionError: nothing was said, and ranks would tune a posterior that they share, or parts of the data, alone.
    """
    if isinstance(group, Unsaid) and world_size() > 1 and ranks > 1:
        raise OptionError(
            f"this is a posterior that {ranks} ranks fitted together, and all of them must tune it alike. Write "
            "group=torch.distributed.group.WORLD. Or group=None, to tune this rank's copy alone: the ranks may then "
            "differ, and refuse to predict or save together."
        )
    return reduce_over(group, None, loader)


def reduce_over(group: Any, wrapped: str | None, loader: Any) -> Reduce:
    """Return what the processes of `group` exchange. Refuse sharded data or networks if the user said nothing.

    Args:
        group: the user's option.
        wrapped: the class that spread the network over processes, if one did.
        loader: the data of this process.

    Raises:
        OptionError: `group` is no process group of this process; or nothing was said and the call needs it.
    """
    if group is None:
        return alone
    if isinstance(group, Unsaid):
        size = world_size()
        write = _WRITE if wrapped is not None and wrapped.endswith(PIECES) else _WRITE + _OR_ALONE
        if size > 1 and (what := divided_by(loader)) is not None:
            raise OptionError(
                f"the data is divided over {size} ranks by {what}, so that this rank alone sees a part of it. {write}"
            )
        if size > 1 and wrapped is not None:
            raise OptionError(f"this is {wrapped}, on {size} ranks. {write}")
        return alone
    if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        raise OptionError(
            f"group={shown(group)} is a {type(group).__name__}; a process group of torch.distributed is needed, as "
            "torch.distributed.group.WORLD after init_process_group(), or None."
        )
    if distributed.get_rank(group) < 0:
        raise OptionError("group= is a process group that this process is not in. Give one that it is in, or None.")
    return ranks_of(group)
