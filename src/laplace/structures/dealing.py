"""Deal eigendecompositions out over the processes of a group: each rank does some, and all get the results.

What a structure decomposes follows from its sums, which are the same on every rank. So its curvature is made twice: at
first every decomposition is only noted, then the noted ones are solved, each by one rank, and the results are handed
out in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from laplace.distributed import Reduce
from laplace.linalg.symmetric import EIGH, Clipped, eigh

Solved = tuple[Tensor, Tensor, Clipped]  # eigenvalues, eigenvectors, and what was set to zero
Value = TypeVar("Value")

LEAST = 5e8  # multiplications, about a tenth of a second, from which dealing out is worth its exchange


@dataclass
class _Jobs:
    """Notes decompositions, and later hands out their results in the same order."""

    noted: list[tuple[Tensor, torch.dtype, bool]] = field(default_factory=list)
    solved: list[Solved] | None = None
    handed: int = 0

    def __call__(self, matrix: Tensor, dtype: torch.dtype, ties: bool) -> Solved:
        if self.solved is None:
            self.noted.append((matrix, dtype, ties))
            nothing = torch.zeros((), dtype=dtype, device=matrix.device)
            return nothing.expand(matrix.shape[:-1]), nothing.expand(matrix.shape), Clipped()
        self.handed += 1
        return self.solved[self.handed - 1]


_jobs: ContextVar[_Jobs | None] = ContextVar("jobs", default=None)


def decomposed(matrix: Tensor, dtype: torch.dtype, ties: bool, rounded: bool = False) -> Solved:
    """Return the eigendecomposition of positive semi-definite matrices; or note it, while decompositions are noted."""
    jobs = _jobs.get()
    return eigh(matrix, dtype, ties, rounded) if jobs is None else jobs(matrix, dtype, ties)


def dealing() -> bool:
    """Return whether decompositions are dealt out just now, so that all of them have to be asked for at once."""
    return _jobs.get() is not None


def dealt_out(make: Callable[[], Value], reduce: Reduce) -> Value:
    """Return make(), with its eigendecompositions dealt out over the ranks. All ranks must have the same sums."""
    if reduce.size == 1:
        return make()
    jobs = _Jobs()
    try:
        with _noting(jobs):
            make()
    except Exception:  # a structure from outside that looks at the results at once: every rank makes all of them
        return make()
    costs = [EIGH * matrix.numel() * matrix.shape[-1] for matrix, *_ in jobs.noted]
    if not costs or sum(costs) < LEAST:
        return make()
    owners = dealt(costs, reduce.size)
    own = [i for i, owner in enumerate(owners) if owner == reduce.rank]
    found: dict[int, Solved] = {}

    def solve() -> dict[int, Clipped]:
        found.update({i: eigh(*jobs.noted[i]) for i in own})
        return {i: solved[2] for i, solved in found.items()}

    clipped: dict[int, Clipped] = {}
    for of_rank in reduce.agree(solve):
        clipped |= of_rank
    named = {f"{i:06d} {k}": t.contiguous() for i, (*both, _) in found.items() for k, t in enumerate(both)}
    whole = reduce.total(named, jobs.noted[0][0].device)
    jobs.solved = [(whole[f"{i:06d} 0"], whole[f"{i:06d} 1"], clipped[i]) for i in range(len(costs))]
    with _noting(jobs):
        return make()


def dealt(costs: list[float], ranks: int) -> list[int]:
    """Return the rank of each job: the dearest first, each to the rank that has the least to do."""
    loads, owners = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


@contextmanager
def _noting(jobs: _Jobs) -> Iterator[None]:
    token = _jobs.set(jobs)
    try:
        yield
    finally:
        _jobs.reset(token)
