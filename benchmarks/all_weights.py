"""What a posterior over all weights costs: fits against an epoch of training, predictions against forward passes.

laplace-torch is asked the same questions in a process of its own, and first whether it gives the same numbers.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import agreement
import machine
import networks
from data import Batches, epoch, forward, inputs_of, random_batches
from laplace import Laplace
from laplace.errors import LaplaceWarning
from measure import best_seconds, peak_memory, use_one_thread, warmed
from peer import Answer, Peer, Question, install
from report import Result, save, table

RESULTS = Path(__file__).parent / "results" / "all_weights.json"
CLASSES = 10
FEW = 32  # inputs that laplace-torch is asked for where it fails on all of them

NOTES = """\
x epoch      CPU seconds over those of a forward and backward pass over the same batches, up to the gradients of all
             parameters; eval mode, one thread; all take turns in one run, the best of {repeats} or more turns counts.
             The epoch is timed right after an untimed one; after anything else it would be 5 to 20 % slower.
x forward    the same over a plain forward pass (eval, no_grad) on the same inputs.
fit          la.fit(batches). sketch: one vector per example; beside it laplace-torch's cheapest, a Monte-Carlo Fisher
             with one sample. Its fit decomposes the factors; ours does so when they are first asked for: see tune.
predict      probit, all inputs in one call la(x), warmed up once: the posterior is cached.
tune         optimize_prior_precision() by evidence, one precision for all weights; the first after a fit, so that our
             decompositions are in it.
peak memory  resident, of a fresh process that imports torch and the library, fits (exact), tunes and predicts.
ratio        ours over laplace-torch's, which has {seconds} s and {memory:g} GB for each number."""


@dataclass(frozen=True)
class Ceilings:
    """What a case has to stay under."""

    exact: float  # x epoch
    sketch: float  # x epoch
    predict: float  # x forward
    memory: float  # GB
    tune: float = 0.3  # s


@dataclass(frozen=True)
class Case:
    """A network, how much data, and the structure of the posterior that is put on all its weights."""

    name: str
    network: str  # in networks.py
    shape: tuple[int, ...]
    examples: int
    batch: int
    structure: str
    predictions: int
    ceilings: Ceilings


CASES: Final = {
    "mlp-kron": Case("MLP, kron", "digits_mlp", (784,), 4000, 128, "kron", 256, Ceilings(3.5, 2.5, 20, 0.6)),
    "mlp-diag": Case("MLP, diag", "digits_mlp", (784,), 4000, 128, "diag", 256, Ceilings(3.5, 2.5, 20, 0.6)),
    "lenet-kron": Case("LeNet, kron", "lenet", (1, 28, 28), 1500, 128, "kron", 256, Ceilings(3.8, 1.8, 24, 1.0)),
    "lenet-diag": Case("LeNet, diag", "lenet", (1, 28, 28), 1500, 128, "diag", 256, Ceilings(4.0, 2.0, 24, 1.0)),
    "resnet-kron": Case("ResNet-20, kron", "resnet20", (3, 32, 32), 256, 64, "kron", 64, Ceilings(8.0, 2.2, 36, 1.5)),
}


def main() -> None:
    """Measure, print the table and write it to a file; cases that were asked for by name only where `--out` says."""
    options = _options()
    use_one_thread()
    warnings.simplefilter("ignore", LaplaceWarning)  # that BatchNorm's weights have no Kronecker form is known here
    peer = Peer(Path(), missing="not asked") if options.no_peer else install()
    here = machine.describe()
    print(f"{here}\n", flush=True)
    agreements = [] if peer.missing else agreement.compare(peer)
    for found in agreements:
        print(f"differs from laplace-torch: {found}", flush=True)
    ours = [measure(name, options.repeats, peer) for name in options.case or CASES]
    print("asking laplace-torch ...", flush=True)
    results = [result for beside in ours for result in beside()]
    notes = NOTES.format(repeats=options.repeats, seconds=peer.seconds, memory=peer.memory / 1e9)
    print(f"\n{table(results)}\n\n{notes}")
    for remark in sorted({f"{result.case}: {result.remark}" for result in results if result.remark}):
        print(f"laplace-torch on {remark}")
    out = options.out or (None if options.case else RESULTS)
    if out is not None:
        save(out, results, here, agreement=[asdict(found) for found in agreements])
        print(f"\nWritten to {out}")


