"""Results in a file, each under its name: what is there is not computed again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def replace(path: Path, text: str) -> None:
    """Write a file at once: a run that is stopped leaves the old one or the new one, never a part."""
    unfinished = path.with_suffix(f"{path.suffix}.unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)


class Rows:
    """Rows of a table under their names, written as they are found; other settings begin a new file.

    The CPU seconds of all runs that added rows are written beside them; not where rows were found without.
    """

    def __init__(self, name: str, settings: dict) -> None:
        RESULTS.mkdir(exist_ok=True)
        self.path, self.settings, self.rows = RESULTS / f"{name}.json", settings, {}
        self.before: float | None = 0.0
        if self.path.exists() and (found := json.loads(self.path.read_text()))["settings"] == settings:
            self.rows, self.before = found["rows"], found.get("cpu_seconds")
        self.begun = time.process_time()

    def get(self, name: str, make: Callable[[], dict]) -> dict:
        """The row of that name, made if it is not there."""
        if name not in self.rows:
            self.rows[name] = make()
            spent = time.process_time() - self.begun
            known = {} if self.before is None else {"cpu_seconds": round(self.before + spent, 1)}
            whole = {"settings": self.settings, **known, "rows": self.rows}
            replace(self.path, json.dumps(whole, indent=1) + "\n")
            print(name, {k: round(v, 3) if isinstance(v, float) else v for k, v in self.rows[name].items()}, flush=True)
        return self.rows[name]


def mean(rows: list[dict], key: str) -> float:
    """Of one column."""
    return sum(row[key] for row in rows) / len(rows)


def deviation(rows: list[dict], key: str) -> float:
    """The standard error of that mean."""
    centre, n = mean(rows, key), len(rows)
    return (sum((row[key] - centre) ** 2 for row in rows) / (n - 1) / n) ** 0.5 if n > 1 else float("nan")
