"""How a study is started: its flags, its folders, and what is said where the data is missing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.harm.data import Folder
from experiments.rows import replace
from experiments.uq.cache import Cache

RESULTS = Path(__file__).parents[1] / "results"
VARIABLE = "LAPLACE_DATA"


@dataclass(frozen=True)
class Study:
    """The folders and sizes of one run."""

    name: str
    folder: Folder
    cache: Cache
    results: Path
    quick: bool
    seeds: int
    epochs: int


def started(
    name: str,
    about: str,
    arguments: Sequence[str] | None = None,
    *,
    needs_data: bool = True,
    seeds: int | None = None,
    epochs: int | None = None,
) -> Study:
    """Read the flags. A missing data folder ends the program with what to write, if the study needs data.

    `seeds` and `epochs` are those of the page; with --quick, they are 1. A study without them has no such flag.
    """
    parser = argparse.ArgumentParser(f"python -m experiments.{name}", description=about)
    parser.add_argument("--data", help=f"the folder with the data sets; {VARIABLE} if left out")
    parser.add_argument("--quick", action="store_true", help="a few examples, to see that everything runs")
    if seeds is not None:
        parser.add_argument("--seeds", type=int, help=f"how many times everything is trained; {seeds} if left out")
    if epochs is not None:
        parser.add_argument("--epochs", type=int, help=f"of every training; {epochs} if left out")
    parser.add_argument("--cache", type=Path, help="where trained networks and features are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON and the figure go")
    parser.set_defaults(seeds=None, epochs=None)
    given = parser.parse_args(arguments)
    data = given.data or os.environ.get(VARIABLE)
    if needs_data and (not data or not Path(data).is_dir()):
        came = f"There is no folder {data}." if data else "This study needs real data."
        where = f"Say where it is with --data FOLDER or {VARIABLE}=FOLDER"
        sys.exit(f"{came} {where}; experiments/{name}/__main__.py lists the files.")
    torch.set_num_threads(1)  # CPU seconds are those of one core
    quick = "-quick" if given.quick else ""
    cache = given.cache or Path.home() / ".cache" / "laplace-experiments"
    given.results.mkdir(parents=True, exist_ok=True)
    return Study(
        name,
        Folder(Path(data or ".")),
        Cache(cache / f"{name}{quick}"),
        given.results / f"{name.replace('_', '-')}{quick}.json",
        given.quick,
        given.seeds or (1 if given.quick else seeds or 1),
        given.epochs or (1 if given.quick else epochs or 1),
    )


class Rows:
    """Results under their names, written as they are found: what is there is not computed again.

    Other settings begin a new file.

    The CPU seconds of all runs that added rows are written beside them; not where rows were found without.
    """

    def __init__(self, path: Path, settings: dict) -> None:
        self.path, self.settings, self.rows = path, settings, {}
        self.before: float | None = 0.0
        if path.exists() and (found := json.loads(path.read_text()))["settings"] == settings:
            self.rows, self.before = found["rows"], found.get("cpu_seconds")
        self.begun = time.process_time()

    def get(self, name: str, make: Callable[[], dict]) -> dict:
        """Return the row of that name, made and written if it is not there."""
        if name not in self.rows:
            self.rows[name] = make()
            machine = f"{platform.machine()}, {os.cpu_count()} cores, one thread, torch {torch.__version__}"
            whole = {"settings": self.settings, "machine": machine, **self._spent(), "rows": self.rows}
            replace(self.path, json.dumps(whole, indent=1) + "\n")
            print(name, flush=True)
        return self.rows[name]

    def _spent(self) -> dict[str, float]:
        """Return the CPU seconds of this run so far and of the runs before it."""
        spent = time.process_time() - self.begun
        return {} if self.before is None else {"cpu_seconds": round(self.before + spent, 1)}
