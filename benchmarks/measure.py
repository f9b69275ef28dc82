"""How things are measured: CPU seconds on one thread, and the peak memory of a process of its own.

CPU seconds do not count the time that other processes take, but a busy neighbour still slows the shared caches. So the
things to be compared take turns, and the best of several turns counts: what disturbs one of them disturbs all, and
what is left in the best turn is the work itself.
"""

from __future__ import annotations

import inspect
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Work = Callable[[], Callable[[], object]]  # prepares, untimed, and returns what is to be timed

_KILOBYTE = 1 if sys.platform == "darwin" else 1024  # in what getrusage counts ru_maxrss

# A process begins with the peak of the one that started it, so that a large benchmark would hide a small work.
# Between the two stands this small one, which also hands its memory limit down (0: none). Time is not limited this way:
# with RLIMIT_CPU set, Linux counts CPU seconds in ticks of milliseconds.
_LAUNCH = """
import resource, subprocess, sys
memory = int(sys.argv[1])
if memory:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
code = subprocess.run(sys.argv[2:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, code)
"""


@dataclass(frozen=True)
class Finished:
    """What is known of a process that has come to its end."""

    code: int  # 0: all went well
    peak: int  # bytes resident
    errors: str  # what it wrote to stderr


def use_one_thread() -> None:
    """Let torch use one thread; with more of them, CPU seconds add up over the threads."""
    torch.set_num_threads(1)


def best_seconds(works: Mapping[str, Work], repeats: int, at_least: float = 10.0) -> dict[str, float]:
    """The fewest CPU seconds that each work took, over turns of all of them.

    There are `repeats` turns, or as many as fill `at_least` seconds. Each work runs once before that, untimed.
    """
    for prepare in works.values():
        prepare()()
    best, turns = dict.fromkeys(works, math.inf), 0
    start = time.process_time()
    while turns < repeats or time.process_time() - start < at_least:
        for name, prepare in works.items():
            best[name] = min(best[name], cpu_seconds(prepare()))
        turns += 1
    return best


def warmed(work: Callable[[], object]) -> Work:
    """A work that is timed right after an untimed run of itself: what others are compared with has its caches warm."""

    def prepare() -> Callable[[], object]:
        work()
        return work

    return prepare


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one run."""
    start = time.process_time()
    work()
    return time.process_time() - start


def peak_memory(work: Callable[..., object], *args: str) -> int:
    """Bytes resident at the peak of a fresh process that does nothing but import `work`'s module and call it."""
    file = Path(inspect.getfile(work)).resolve()
    path = f"import sys; sys.path.insert(0, {str(file.parent)!r})"
    done = run_apart([sys.executable, "-c", f"{path}; import {file.stem} as m; m.{work.__name__}(*{args!r})"])
    if done.code:
        raise RuntimeError(f"{work.__name__}{args} failed in its own process:\n{done.errors}")
    return done.peak


def run_apart(
    command: Sequence[str], seconds: float | None = None, memory: int = 0, env: Mapping[str, str] | None = None
) -> Finished:
    """Run a command in a process of its own; `memory` bytes of addresses for it, 0 for no limit.

    Raises subprocess.TimeoutExpired after `seconds` on the clock; nothing of it is left running.
    """
    launch = [sys.executable, "-c", _LAUNCH, str(memory), *command]
    pipe = subprocess.PIPE
    process = subprocess.Popen(launch, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True)
    try:
        out, errors = process.communicate(timeout=seconds)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    peak, code = map(int, out.split())
    return Finished(code, peak * _KILOBYTE, errors)
