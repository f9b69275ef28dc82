"""Whether one state of the source is slower than another: every line of the benchmarks, old and new taking turns.

    python benchmarks/compare.py OLD/src NEW/src [--case 'all weights*'] [--rounds 5] [--turns 5] [--out FILE]

Each round starts a fresh process for either source, because a process keeps its luck with memory. Within a round, the
two run each work in turns, and the best turn of each counts.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

SHORT = 0.03  # a work that takes fewer CPU seconds is called as often as fills them
ONCE: Final = {"tune"}  # works that would be another one if they were called twice: short ones get more turns instead
MOST = 5  # so many times more turns at the most
FEWEST = 3  # rounds before anything is said
ALLOWED = 1.03  # how much slower the new one may be, beyond its noise
SIDES: Final = ("old", "new")


@dataclass(frozen=True)
class Line:
    """What one work costs in the two sources."""

    case: str
    work: str
    ratios: list[float]  # CPU seconds of the new one over those of the old one, by round
    old: float  # the fewest CPU seconds
    new: float
    of: float | None  # the fewest CPU seconds of the plain pass that it is measured against

    @property
    def ratio(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.ratios)

    @property
    def noise(self) -> float:
        """The standard error of the median, from the median deviation of the rounds."""
        deviation = statistics.median(abs(ratio - self.ratio) for ratio in self.ratios)
        return 1.4826 * 1.2533 * deviation / math.sqrt(len(self.ratios))

    @property
    def verdict(self) -> str:
        """'slower' beyond what is allowed and two standard errors, 'faster' likewise, else 'same'.

        A process may keep a bad place in memory for all its turns, so that one or two rounds say nothing.
        """
        if len(self.ratios) < FEWEST:
            return f"{len(self.ratios)} of {FEWEST} rounds"
        if self.ratio - 2 * self.noise > ALLOWED:
            return "slower"
        return "faster" if self.ratio + 2 * self.noise < 1 / ALLOWED else "same"

    def __str__(self) -> str:
        both = (self.old, self.new)
        over = " ".join(f"{seconds / self.of:7.2f}x" if self.of else f"{seconds:7.4f}s" for seconds in both)
        spread = f"{min(self.ratios):.2f} to {max(self.ratios):.2f}"
        return f"{self.case:40}{self.work:14}{over}   {self.ratio:.3f} +- {self.noise:.3f}  ({spread})  {self.verdict}"


def main() -> None:
    """Measure, print a line for each work, and write them to a file if `--out` says where."""
    options = _options()
    if options.serve:
        serve()
        return
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    asked = [name for name in _cases(options.new) if any(fnmatch.fnmatch(name, glob) for glob in options.case)]
    for turn in range(options.rounds):
        print(f"round {turn + 1} of {options.rounds}", flush=True)
        for case in asked:
            for work, seconds in _round(case, (options.old, options.new), options.turns, options.work).items():
                for side in SIDES:
                    found.setdefault((case, work), {}).setdefault(side, []).append(seconds[side])
            print("\n".join(str(line) for line in _lines(found) if line.case == case), flush=True)
            if options.out is not None:
                _save(options.out, _lines(found), options)


def serve() -> None:
    """Time works of one source as they are asked for: lines of JSON come in, CPU seconds go out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a network or a library prints is no answer
    warnings.simplefilter("ignore")
    import lines
    from measure import cpu_seconds, use_one_thread

    use_one_thread()
    case, works = None, {}
    for request in map(json.loads, sys.stdin):
        if request["case"] is None:
            answer: Any = list(lines.CASES)
        else:
            if request["case"] != case:
                case, works = request["case"], lines.CASES[request["case"]]()
            if request["work"] is None:
                answer = list(works)
            else:
                timed, calls = works[request["work"]](), request["calls"]
                answer = cpu_seconds(_often(timed, calls)) / calls
        print(json.dumps(answer), file=answers, flush=True)


class Side:
    """A process that times works with one source."""

    def __init__(self, source: Path) -> None:
        env = os.environ | {"PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command, pipe = [sys.executable, __file__, ".", ".", "--serve"], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)

    def ask(self, case: str | None = None, work: str | None = None, calls: int = 1) -> Any:
        """Return the names of the cases, of a case's works, or the CPU seconds of a work."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"case": case, "work": work, "calls": calls}), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that measured {case!r}, {work!r} has ended: see above.")
        return json.loads(answer)

    def end(self) -> None:
        """Let the process end, and wait for it."""
        self.process.communicate()


def _round(case: str, sources: tuple[Path, Path], turns: int, globs: list[str]) -> dict[str, dict[str, float]]:
    """The fewest CPU seconds of each work of a case, in two fresh processes that take turns."""
    sides = dict(zip(SIDES, map(Side, sources), strict=True))
    found: dict[str, dict[str, float]] = {}
    try:
        works = sides["old"].ask(case)
        for work in works:
            if not work.startswith("of_") and not any(fnmatch.fnmatch(work, glob) for glob in globs):
                continue
            first = [side.ask(case, work) for _ in range(2) for side in sides.values()]
            often = math.ceil(SHORT / max(first[2:]))
            calls = 1 if work in ONCE else max(1, often)
            best: dict[str, float] = dict.fromkeys(SIDES, math.inf)
            for turn in range(turns * min(MOST, often) if work in ONCE else turns):
                for name in SIDES if turn % 2 else reversed(SIDES):
                    best[name] = min(best[name], sides[name].ask(case, work, calls))
            found[work] = best
    finally:
        for side in sides.values():
            side.end()
    return found


def _lines(found: dict[tuple[str, str], dict[str, list[float]]]) -> list[Line]:
    from lines import PASSES

    lines = []
    for (case, work), seconds in found.items():
        if work.startswith("of_"):
            continue
        plain = found.get((case, PASSES.get(work, "")))
        ratios = [new / old for old, new in zip(*(seconds[side] for side in SIDES), strict=True)]
        of = None if plain is None else min(min(times) for times in plain.values())
        lines.append(Line(case, work, ratios, min(seconds["old"]), min(seconds["new"]), of))
    return lines


def _cases(source: Path) -> list[str]:
    side = Side(source)
    try:
        return side.ask()
    finally:
        side.end()


def _often(work: Callable[[], object], calls: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(calls):
            work()

    return repeated


def _save(path: Path, lines: list[Line], options: argparse.Namespace) -> None:
    import machine

    found = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": " ".join(["python benchmarks/compare.py", *map(str, sys.argv[1:])]),
        "old": _commit(options.old),
        "new": _commit(options.new),
        "machine": asdict(machine.describe()),
        "results": [
            asdict(line) | {"ratio": line.ratio, "noise": line.noise, "verdict": line.verdict} for line in lines
        ],
    }
    path.write_text(json.dumps(found, indent=2) + "\n")


def _commit(source: Path) -> str:
    command = ["git", "-C", str(source), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path, help="the folder that has the package of the old state, as ../old/src")
    parser.add_argument("new", type=Path, help="that of the new state")
    parser.add_argument("--case", action="append", help="a glob over the names of the cases; may be repeated")
    parser.add_argument("--work", action="append", help="a glob over the names of the works; may be repeated")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of processes for each case (default 5)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each work in a round (default 5)")
    parser.add_argument("--out", type=Path, help="where to write the lines")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.case, options.work = options.case or ["*"], options.work or ["*"]
    return options


if __name__ == "__main__":
    main()
