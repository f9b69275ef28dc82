"""How much memory may be taken: work is cut into chunks, and what cannot be cut is refused before it is made."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from laplace.errors import MemoryBudgetError, OptionError

CHUNK = 2**29  # bytes of intermediate results at a time
_CGROUP = Path("/sys/fs/cgroup")
_KEPT = 31 * 2**20  # bytes; the largest block that glibc's malloc takes note of has 32 MiB
_UNKNOWN = 2**62  # bytes, where no system call tells


@dataclass(frozen=True)
class Budget:
    """Bytes that may be taken; None for what is free when they are needed."""

    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.bytes is None:
            return
        if isinstance(self.bytes, bool) or not isinstance(self.bytes, int) or self.bytes < 1:
            raise OptionError(f"memory_budget={self.bytes!r} must be a whole number of bytes, as in 2**30, or None.")

    @property
    def chunk(self) -> int:
        """Bytes of intermediate results at a time; results do not depend on it."""
        return CHUNK if self.bytes is None else min(CHUNK, self.bytes)

    def count(self, bytes_each: int, share: float = 1.0) -> int:
        """How many things of that size fit into a share of a chunk; at least one."""
        return max(1, int(share * self.chunk) // max(1, bytes_each))

    def left(self, device: torch.device) -> int:
        """How many bytes may be taken on a device now."""
        return free(device) if self.bytes is None else self.bytes

    def has(self, needed: int, device: torch.device) -> bool:
        """Whether so many bytes may be taken; up to a chunk they always may, unless the user said less."""
        return needed <= self.chunk or needed <= self.left(device)

    def refuse(self, needed: int, device: torch.device, what: str, instead: str) -> NoReturn:
        """What cannot be made, how much it needs, and what to do instead."""
        source = "free" if self.bytes is None else "allowed by memory_budget"
        raise MemoryBudgetError(
            f"{what} needs {in_bytes(needed)} of memory; {in_bytes(self.left(device))} are {source}. {instead}"
        )

    def require(self, needed: int, device: torch.device, what: str, instead: str) -> None:
        """Refuse what cannot fit, before it is made."""
        if not self.has(needed, device):
            self.refuse(needed, device, what, instead)


def keep_freed_memory() -> None:
    """Let every batch work in the memory that the last one left.

    glibc's malloc gives freed memory back to the system, from where it comes again page by page, as soon as it is twice
    as much as the largest block freed so far. So one is freed here, which nobody has touched: it costs nothing.
    """
    torch.empty(_KEPT, dtype=torch.uint8)


def free(device: torch.device) -> int:
    """Bytes that a device has left: of a CPU what the system or a container's limit leaves."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
            device
        )  # by torch, for its next tensors
        return torch.cuda.mem_get_info(device)[0] + kept
    return min([_system(), *_container()])


def in_bytes(n: float) -> str:
    """A number of bytes in words."""
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
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # all there is: the best that can be said


def _container() -> Iterable[int]:
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            stat = (_CGROUP / limit).with_name("memory.stat").read_text().split()
            cached = int(stat[stat.index("inactive_file") + 1])  # files that the system gives up when asked
            yield max(0, int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()) + cached)
        except (OSError, ValueError):  # no such file, or "max"
            continue
