"""Limit memory: cut work into chunks, and refuse what cannot be cut before it is allocated."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from laplace.errors import MemoryBudgetError, OptionError

CHUNK = 2**29  # bytes of intermediate results at a time
_CGROUP = Path("/sys/fs/cgroup")
_KEPT = 31 * 2**20  # bytes; glibc's malloc ignores blocks above 32 MiB when it adapts its threshold
LARGE = 2**24  # weights from which a network's temporary results are worth giving back
_UNKNOWN = 2**62  # bytes; used where the system cannot tell us


@dataclass(frozen=True)
class Budget:
    """Limits how many bytes may be allocated. None allows whatever is free at that moment."""

    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.bytes is None:
            return
        if isinstance(self.bytes, bool) or not isinstance(self.bytes, int) or self.bytes < 1:
            raise OptionError(f"memory_budget={self.bytes!r} must be a whole number of bytes, as in 2**30, or None.")

    @property
    def chunk(self) -> int:
        """Return how many bytes of intermediate results may exist at once. Results do not depend on it."""
        return CHUNK if self.bytes is None else min(CHUNK, self.bytes)

    def count(self, bytes_each: int, share: float = 1.0) -> int:
        """Return how many items of `bytes_each` fit into a share of one chunk, at least 1."""
        return max(1, int(share * self.chunk) // max(1, bytes_each))

    def left(self, device: torch.device) -> int:
        """Return how many bytes may still be allocated on a device."""
        return free(device) if self.bytes is None else self.bytes

    def has(self, needed: int, device: torch.device) -> bool:
        """Return whether `needed` bytes may be allocated. One chunk always may, unless the user's budget is smaller."""
        return needed <= self.chunk or needed <= self.left(device)

    def refuse(self, needed: int, device: torch.device, what: str, instead: str) -> NoReturn:
        """Raise MemoryBudgetError: what does not fit, how many bytes it needs, and what to do instead."""
        source = "free" if self.bytes is None else "allowed by memory_budget"
        raise MemoryBudgetError(
            f"{what} needs {in_bytes(needed)} of memory; {in_bytes(self.left(device))} are {source}. {instead}"
        )

    def require(self, needed: int, device: torch.device, what: str, instead: str) -> None:
        """Refuse what does not fit, before it is allocated."""
        if not self.has(needed, device):
            self.refuse(needed, device, what, instead)


def keep_freed_memory() -> None:
    """Make malloc keep freed memory, so that each batch reuses the memory of the one before.

    glibc's malloc returns freed memory to the system as soon as there is twice as much of it as in the largest block
    freed so far. The next batch then gets it back page by page, which is slow. Freeing one large block here raises that
    threshold. The block is never touched, so this costs nothing.
    """
    torch.empty(_KEPT, dtype=torch.uint8)


def give_back_freed_memory() -> None:
    """Make malloc return what is free to the system, before a large network's sums are allocated beside it.

    glibc's malloc keeps freed blocks below 32 MB. After the run of a large network these are as large as the sums. Does
    nothing where there is no such function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def free(device: torch.device) -> int:
    """Return the free bytes of a device. For a CPU this is the system's free memory or a container's limit."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
            device
        )  # kept by torch for its next tensors
        return torch.cuda.mem_get_info(device)[0] + kept
    return min([_system(), *_container()])


def in_bytes(n: float) -> str:
    """Format a number of bytes with a unit, for messages."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            break
        n /= 1000
    return f"{n:,.0f} {unit}" if n >= 100 or unit == "bytes" else f"{n:.3g} {unit}"


def _system() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        if not hasattr(os, "sysconf"):
            return _UNKNOWN
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # all memory: how much is free is unknown


def _container() -> Iterable[int]:
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            stat = (_CGROUP / limit).with_name("memory.stat").read_text().split()
            cached = int(stat[stat.index("inactive_file") + 1])  # file cache, which the system frees on demand
            yield max(0, int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()) + cached)
        except (OSError, ValueError):  # no such file, or "max"
            continue
