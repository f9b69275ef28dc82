"""How things are measured: CPU seconds on one thread, and the peak memory of a process of its own.

CPU seconds do not count the time that other processes take, but a busy neighbour still slows the shared caches. So the
things to be compared take turns, and the best of several turns counts: what disturbs one of them disturbs all, and
what is left in the best turn is the work itself.
"""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

Work = Callable[[], Callable[[], object]]  # prepares, untimed, and returns what is to be timed

_KILOBYTE = 1 if sys.platform == "darwin" else 1024  # in what getrusage counts ru_maxrss

# A process begins with the peak of the one that started it, so that a large benchmark would hide a small work.
# Between the two stands this small one.
_LAUNCH = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def use_one_thread() -> None:
    """Let torch use one thread; with more of them, CPU seconds add up over the threads."""
    torch.set_num_threads(1)


def best_seconds(works: Mapping[str, Work], repeats: int, at_least: float = 1.0) -> dict[str, float]:
    """The fewest CPU seconds that each work took, over turns of all of them.

    There are `repeats` turns, or as many as fill `at_least` seconds. Each work runs once before that, untimed.
    """
    for prepare in works.values():
        prepare()()
    best, turns = dict.fromkeys(works, math.inf), 0
    start = time.process_time()
    while turns < repeats or time.process_time() - start < at_least:
        for name, prepare in works.items():
            best[name] = min(best[name], _seconds(prepare()))
        turns += 1
    return best


def peak_memory(work: Callable[[], object]) -> int:
    """Bytes resident at the peak of a fresh process that does nothing but import `work`'s module and call it."""
    file = Path(inspect.getfile(work)).resolve()
    call = f"import sys; sys.path.insert(0, {str(file.parent)!r}); import {file.stem} as m; m.{work.__name__}()"
    launch = [sys.executable, "-c", _LAUNCH, sys.executable, "-c", call]
    done = subprocess.run(launch, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout) * _KILOBYTE


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
