"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

import laplace


@dataclass(frozen=True)
class Machine:
    """Hardware and versions that a measured time depends on."""

    cpu: str
    cores: int
    memory_gb: float
    system: str
    python: str
    torch: str
    laplace: str
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gb:.0f} GB, {self.system}\n"
            f"python {self.python}, torch {self.torch} on {self.threads} thread(s), laplace {self.laplace}"
        )


def describe() -> Machine:
    """This machine, with the threads that torch uses now."""
    return Machine(
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        laplace=laplace.__version__,
        threads=torch.get_num_threads(),
    )


def _cpu() -> str:
    """The processor's name, with the numbers that tell models of one name apart."""
    listing = Path("/proc/cpuinfo")
    if not listing.exists():
        return platform.processor() or platform.machine()
    found = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.+)$", listing.read_text(), re.MULTILINE))
    if "model name" not in found:
        return platform.machine()
    return f"{found['model name']} (family {found.get('cpu family', '?')}, model {found.get('model', '?')})"
