"""Real processes for tests: they meet on the loopback with gloo, stay for many checks, and a hang is a failure."""

from __future__ import annotations

import importlib.util
import os
import queue
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

SECONDS = 120.0  # that all ranks together may take for one check
START = 300.0  # and to start, and to import what a check needs, which takes as long as the machine is busy


class Pool:
    """Keeps `size` processes in one group. They run functions of test files, each rank with the same arguments."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        size, context = self.size, multiprocessing.get_context("spawn")
        self.closed, self.folder, self.loaded = False, tempfile.TemporaryDirectory(), set[str]()
        self.calls = [context.Queue() for _ in range(size)]
        self.results = context.Queue()
        self.processes = [
            context.Process(
                target=_serve, args=(rank, size, self.folder.name, calls, self.results, sys.path), daemon=True
            )
            for rank, calls in enumerate(self.calls)
        ]
        for process in self.processes:
            process.start()

    def run(
        self, function: Callable[..., Any], *args: Any, seconds: float = SECONDS, lost: Sequence[int] = ()
    ) -> list[Any]:
        """Call function(*args) on every rank, and return what each returned. Ranks that are `lost` do not answer."""
        if self.closed:  # after a check that failed
            self._start()
        file = function.__code__.co_filename
        if file not in self.loaded:
            self._all(file, None, (), START, self.size)
            self.loaded.add(file)
        return self._all(file, function.__name__, args, seconds, self.size - len(lost))

    def _all(self, file: str, name: str | None, args: tuple[Any, ...], seconds: float, answers: int) -> list[Any]:
        """Have every rank load a file, and call a function of it if one is named."""
        for calls in self.calls:
            calls.put((file, name, args))
        found: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while len(found) < answers:
            try:
                rank, value, error = self.results.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                self.close()
                raise AssertionError(f"{name or file} hangs: ranks {sorted(found)} of {self.size} answered") from None
            if error is not None:
                self.close()
                raise AssertionError(f"rank {rank} of {self.size} in {name or file}:\n{error}")
            found[rank] = value
        return [found.get(rank) for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        self.closed = True
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank: int, size: int, folder: str, calls: Any, results: Any, path: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background turns off
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)})
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    modules: dict[str, Any] = {}
    while True:
        file, name, args = calls.get()
        try:
            if file not in modules:
                spec = importlib.util.spec_from_file_location(Path(file).stem, file)
                assert spec is not None
                assert spec.loader is not None
                modules[file] = sys.modules[Path(file).stem] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(modules[file])
            results.put((rank, None if name is None else getattr(modules[file], name)(*args), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