def measure(name: str, repeats: int, peer: Peer) -> Callable[[], list[Result]]:
    """All our numbers of a case; the call that is returned asks for laplace-torch's beside them."""
    case = CASES[name]
    print(f"measuring {case.name} ...", flush=True)
    problem = Problem(case)
    theirs = Theirs(case, Question(case.network, problem.model.state_dict(), problem.batches), peer)
    limits = case.ceilings
    fits = best_seconds(
        {"epoch": warmed(problem.epoch), "exact": lambda: problem.fitted, "sketch": lambda: problem.sketched},
        repeats,
        at_least=90,
    )
    la, x = problem.fitted(), inputs_of(problem.batches, case.predictions)
    predictions = best_seconds(
        {"forward": warmed(lambda: forward(problem.model, [x])), "laplace": lambda: lambda: la(x)}, repeats, 30
    )
    tuning = best_seconds({"tune": problem.tuning}, repeats)
    memory = peak_memory(fit_tune_predict, name) / 1e9
    exact, sketch = fits["exact"] / fits["epoch"], fits["sketch"] / fits["epoch"]
    predict = predictions["laplace"] / predictions["forward"]
    rows: list[tuple[str, float, str, float, Callable[[], Known], dict[str, float]]] = [
        (f"fit {case.examples}", exact, "x epoch", limits.exact, theirs.fit, fits),
        (f"fit {case.examples}, sketch", sketch, "x epoch", limits.sketch, theirs.sketched, fits),
        (f"predict {case.predictions}", predict, "x forward", limits.predict, theirs.predict, predictions),
        ("tune by evidence", tuning["tune"], "s", limits.tune, theirs.tune, tuning),
        ("peak memory", memory, "GB", limits.memory, theirs.memory, {}),
    ]

    def beside() -> list[Result]:
        answers = [ask() for *_, ask, _ in rows]
        return [
            Result(case.name, what, found, unit, ceiling, known.value, seconds, known.seconds, known.remark)
            for (what, found, unit, ceiling, _, seconds), known in zip(rows, answers, strict=True)
        ]

    return beside


class Problem:
    """Ours on a case, with the same weights and data at every start."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = getattr(networks, case.network)()
        self.batches: Batches = random_batches(case.shape, CLASSES, case.examples, case.batch)
        self.structure = case.structure

    def epoch(self) -> None:
        epoch(self.model, self.batches)

    def fitted(self, curvature: str = "ggn") -> Laplace:
        """A fitted posterior."""
        return Laplace(self.model, "classification", "all", self.structure, curvature=curvature).fit(self.batches)

    def sketched(self) -> Laplace:
        return self.fitted("sketch")

    def tuning(self) -> Callable[[], object]:
        la = self.sketched()
        return lambda: la.optimize_prior_precision(method="marglik")


@dataclass(frozen=True)
class Known:
    """A number of laplace-torch and what it was made of; or the word for why there is none, and what it said."""

    value: float | str
    seconds: dict[str, float] = field(default_factory=dict)
    remark: str = ""


class Theirs:
    """laplace-torch on a case; what it has failed at is not asked again."""

    def __init__(self, case: Case, question: Question, peer: Peer) -> None:
        self.case, self.question, self.peer = case, question, peer

    def fit(self) -> Known:
        """x epoch."""
        return _over(self._fit, "epoch")

    def sketched(self) -> Known:
        """x epoch, with its Monte-Carlo Fisher."""
        return _over(self._ask("fit", stochastic=True), "epoch")

    def predict(self) -> Known:
        """x forward; of a few inputs where all are too many."""
        known = _over(self._prediction, "forward")
        if not isinstance(known.value, str) or self._fit.failure:
            return known
        few = _over(self._ask("predict", n=FEW), "forward")
        if isinstance(few.value, str):
            return known
        return Known(f"{known.value}; {few.value:,.0f} x for {FEW}", few.seconds)

    def tune(self) -> Known:
        """Seconds."""
        answer = self._fit if self._fit.failure else self._ask("tune")
        return Known(answer.failure or answer.found["laplace-torch"], answer.found, answer.remark)

    def memory(self) -> Known:
        """GB."""
        failed = self._prediction.failure
        answer = self._prediction if failed else self._ask("fit_tune_predict", n=self.case.predictions)
        return Known(answer.failure or answer.peak / 1e9, remark=answer.remark)

    @cached_property
    def _fit(self) -> Answer:
        return self._ask("fit")

    @cached_property
    def _prediction(self) -> Answer:
        return self._fit if self._fit.failure else self._ask("predict", n=self.case.predictions)

    def _ask(self, task: str, **request: Any) -> Answer:
        return self.peer.ask(self.question, task, structure=self.case.structure, **request)


def fit_tune_predict(name: str) -> None:
    """Everything once, for its peak memory."""
    use_one_thread()
    case = CASES[name]
    problem = Problem(case)
    la = problem.fitted()
    la.optimize_prior_precision(method="marglik")
    la(inputs_of(problem.batches, case.predictions))


def _over(answer: Answer, unit: str) -> Known:
    if answer.failure:
        return Known(answer.failure, remark=answer.remark)
    return Known(answer.found["laplace-torch"] / answer.found[unit], answer.found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="turns that compared things take, at least (default 5)")
    parser.add_argument("--out", type=Path, help=f"where to write the results (default {RESULTS.name} in results/)")
    parser.add_argument("--case", action="append", choices=CASES, help="measure this case only; may be repeated")
    parser.add_argument("--no-peer", action="store_true", help="leave laplace-torch out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
