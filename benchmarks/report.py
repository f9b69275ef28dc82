"""What a benchmark found: an aligned table to read, a JSON file to keep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from machine import Machine

_HEADER = ("case", "", "ours", "ceiling", "laplace-torch 0.3", "ratio", "")


@dataclass(frozen=True)
class Result:
    """One measured number and the ceiling that it has to stay under."""

    case: str
    what: str
    measured: float
    unit: str  # 'x forward', 'x epoch', 's' or 'GB'
    ceiling: float
    peer: float | str  # what laplace-torch needs, or why there is no number
    seconds: Mapping[str, float] = field(default_factory=dict)  # what a ratio was made of
    peer_seconds: Mapping[str, float] = field(default_factory=dict)  # the same for laplace-torch
    remark: str = ""  # what laplace-torch said where it gave no number

    @property
    def of_peer(self) -> float | None:
        """Measured over what laplace-torch needs, where that is a number."""
        return None if isinstance(self.peer, str) else self.measured / self.peer

    @property
    def verdict(self) -> str:
        """'ok' up to the ceiling, else 'over'."""
        return "ok" if self.measured <= self.ceiling else "over"


def table(results: Sequence[Result]) -> str:
    """One line per result, columns aligned."""
    rows = [_HEADER, *(_cells(result) for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def save(path: Path, results: Sequence[Result], machine: Machine, **more: object) -> None:
    """Write the results with the date and the machine that they belong to."""
    found = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": asdict(machine),
        "results": [{**asdict(result), "verdict": result.verdict} for result in results],
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")


def _cells(result: Result) -> tuple[str, ...]:
    measured, ceiling = f"{_number(result.measured)} {result.unit}", f"{result.ceiling:g} {result.unit}"
    peer = result.peer if isinstance(result.peer, str) else f"{_number(result.peer)} {result.unit}"
    of_peer = "" if result.of_peer is None else f"{result.of_peer:.2g}"
    return result.case, result.what, measured, ceiling, peer, of_peer, result.verdict


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}"
