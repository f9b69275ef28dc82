"""What a posterior over all weights of a transformer costs: fits, decompositions, predictions, peak memory.

    python benchmarks/language_models.py --case fit --case predict --case decompose --case memory --case rows

The network is `networks.gpt`: queries, keys and values are separate layers, positions are an embedding of arange(T),
the head is not tied to the embedding, and it reads the last token. Times are CPU seconds on one thread, one turn each,
after a plain forward pass over the same batches in the same process; ratios are what compares.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import machine
import networks
from data import Batches, forward, in_batches
from laplace import Laplace
from laplace.errors import LaplaceWarning
from measure import cpu_seconds, peak_memory, use_one_thread

RESULTS = Path(__file__).parent / "results" / "language_models.json"
LENGTH, VOCABULARY, CLASSES, BATCH = 64, 5000, 4, 16


@dataclass(frozen=True)
class Line:
    """One number, with the plain pass that it is measured against."""

    case: str
    what: str
    found: float
    unit: str
    aim: float | None
    seconds: float = 0.0
    of: float = 0.0

    def __str__(self) -> str:
        aim = "" if self.aim is None else f"{self.aim:10.4g}"
        return f"{self.case:34} {self.what:30} {self.found:10.3g} {self.unit:12}{aim:>10}"


class Problem:
    """A GPT with random weights and random tokens, the same at every start."""

    def __init__(self, width: int, depth: int, examples: int) -> None:
        torch.manual_seed(0)
        self.model = networks.gpt(width, depth, CLASSES, vocabulary=VOCABULARY)
        self.ids: Tensor = torch.randint(VOCABULARY, (examples, LENGTH))
        self.batches: Batches = in_batches(self.ids, torch.randint(CLASSES, (examples,)), BATCH)
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        self.name = f"GPT {depth} x {width}, {millions:.0f} M, N = {examples}"

    def forward(self) -> float:
        """CPU seconds of a plain forward pass, the better of two."""
        return min(cpu_seconds(lambda: forward(self.model, [x for x, _ in self.batches])) for _ in range(2))

    def laplace(self, structure: Any) -> Laplace:
        """A posterior that is not fitted yet."""
        return Laplace(self.model, "classification", "all", structure, curvature="sketch")


def fit() -> Iterator[Line]:
    """Sketched fits of 46 M weights over a forward pass."""
    problem = Problem(768, 6, 128)
    of = problem.forward()
    for structure, aim in (("kron", 4.0), ("diag", None)):
        la = problem.laplace(structure)
        seconds = cpu_seconds(lambda la=la: la.fit(problem.batches))
        yield Line(problem.name, f"fit {structure}, sketch", seconds / of, "x forward", aim, seconds, of)


def fit_float32() -> Iterator[Line]:
    """The same with factors in float32, and a second fit, which takes over the plan of the first."""
    from laplace.structures import Kron

    problem = Problem(768, 6, 128)
    of, la = problem.forward(), problem.laplace(Kron(dtype=torch.float32))
    for what in ("fit kron, sketch, float32", "the same again"):
        seconds = cpu_seconds(lambda: la.fit(problem.batches))
        yield Line(problem.name, what, seconds / of, "x forward", 4.0, seconds, of)


def predict() -> Iterator[Line]:
    """Four predictions of 46 M weights. A large prior lets float32 decompositions do, which are not timed here."""
    problem = Problem(768, 6, 16)
    la, x = problem.laplace("kron").fit(problem.batches), problem.ids[:4]
    la.prior_precision = 1e9
    la(x)
    of = min(cpu_seconds(lambda: forward(problem.model, [x])) for _ in range(5))
    seconds = min(cpu_seconds(lambda: la(x)) for _ in range(3))
    yield Line(problem.name, "4 predictions, 4 classes", seconds / of, "x forward", 20.0, seconds, of)


def decompose() -> Iterator[Line]:
    """The first evidence after a fit, in which all decompositions are, over the fit."""
    problem = Problem(512, 6, 128)
    la = problem.laplace("kron")
    of = cpu_seconds(lambda: la.fit(problem.batches))
    seconds = cpu_seconds(la.log_marginal_likelihood)
    yield Line(problem.name, "decompositions", seconds / of, "x fit", 1.0, seconds, of)


def memory() -> Iterator[Line]:
    """Peaks of processes that fit, above those that only run the network once."""
    for width, depth in ((768, 6), (768, 12)):
        plain = peak_memory(run_once, str(width), str(depth))
        for structure in ("kron", "float32"):
            above = (peak_memory(fit_once, str(width), str(depth), structure, "32") - plain) / 1e9
            name = Problem(width, depth, 32).name
            yield Line(name, f"peak of a fit, {structure}", above, "GB above", 2.5)


def memory_of_rows() -> Iterator[Line]:
    """The same of more sequences: so many that wide sums are matrices in float64, and that they are in float32."""
    plain = peak_memory(run_once, "768", "12")
    for examples in (80, 256):
        above = (peak_memory(fit_once, "768", "12", "kron", str(examples)) - plain) / 1e9
        yield Line(Problem(768, 12, examples).name, "peak of a fit, kron", above, "GB above", 2.5)


def run_once(width: str, depth: str) -> None:
    """Run one batch through the network."""
    use_one_thread()
    problem = Problem(int(width), int(depth), 32)
    forward(problem.model, [problem.ids[:BATCH]])


def fit_once(width: str, depth: str, structure: str, examples: str) -> None:
    """Fit, and do nothing with it."""
    from laplace.structures import Kron

    use_one_thread()
    warnings.simplefilter("ignore", LaplaceWarning)
    problem = Problem(int(width), int(depth), int(examples))
    problem.laplace(Kron(dtype=torch.float32) if structure == "float32" else Kron()).fit(problem.batches)


CASES: Final[dict[str, Callable[[], Iterator[Line]]]] = {
    "fit": fit,
    "float32": fit_float32,
    "predict": predict,
    "decompose": decompose,
    "memory": memory,
    "rows": memory_of_rows,
}


def main() -> None:
    """Measure the asked cases, print them, and write them to a file beside those of other cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="measure this case only; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"where to write (default {RESULTS.name})")
    options = parser.parse_args()
    use_one_thread()
    warnings.simplefilter("ignore", LaplaceWarning)
    here = machine.describe()
    print(f"{here}\n", flush=True)
    kept = json.loads(options.out.read_text())["cases"] if options.out.exists() else {}
    for name in options.case or CASES:
        lines = []
        for line in CASES[name]():
            print(line, flush=True)
            lines.append(asdict(line))
        kept[name] = lines
    options.out.write_text(json.dumps({"machine": asdict(here), "cases": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
