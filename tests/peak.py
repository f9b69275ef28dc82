"""The memory of a process, for programs that the tests start."""

from __future__ import annotations

from pathlib import Path


def peak() -> int:
    """Return the most kilobytes that this process has had. (`getrusage` begins with those of its parent.)"""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
