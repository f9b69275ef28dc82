"""What a served prediction costs on top of its network, at batch size 1: `la.module()` against the bare network.

    python benchmarks/serving.py [--case small_cnn] [--out FILE]

Both run in the same way: eagerly, compiled by torch.compile, or in ONNX Runtime.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import machine
import networks
from laplace import Laplace
from measure import best_seconds, use_one_thread, warmed
from report import Result, save, table

RESULTS = Path(__file__).parent / "results" / "serving.json"
CEILING = 1.2
SHORT = (
    20  # calls in a turn: some 3 ms, so that in the best turn no other process took the core, and emptied its caches
)
NONE = "has no module"
MEAN, ALL = ("mean", "variance"), ("mean", "variance", "epistemic")

NOTES = """\
x network   CPU seconds of one prediction over those of the bare network, one input, one thread, no_grad; both run in
            the same way and take turns, and the best of {repeats} or more turns counts. Last layer, kron. Returned
            are the mean and the variances, with 'epistemic' also the epistemic part from 100 draws.
single      wall-clock time of single calls, in turns of 20: the first of their deciles. On a busy machine even the best
            turn of 200 calls holds some before which another process had the core and emptied its caches.
la(x)       the prediction of the Laplace object itself, with all its checks."""


def main() -> None:
    """Measure, print the table and write it to a file; a single case only where `--out` says."""
    options = _options()
    use_one_thread()
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with torch.no_grad():
        results = [result for case in options.case or CASES for result in CASES[case](options.repeats)]
    here = machine.describe()
    print(f"{here}\n\n{table(results)}\n\n{NOTES.format(repeats=options.repeats)}")
    out = options.out or (None if options.case else RESULTS)
    if out is not None:
        save(out, results, here)
        print(f"\nWritten to {out}")


def small_cnn(repeats: int) -> list[Result]:
    """LeNet, 12 modules: 0.2 ms a run."""
    model, x = networks.lenet(), torch.randn(64, 1, 28, 28)
    la = Laplace(model, "classification").fit([(x, torch.randint(10, (64,)))])
    return [
        *_eagerly("small CNN (LeNet)", la, x[:1], repeats, 200),
        *_compiled("small CNN (LeNet)", la, x[:1], repeats),
        *_in_onnx("small CNN (LeNet)", la, x[:4], repeats),
    ]


def single_calls(repeats: int) -> list[Result]:
    """LeNet, each call by itself on the clock: what the quietest tenth of calls took, whoever else uses the core."""
    model, x = networks.lenet(), torch.randn(64, 1, 28, 28)
    la = Laplace(model, "classification").fit([(x, torch.randint(10, (64,)))])
    made = {"probit": la.module("probit", MEAN), "one_vs_rest": la.module("one_vs_rest", MEAN)}
    runs = {"network": _call(model, x[:1])} | {what: _call(module, x[:1]) for what, module in made.items()}
    runs |= {"la(x)": lambda: la(x[:1]), "la.predict(x)": lambda: la.predict(x[:1])}
    taken: dict[str, list[int]] = {what: [] for what in runs}
    for _ in range(4 * repeats):
        for what, run in runs.items():
            for _ in range(4):  # warm
                run()
            for _ in range(20):
                start = time.perf_counter_ns()
                run()
                taken[what].append(time.perf_counter_ns() - start)
    seconds = {what: 1e-9 * statistics.quantiles(each, n=10)[0] for what, each in taken.items()}
    network = seconds.pop("network")
    return [
        Result(
            "small CNN (LeNet)",
            f"single calls: {what}",
            value / network,
            "x network",
            CEILING,
            NONE,
            {"network": network, what: value},
        )
        for what, value in seconds.items()
    ]


def resnet(repeats: int) -> list[Result]:
    """A ResNet of 155 modules."""
    model, x = networks.deep_resnet(), torch.randn(16, 3, 32, 32)
    assert sum(1 for _ in model.modules()) == 155
    la = Laplace(model, "classification").fit([(x, torch.randint(10, (16,)))])
    return [
        *_eagerly("ResNet, 155 modules", la, x[:1], repeats, 10),
        *_in_onnx("ResNet, 155 modules", la, x[:4], repeats),
    ]


def transformer(repeats: int) -> list[Result]:
    """A DistilBERT by its configuration alone, 67 M weights, on 32 tokens."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    model = DistilBertForSequenceClassification(DistilBertConfig(num_labels=4)).eval()
    batch = {"input_ids": torch.randint(1000, (8, 32)), "attention_mask": torch.ones(8, 32, dtype=torch.long)}
    la = Laplace(model, "classification").fit([{**batch, "labels": torch.randint(4, (8,))}])
    one = {key: value[:1] for key, value in batch.items()}
    return _eagerly("DistilBERT, 32 tokens", la, one, repeats, 3)


CASES: Mapping[str, Callable[[int], list[Result]]] = {
    "small_cnn": small_cnn,
    "single_calls": single_calls,
    "resnet": resnet,
    "transformer": transformer,
}


def _eagerly(name: str, la: Laplace, x: Any, repeats: int, calls: int) -> list[Result]:
    """Run the module as it is, and `la(x)` beside it."""
    made = {
        "probit": la.module("probit", MEAN),
        "probit, epistemic": la.module("probit", ALL),
        "one_vs_rest": la.module("one_vs_rest", MEAN),
        "mc": la.module("mc", MEAN),
    }
    runs = {what: _call(module, x) for what, module in made.items()} | {"la(x)": lambda: la(x)}
    return _ratios(name, "eager", _call(la.model, x), runs, repeats, calls)


def _compiled(name: str, la: Laplace, x: Tensor, repeats: int) -> list[Result]:
    runs = {what: _call(torch.compile(la.module(what, MEAN), fullgraph=True), x) for what in ("probit", "one_vs_rest")}
    return _ratios(name, "torch.compile", _call(torch.compile(la.model), x), runs, repeats, 100)


def _in_onnx(name: str, la: Laplace, x: Tensor, repeats: int) -> list[Result]:
    runs = {what: _session(la.module(what, MEAN), x) for what in ("probit", "one_vs_rest")}
    return _ratios(name, "ONNX Runtime", _session(la.model, x), runs, repeats, 100)


def _ratios(
    name: str,
    way: str,
    bare: Callable[[], object],
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    calls: int,
) -> list[Result]:
    works = {"network": warmed(_often(bare, calls))} | {what: warmed(_often(run, calls)) for what, run in runs.items()}
    seconds = {what: value / calls for what, value in best_seconds(works, repeats, at_least=5.0).items()}
    network = seconds.pop("network")
    return [
        Result(name, f"{way}: {what}", value / network, "x network", CEILING, NONE, {"network": network, what: value})
        for what, value in seconds.items()
    ]


def _often(run: Callable[[], object], calls: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(calls):
            run()

    return work


def _call(module: nn.Module, x: Any) -> Callable[[], object]:
    return (lambda: module(**x)) if isinstance(x, dict) else (lambda: module(x))


def _session(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """Run a module in ONNX Runtime on one thread, at one input."""
    import onnxruntime

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        shapes = ({0: torch.export.Dim("n")},)
        program = torch.onnx.export(module, (x,), dynamic_shapes=shapes, dynamo=True, verbose=False)
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
    given = {session.get_inputs()[0].name: x[:1].numpy()}
    return lambda: session.run(None, given)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", action="append", choices=CASES, help="may be given several times; all if left out")
    parser.add_argument("--repeats", type=int, default=15, help="turns, at least")
    parser.add_argument("--out", type=Path, help="where the results are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
