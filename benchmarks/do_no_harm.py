"""Does the posterior make the network worse? Real tasks, every way of tuning, every link, beside the network itself.

    python benchmarks/do_no_harm.py --data DIR [--cache DIR] [--tasks mnist clinc150 ...] [--seeds K] [--quick]

DIR holds mnist.npz, fashion_mnist.npz, kmnist.npz, notmnist.npz (x_train, y_train, x_test, y_test), cifar10_webp.npz,
cifar100_test_webp.npz, svhn_test10k_webp.npz (lossless mosaics), text/{clinc150,trec6,sst2,banking77}.json.gz,
uci/<set>.npz and models/cifar10_resnet{20,32}.safetensors. Trained networks and features are kept in the cache; rows
that the results file has already are not computed again, unless --redo names their method. A run that writes to
benchmarks/results/do_no_harm.json also fills the tables of docs/do-no-harm.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch

import machine
from harm import figure, methods, promises, report
from harm.data import Folder
from harm.methods import Sizes, Tuning
from harm.tasks import TASKS, Task

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "do_no_harm.json"
PAGE = HERE.parent / "docs" / "do-no-harm.md"
FIGURE = PAGE.parent / "figures" / "do_no_harm.png"
QUICK = ("digits", "boston", "yacht")


class Rows:
    """Scores under 'task/seed/method', written as they are found."""

    def __init__(self, path: Path, redo: list[str], tasks: Sequence[str]) -> None:
        self.path, self.found, self.start = path, dict[str, dict](), time.process_time()
        self.seconds = 0.0
        if path.exists():
            before = json.loads(path.read_text())
            self.seconds = before["seconds"]
            again = {(task, method) for task in tasks for method in redo}
            self.found = {
                name: row
                for name, row in before["rows"].items()
                if (name.split("/")[0], name.split("/ ")[-1].split()[0]) not in again
            }

    def add(self, name: str, row: dict) -> None:
        self.found[name] = {key: _rounded(value) for key, value in row.items()}
        print(f"{name:50s} nll {row['nll']:.4f}", flush=True)
        self._write()

    def _write(self) -> None:
        kept = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "machine": asdict(machine.describe()),
            "seconds": round(self.seconds + time.process_time() - self.start, 1),
            "rows": self.found,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(kept, indent=1) + "\n")


def _rounded(value: object) -> object:
    """Keep six digits: more are noise, and make the file long."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def run(
    task: Task, seed: int, folder: Folder, cache: Path, rows: Rows, sizes: Sizes, tunings: tuple[Tuning, ...]
) -> None:
    """Compute the rows of one trained network that are not there yet."""
    start = f"{task.name}/{seed}/"
    prepared = task.prepare(folder, cache, seed)
    if f"{start}last / network" not in rows.found:
        for name, row in methods.network_rows(prepared, task.regression, sizes):
            rows.add(start + name, row)
    for weights in methods.weights_of(prepared):
        absent = lambda name: start + name not in rows.found  # noqa: E731
        for name, row in methods.posterior_rows(prepared, weights, task.regression, sizes, absent, seed, tunings):
            rows.add(start + name, row)


def main() -> None:
    known = [tuning.name for tuning in methods.TUNINGS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of data")
    parser.add_argument("--cache", type=Path, default=HERE / "cache", help="for trained networks and features")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=None)
    parser.add_argument("--seeds", type=int, default=5, help="at most so many of each task")
    parser.add_argument("--quick", action="store_true", help=f"one seed of {', '.join(QUICK)}; few test examples")
    parser.add_argument("--methods", nargs="+", choices=known, default=known, help="ways of tuning; loo is the slowest")
    parser.add_argument("--redo", nargs="+", choices=known, default=[], help="methods whose rows are computed again")
    parser.add_argument("--out", type=Path, default=None, help="another results file, the figure beside it")
    parser.add_argument("--report", action="store_true", help="only tables and figure of the rows that are there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.cache.mkdir(parents=True, exist_ok=True)
    out = args.out or (RESULTS.with_stem("do_no_harm_quick") if args.quick else RESULTS)
    names = args.tasks or (QUICK if args.quick else list(TASKS))
    rows, sizes = Rows(out, args.redo, names), Sizes(500, 200, 200, 100) if args.quick else Sizes()
    tunings = tuple(tuning for tuning in methods.TUNINGS if tuning.name in args.methods)
    for tuning in tunings:
        if why := methods.missing(tuning):
            print(f"{tuning.name} is left out: {why} in this version.")
    for seed in range(0 if args.report else 1 if args.quick else args.seeds):
        for task in (TASKS[name] for name in names if seed < TASKS[name].seeds):
            run(task, seed, Folder(args.data), args.cache, rows, sizes, tunings)
    table = report.Table(rows.found)
    print(f"\n{table.terminal()}\n\n{promises.halves(table)}\n\n{promises.acceptance(table)}")
    if out == RESULTS:
        promises.fill(PAGE, table)
    drawn = FIGURE if out == RESULTS else out.with_suffix(".png")
    figure.draw(table, drawn)
    print(f"\nWritten to {out} and {drawn}")


if __name__ == "__main__":
    main()
