"""Define what ranks tell each other after a run over the data, before they add their sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from laplace.backprop.plan import Learned
from laplace.distributed.shards import STREAM
from laplace.errors import InputError

Form = tuple[str, tuple[int, ...]]
ABSENT: Form = ("absent", ())  # the form of a tensor that no batch has used yet


@dataclass(frozen=True)
class Read:
    """Says what one rank has read.

    Attributes:
        n: how many examples.
        counting: whether any of them counts.
        used: the names of the tensors that have sums.
        forms: in which form each tensor's gradients came.
        changed: what a batch showed that the first did not, if one did.
        learned: what is known of the network.
        marks: the sum of all inputs and labels, and of each of the likelihood's sums.
    """

    n: int
    counting: bool
    used: set[str]
    forms: Sequence[Form]
    changed: str | None
    learned: Learned | None
    marks: tuple[float, Mapping[str, float]]


def changed_form(reads: Sequence[Read], names: Sequence[str]) -> str | None:
    """Return why the fit must begin again: a batch of some rank, or two ranks, saw a weight used in another way."""
    if changed := [f"rank {rank}: {read.changed}" for rank, read in enumerate(reads) if read.changed is not None]:
        return changed[0]
    for columns in zip(names, *(read.forms for read in reads if read.forms), strict=False):
        name, *forms = columns
        if len({(form, tuple(factors)) for form, factors in forms} - {ABSENT}) > 1:
            return f"the ranks use {name} in different ways (examples without a fixed number of rows?): {forms}."
    return None


def require_each_once(reads: Sequence[Read], examples: int | None) -> None:
    """Refuse data that counts more than once: two ranks that read the same, or more examples than there are."""
    for (i, one), (j, other) in combinations(enumerate(reads), 2):
        if one.n and one.n == other.n and _alike(one.marks, other.marks):
            raise InputError(
                f"ranks {i} and {j} read the same {one.n} examples, which would count twice. Give each rank its own "
                f"part: DataLoader(dataset, batch_size, sampler=laplace.distributed.ShardSampler(dataset)). {STREAM}. "
                "If every rank should read all data and keep a posterior of its own, write group=None."
            )
    total = sum(read.n for read in reads)
    if examples is not None and total > examples:
        raise InputError(
            f"the ranks read {total} examples together, and the data set has {examples}: some would count twice. Take "
            "sampler=laplace.distributed.ShardSampler(dataset), which repeats none."
        )


def _alike(one: tuple[float, Mapping[str, float]], other: tuple[float, Mapping[str, float]]) -> bool:
    """Return whether the sums over two sets of data are equal up to rounding in another order."""
    pairs = [(one[0], other[0]), *((value, other[1].get(key, math.nan)) for key, value in one[1].items())]
    return all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in pairs)
