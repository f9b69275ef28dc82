"""Results in a file, each under its name: what is there is not computed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


class Rows:
    """Rows of a table under their names, written as they are found; other settings begin a new file."""

    def __init__(self, name: str, settings: dict) -> None:
        RESULTS.mkdir(exist_ok=True)
        self.path, self.settings, self.rows = RESULTS / f"{name}.json", settings, {}
        if self.path.exists() and (found := json.loads(self.path.read_text()))["settings"] == settings:
            self.rows = found["rows"]

    def get(self, name: str, make: Callable[[], dict]) -> dict:
        """The row of that name, made if it is not there."""
        if name not in self.rows:
            self.rows[name] = make()
            self.path.write_text(json.dumps({"settings": self.settings, "rows": self.rows}, indent=1) + "\n")
            print(name, {k: round(v, 3) if isinstance(v, float) else v for k, v in self.rows[name].items()}, flush=True)
        return self.rows[name]


def mean(rows: list[dict], key: str) -> float:
    """Of one column."""
    return sum(row[key] for row in rows) / len(rows)


def deviation(rows: list[dict], key: str) -> float:
    """The standard error of that mean."""
    centre, n = mean(rows, key), len(rows)
    return (sum((row[key] - centre) ** 2 for row in rows) / (n - 1) / n) ** 0.5 if n > 1 else float("nan")
