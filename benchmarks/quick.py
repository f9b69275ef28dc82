"""Whether anything became slower: a few ratios in under two minutes, beside those that are committed.

    make bench-quick                          # measure; exits with 1 if a ratio is above its limit
    python benchmarks/quick.py --report       # the same, but a busy or another machine only gets a report
    python benchmarks/quick.py --record 5     # measure in 5 processes, and write the ratios and their noise

A ratio is CPU seconds of a work over those of a plain pass of the network, by turns in one process, the best turn of
each. Its limit is the committed ratio times 1 + max(5 %, 3 x noise). The noise was measured: it is the standard
deviation of the logarithm of the ratio over processes, because a process keeps its luck with memory for all its turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

RESULTS = Path(__file__).parent / "results" / "quick.json"
TURNS = 4
SHORT = 0.02  # a work that takes fewer CPU seconds is called as often as fills them
ALLOWED, SIGMAS = 0.05, 3.0
WAITED = 1.15  # seconds on the clock over CPU seconds, from which a machine counts as busy

WORKS: Final[Mapping[str, tuple[str, ...]]] = {
    "all weights, mlp-kron": ("fit", "sketch", "predict", "tune"),
    "all weights, mlp-diag": ("fit", "sketch"),
    "all weights, lenet-kron": ("fit", "sketch", "predict"),
    "all weights, resnet-kron": ("sketch", "predict", "tune"),
    "last layer, LeNet, kron": ("fit", "predict"),
    "last layer, 1000 classes, kron": ("fit", "predict"),
    "one input, small CNN": ("la(x)", "la.predict(x)"),
}


@dataclass(frozen=True)
class Line:
    """A ratio that was committed, and how much it varies from process to process."""

    ratio: float  # the median
    noise: float  # the standard deviation of its logarithm
    processes: int

    @property
    def limit(self) -> float:
        return self.ratio * (1 + max(ALLOWED, SIGMAS * self.noise))


@dataclass(frozen=True)
class Measured:
    """Ratios of one process, and how long it had to wait for its CPU."""

    ratios: dict[str, float]
    waited: float  # seconds on the clock over CPU seconds

    @property
    def busy(self) -> bool:
        return self.waited > WAITED


def main() -> None:
    """Measure, compare and report, or record."""
    options = _options()
    if options.once:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a network or a library prints is no answer
        print(json.dumps(asdict(measure())), file=answers, flush=True)
    elif options.record:
        record(options.record, options.out)
    else:
        sys.exit(compare(options.out, lenient=options.report))


def compare(committed: Path, lenient: bool) -> int:
    """Print all lines beside the committed ones. Returns the exit code."""
    found = json.loads(committed.read_text())
    lines = {name: Line(**line) for name, line in found["lines"].items()}
    measured = _process()
    slower = beyond(lines, measured.ratios)
    if slower and not measured.busy:  # once more: only what is slower twice counts
        again = _process()
        least = {name: min(ratio, again.ratios[name]) for name, ratio in measured.ratios.items()}
        measured = Measured(least, max(measured.waited, again.waited))
        slower = beyond(lines, least)
    for name, line in lines.items():
        ratio = measured.ratios.get(name)
        shown = "not measured" if ratio is None else f"{ratio:8.2f} x, {ratio / line.ratio - 1:+5.0%}"
        print(f"{name:48} {line.ratio:8.2f} x +- {line.noise:4.1%}   {shown}{'   SLOWER' if name in slower else ''}")
    same = found["machine"]["cpu"] == _cpu()
    if measured.busy:
        print(f"The machine is busy: {measured.waited:.2f} seconds on the clock for each CPU second. Ratios vary more.")
    if not same:
        print(f"The committed ratios are of another machine: {found['machine']['cpu']}.")
    print(f"{len(slower)} of {len(lines)} lines are slower than their limit." if slower else "No line is slower.")
    return 0 if not slower or (lenient and (measured.busy or not same)) else 1


def beyond(lines: Mapping[str, Line], ratios: Mapping[str, float]) -> list[str]:
    """Return the names of the ratios that are above their limit."""
    return [name for name, line in lines.items() if name in ratios and ratios[name] > line.limit]


def record(processes: int, out: Path) -> None:
    """Measure in so many processes, and write the median and the noise of each ratio."""
    found: list[Measured] = []
    for _ in range(processes):
        found.append(_process())
        print(f"{len(found)} of {processes}: waited {found[-1].waited:.2f}", flush=True)
    lines = {name: line_of([one.ratios[name] for one in found]) for name in found[0].ratios}
    import machine
    from measure import use_one_thread

    use_one_thread()
    written = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": f"python benchmarks/quick.py --record {processes}",
        "machine": asdict(machine.describe()),
        "waited": [round(one.waited, 2) for one in found],
        "lines": {name: asdict(line) for name, line in lines.items()},
    }
    out.write_text(json.dumps(written, indent=2) + "\n")
    print(f"Written to {out}")


def line_of(ratios: list[float]) -> Line:
    """Return the median of ratios, and the standard deviation of their logarithms."""
    noise = statistics.stdev(map(math.log, ratios)) if len(ratios) > 1 else ALLOWED
    return Line(round(statistics.median(ratios), 4), round(noise, 4), len(ratios))


def measure() -> Measured:
    """Return all ratios, measured in this process."""
    warnings.simplefilter("ignore")
    import lines
    from measure import use_one_thread

    use_one_thread()
    clock, cpu, ratios = time.perf_counter(), time.process_time(), dict[str, float]()
    for case, names in WORKS.items():
        works = lines.CASES[case]()
        for name in names:
            plain = works[lines.PASSES.get(name, "of_fit")]
            both = _by_turns({"work": works[name], "plain": plain}, once=name == "tune")
            ratios[f"{case}: {name}"] = both["work"] / both["plain"]
    return Measured(ratios, (time.perf_counter() - clock) / (time.process_time() - cpu))


def _by_turns(works: Mapping[str, Callable[[], Callable[[], object]]], once: bool) -> dict[str, float]:
    """Return the fewest CPU seconds of each work, over turns of both."""
    from measure import cpu_seconds

    best = {name: cpu_seconds(prepare()) for name, prepare in works.items()}  # not counted: caches are cold
    calls = {name: 1 if once and name == "work" else math.ceil(SHORT / s) for name, s in best.items()}
    best = dict.fromkeys(works, math.inf)
    for _ in range(TURNS):
        for name, prepare in works.items():
            timed = prepare()
            seconds = cpu_seconds(lambda work=timed, n=calls[name]: [work() for _ in range(n)])
            best[name] = min(best[name], seconds / calls[name])
    return best


def _process() -> Measured:
    """Measure in a fresh process."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run([sys.executable, __file__, "--once"], stdout=subprocess.PIPE, text=True, check=True, env=env)
    return Measured(**json.loads(done.stdout))


def _cpu() -> str:
    import machine

    return machine.describe().cpu


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--report", action="store_true", help="exit with 0 on a busy machine, and on another one")
    parser.add_argument("--record", type=int, metavar="N", help="write the ratios and their noise, from N processes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the committed ratios (default results/quick.json)")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
