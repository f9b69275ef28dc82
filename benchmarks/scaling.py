"""How time and memory grow with examples N, outputs C, weights P and sequence length T. Fails where that is too fast.

    python benchmarks/scaling.py [--axis N]

Each point is a process of its own: CPU seconds on one thread, the best of five turns after a small one that warms up,
and the peak of resident memory (getrusage). A turn repeats what takes less than 50 ms. Each turn of the work is
followed by one of a plain forward pass over the same data. An exponent is the slope of a straight line through the
logarithms of three sizes.

The exit code is 1 if memory grows with N, or if an exponent of time is more than 0.15 above 1, or, along T, above that
of the plain pass where this is larger: attention is quadratic in T, and the library runs the network.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import machine
import networks
from laplace import Laplace
from laplace.errors import LaplaceWarning
from measure import cpu_seconds, run_apart, use_one_thread

RESULTS = Path(__file__).parent / "results" / "scaling.json"
SLACK = 0.15  # of exponents of time: the largest that passes as linear is 1.15
TURN = 0.05  # least CPU seconds of a turn
SAME = 1.1  # largest ratio of two peaks that pass as equal: the allocator leaves some MB here and there
BATCH = 128


@dataclass(frozen=True)
class Data:
    """Batches that are made when they are read, so that data takes no memory that grows with N."""

    examples: int
    batch: int
    classes: int
    tokens: int = 0  # length of a sequence; 0: vectors of 256 numbers

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for start in range(0, self.examples, self.batch):
            n = min(self.batch, self.examples - start)
            y = torch.randint(self.classes, (n,), generator=generator)
            if self.tokens:
                yield torch.randint(5000, (n, self.tokens), generator=generator), y
            else:
                yield torch.randn(n, 256, generator=generator), y


def mlp(depth: int, classes: int) -> nn.Module:
    """Hidden layers of 256."""
    layers: list[nn.Module] = [module for _ in range(depth) for module in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, classes)).eval()


def of_examples(n: int) -> tuple[nn.Module, Data]:
    return mlp(2, 10), Data(n, BATCH, 10)


def of_outputs(c: int) -> tuple[nn.Module, Data]:
    return mlp(2, c), Data(512, BATCH, c)


def of_weights(depth: int) -> tuple[nn.Module, Data]:
    return mlp(depth, 10), Data(1024, BATCH, 10)


def of_length(t: int) -> tuple[nn.Module, Data]:
    return networks.gpt(192, 2, 4), Data(64, 16, 4, t)


AXES: Final[dict[str, tuple[tuple[int, ...], Callable[[int], tuple[nn.Module, Data]]]]] = {
    "N": ((2048, 4096, 8192), of_examples),
    "C": ((20, 40, 80), of_outputs),
    "P": ((4, 8, 16), of_weights),
    "T": ((16, 32, 64), of_length),
}
WORKS: Final[dict[str, tuple[str, str, str | None]]] = {  # weights, structure, curvature
    "fit kron, exact": ("all", "kron", "ggn"),
    "fit kron, sketch": ("all", "kron", "sketch"),
    "fit diag, exact": ("all", "diag", "ggn"),
    "fit last layer": ("last_layer", "kron", "ggn"),
    "predict, all weights": ("all", "kron", "sketch"),
    "predict, last layer": ("last_layer", "kron", "ggn"),
}


@dataclass(frozen=True)
class Row:
    """How one work grows along one axis."""

    axis: str
    work: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    peaks: tuple[float, ...]  # MB
    exponent: float
    plain: float  # the exponent of a forward pass over the same data
    limit: float  # the largest exponent that passes
    verdict: str

    def __str__(self) -> str:
        seconds = " ".join(f"{s:8.3f}" for s in self.seconds)
        peaks = " ".join(f"{p:6.0f}" for p in self.peaks)
        exponents = f"{self.exponent:6.2f}  {self.plain:6.2f}"
        return f"{self.axis:2} {self.work:22} {seconds}  {exponents}   {peaks}  {self.verdict}"


def point(axis: str, size: int, work: str) -> tuple[float, float]:
    """CPU seconds of a work at one size, and of a plain forward pass over the same data."""
    use_one_thread()
    warnings.simplefilter("ignore", LaplaceWarning)
    torch.manual_seed(0)
    model, data = AXES[axis][1](size)
    weights, structure, curvature = WORKS[work]

    def fitted(data: Data) -> Laplace:
        return Laplace(model, "classification", weights, structure, curvature=curvature).fit(data)

    few = Data(2 * data.batch, data.batch, data.classes, data.tokens)
    la = fitted(few)
    at = data if axis == "N" or work.startswith("fit") else Data(16, 16, data.classes, data.tokens)
    batches = at if axis == "N" else list(at)

    @torch.no_grad()
    def plain() -> None:
        for x, _ in batches:
            model(x)

    def predict() -> None:
        for x, _ in batches:
            la(x)

    turns: list[Callable[[], object]] = [(lambda: fitted(data)) if work.startswith("fit") else predict, plain]
    repeats = [max(1, math.ceil(TURN / (cpu_seconds(turn) + 1e-9))) for turn in turns]
    found = [[seconds_each(turn, k) for turn, k in zip(turns, repeats, strict=True)] for _ in range(5)]
    return min(own for own, _ in found), min(of for _, of in found)


def seconds_each(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of one of several runs."""
    return cpu_seconds(lambda: [work() for _ in range(repeats)]) / repeats


