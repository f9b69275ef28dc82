"""Measure how a fit scales over processes: CPU seconds of the slowest rank, for the same data on 1 to 4 ranks.

    python benchmarks/many_processes.py --out benchmarks/results/many_processes.json

Processes share a machine with few cores, so wall clock would measure the machine. CPU seconds of the slowest rank are
what the fit would take if every rank had a core of its own, without the time on the wire.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

from laplace import Laplace
from laplace.distributed import ShardSampler
from networks import lenet, resnet20


def case(name: str) -> tuple[nn.Module, TensorDataset, int, dict[str, Any]]:
    """Return a network, its data, a batch size and the options of its posterior."""
    torch.manual_seed(0)
    if name == "resnet20 sketch":
        n, model = 4096, resnet20()
        options: dict[str, Any] = {"subset_of_weights": "all", "curvature": "sketch"}
        return model, TensorDataset(torch.randn(n, 3, 32, 32), torch.arange(n) % 10), 64, options
    if name == "last layer":
        n = 20_000
        return lenet(), TensorDataset(torch.randn(n, 1, 28, 28), torch.arange(n) % 10), 128, {}
    n = 512  # wide factors: most of the time goes into eigendecompositions
    model = nn.Sequential(nn.Linear(1500, 1200), nn.ReLU(), nn.Linear(1200, 1200), nn.ReLU(), nn.Linear(1200, 10))
    data = TensorDataset(torch.randn(n, 1500), torch.arange(n) % 10)
    return model, data, 64, {"subset_of_weights": "all", "curvature": "sketch"}


CASES = ("resnet20 sketch", "last layer", "wide factors")


def rank_of(rank: int, size: int, name: str, folder: str, repeats: int, results: Any) -> None:
    """Fit on one rank, and put the CPU seconds of each repeat into a queue."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    model, data, batch, options = case(name)
    few = TensorDataset(*(t[:16] for t in data.tensors))
    Laplace(model, "classification", **options).fit(DataLoader(few, 8), group=None)  # what is imported at the first fit
    seconds = []
    for _ in range(repeats):
        loader = DataLoader(data, batch, sampler=ShardSampler(data))
        start = time.process_time()
        la = Laplace(model, "classification", **options).fit(loader, group=distributed.group.WORLD)
        la.posterior.fit.curvature  # noqa: B018  its eigendecompositions
        seconds.append(time.process_time() - start)
    results.put((rank, seconds))
    distributed.barrier()
    distributed.destroy_process_group()


def measured(name: str, size: int, repeats: int) -> list[list[float]]:
    """Return the CPU seconds of each rank and repeat."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (size, name, folder, repeats, results)
        processes = [context.Process(target=rank_of, args=(rank, *args)) for rank in range(size)]
        for process in processes:
            process.start()
        found = dict(results.get() for _ in processes)
        for process in processes:
            process.join()
    return [found[rank] for rank in range(size)]


def main() -> None:
    """Measure all cases, and print the slowest rank's seconds and their ratio to one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out is not None and args.out.exists() else []
    for name in args.cases:
        for size in args.ranks:
            seconds = measured(name, size, args.repeats)
            slowest = max(min(of_rank) for of_rank in seconds)
            one = next((row["seconds"] for row in rows if row["case"] == name and row["ranks"] == 1), None)
            rows = [row for row in rows if (row["case"], row["ranks"]) != (name, size)]
            rows.append({"case": name, "ranks": size, "seconds": slowest, "of each rank": seconds})
            ratio = "" if one is None else f"  {slowest / one:.2f} x"
            print(f"{name:<18}{size:>3} ranks  {slowest:7.2f} CPU s{ratio}", flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
