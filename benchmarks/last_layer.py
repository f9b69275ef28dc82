"""What a Bayesian last layer costs on top of its network: fit, tuning and prediction against plain forward passes.

Wide heads are measured by structure, as last layers and within networks all of whose weights are uncertain.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

import machine
import networks
from data import Batches, forward, inputs_of, random_batches
from laplace import Laplace
from measure import Work, best_seconds, peak_memory, use_one_thread
from report import Result, save, table

RESULTS = Path(__file__).parent / "results" / "last_layer.json"
WIDE_HEADS: Final = {"diag": 6.0, "kron": 6.0, "ekfac": 6.0, "inf": 400.0}  # inf: N C I rank products in float64
WIDE_NETWORKS: Final = {"diag": 350.0, "kron": 600.0, "ekfac": 600.0, "inf": 5000.0}

NOTES = """\
x forward    CPU seconds over those of a plain forward pass (eval, no_grad) on the same inputs; one thread; both take
             turns in one run, the best of {repeats} or more turns counts. The loader is a list of ready batches.
fit          kron: with one log_marginal_likelihood(), so that the eigendecompositions are in it. full: la.fit alone;
             there the eigendecomposition is in the tuning, which is the first after a fresh fit.
predict      probit, all inputs in one call la(x), warmed up once: the posterior is cached.
wide cases   of what is predicted alone: their fits are empirical Fishers, one vector per example.
peak memory  resident, of a fresh process that imports torch and the library, fits, tunes and predicts.
laplace-torch was not run here; its column is there to compare with."""


def main() -> None:
    """Measure, print the table and write it to a file; cases that were asked for by name only where `--out` says."""
    options = _options()
    use_one_thread()
    torch.manual_seed(0)
    results = [result for case in options.case or CASES for result in CASES[case](options.repeats)]
    here = machine.describe()
    print(f"{here}\n\n{table(results)}\n\n{NOTES.format(repeats=options.repeats)}")
    out = options.out or (None if options.case else RESULTS)
    if out is not None:
        save(out, results, here)
        print(f"\nWritten to {out}")


def lenet_kron(repeats: int) -> list[Result]:
    """Ten classes, Kronecker factors."""
    problem = ten_classes("kron", repeats)
    return [problem.fit(1.2, 3.5), problem.predict(512, 1.2, 3.8), problem.tune(0.1, 1.9)]


def lenet_full(repeats: int) -> list[Result]:
    """Ten classes, all 850 weights together."""
    problem = ten_classes("full", repeats)
    return [problem.fit(4.0, 8.4), problem.predict(256, 2.5, 8.0), problem.tune(0.5, 5.6)]


def mlp_kron(repeats: int) -> list[Result]:
    """A thousand classes, 513,000 weights."""
    problem, never = thousand_classes(repeats), "does not finish in 500 s"
    memory = Result(problem.name, "peak memory", peak_memory(fit_tune_predict) / 1e9, "GB", 1.0, never)
    return [problem.fit(7.0, never), problem.predict(64, 4.5, never), memory]


def wide_heads(repeats: int) -> list[Result]:
    """A thousand outputs of a last layer, by structure."""
    problems = [thousand_classes(repeats, structure, "ef") for structure in WIDE_HEADS]
    return [problem.predict(64, WIDE_HEADS[problem.structure], "not asked") for problem in problems]


def wide_networks(repeats: int) -> list[Result]:
    """A thousand outputs with all weights uncertain, by structure: a thousand backward passes are inherent."""
    problems = [wide_network(repeats, structure) for structure in WIDE_NETWORKS]
    return [problem.predict(64, WIDE_NETWORKS[problem.structure], "not asked") for problem in problems]


CASES: Final[dict[str, Callable[[int], list[Result]]]] = {
    "lenet-kron": lenet_kron,
    "lenet-full": lenet_full,
    "mlp-kron": mlp_kron,
    "wide-heads": wide_heads,
    "wide-networks": wide_networks,
}


@dataclass(frozen=True)
class Problem:
    """A network, data, and the structure of the posterior that is put on its last layer."""

    name: str
    model: nn.Module
    batches: Batches
    structure: str
    repeats: int
    subset: str = "last_layer"
    curvature: str = "ggn"

    def fit(self, ceiling: float, peer: float | str) -> Result:
        """A fit against one forward pass over the data."""
        inputs = [x for x, _ in self.batches]
        n = sum(map(len, inputs))
        return self._over_forward(f"fit {n}", inputs, lambda: self.fitted, ceiling, peer)

    def predict(self, n: int, ceiling: float, peer: float | str) -> Result:
        """Probit predictions in one call against the forward pass of the same inputs."""
        x, la = inputs_of(self.batches, n), self.fitted()
        return self._over_forward(f"predict {n}", [x], lambda: lambda: la(x), ceiling, peer)

    def tune(self, ceiling: float, peer: float | str) -> Result:
        """The first tuning by evidence after a fit, in seconds."""

        def prepare() -> Callable[[], object]:
            la = self.fitted()
            return lambda: la.optimize_prior_precision(method="marglik")

        seconds = best_seconds({"tune": prepare}, self.repeats)
        return Result(self.name, "tune by evidence", seconds["tune"], "s", ceiling, peer, seconds)

    def fitted(self) -> Laplace:
        """A fitted posterior; kron is factorised as well, since there it belongs to the cost of fitting."""
        la = Laplace(self.model, "classification", self.subset, self.structure, curvature=self.curvature)
        la.fit(self.batches)
        if self.structure == "kron":
            la.log_marginal_likelihood()
        return la

    def _over_forward(
        self, what: str, inputs: Sequence[Tensor], work: Work, ceiling: float, peer: float | str
    ) -> Result:
        seconds = best_seconds({"forward": lambda: lambda: forward(self.model, inputs), "laplace": work}, self.repeats)
        ratio = seconds["laplace"] / seconds["forward"]
        return Result(self.name, what, ratio, "x forward", ceiling, peer, seconds)


def fit_tune_predict() -> None:
    """Everything once with a thousand classes, for its peak memory."""
    use_one_thread()
    problem = thousand_classes(repeats=1)
    la = problem.fitted()
    la.optimize_prior_precision(method="marglik")
    la(problem.batches[0][0][:64])


def ten_classes(structure: str, repeats: int) -> Problem:
    """LeNet on 4,000 images."""
    batches = random_batches((1, 28, 28), 10, 4000, 128)
    return Problem(f"LeNet, 10 classes, {structure}", networks.lenet(), batches, structure, repeats)


def thousand_classes(repeats: int, structure: str = "kron", curvature: str = "ggn") -> Problem:
    """512-512-1000 on 2,000 inputs."""
    name, batches = f"MLP, 1000 classes, {structure}", random_batches((512,), 1000, 2000, 100)
    return Problem(name, networks.mlp(), batches, structure, repeats, curvature=curvature)


def wide_network(repeats: int, structure: str) -> Problem:
    """64-128-128-1000 with all weights uncertain."""
    model, batches = networks.wide_mlp(1000), random_batches((64,), 1000, 200, 100)
    return Problem(f"MLP, 1000 classes, all weights, {structure}", model, batches, structure, repeats, "all", "ef")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="turns that compared things take, at least (default 5)")
    parser.add_argument("--out", type=Path, help=f"where to write the results (default {RESULTS.name} in results/)")
    parser.add_argument("--case", action="append", choices=CASES, help="measure this case only; may be repeated")
    return parser.parse_args()


if __name__ == "__main__":
    main()