def measured(axis: str, work: str) -> Row:
    """All sizes of an axis, each in a process of its own."""
    seconds, plain, peaks = [], [], []
    sizes = sizes_of(axis, work)
    for size in sizes:
        with tempfile.NamedTemporaryFile() as file:
            done = run_apart([sys.executable, __file__, "--point", axis, str(size), work, file.name])
            if done.code:
                raise RuntimeError(f"{work} at {axis} = {size} failed:\n{done.errors}")
            own, of = json.loads(Path(file.name).read_text())
            seconds.append(own)
            plain.append(of)
            peaks.append(done.peak / 2**20)
    exponent, network = slope(sizes, seconds), slope(sizes, plain)
    limit = SLACK + (max(1.0, network) if axis == "T" else 1.0)
    faults = ["time"] if exponent > limit else []
    faults += ["memory"] if axis == "N" and max(peaks) > SAME * min(peaks) else []
    verdict = f"over: {', '.join(faults)}" if faults else "ok"
    return Row(axis, work, sizes, tuple(seconds), tuple(peaks), exponent, network, limit, verdict)


def sizes_of(axis: str, work: str) -> tuple[int, ...]:
    """The sizes of an axis. A last layer collects features of up to 8 MB first, which fewer examples do not fill."""
    more = 16 if axis == "N" and work == "fit last layer" else 1
    return tuple(more * size for size in AXES[axis][0])


def slope(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """The exponent of a power law, by least squares of logarithms."""
    x, y = [math.log(s) for s in sizes], [math.log(s) for s in seconds]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def main() -> int:
    """Measure, print the table, write it to a file, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axis", action="append", choices=AXES, help="measure this axis only; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"where to write (default {RESULTS.name})")
    parser.add_argument("--point", nargs=4, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.point:
        axis, size, work, file = options.point
        Path(file).write_text(json.dumps(point(axis, int(size), work)))
        return 0
    use_one_thread()
    here = machine.describe()
    print(f"{here}\n", flush=True)
    kept = json.loads(options.out.read_text())["rows"] if options.out.exists() else {}
    fine = True
    for axis in options.axis or AXES:
        print(f"{axis} = {', '.join(map(str, AXES[axis][0]))}: CPU seconds, exponent, plain pass, peak MB", flush=True)
        rows = []
        for work in WORKS:
            row = measured(axis, work)
            print(row, flush=True)
            rows.append(asdict(row))
            fine = fine and row.verdict == "ok"
        kept[axis] = rows
        options.out.write_text(json.dumps({"machine": asdict(here), "rows": kept}, indent=1) + "\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
