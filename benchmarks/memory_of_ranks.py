"""Measure how much memory a rank takes: with factors that stay on their rank, and with a network that is sharded.

    python benchmarks/memory_of_ranks.py --out benchmarks/results/memory_of_ranks.json

All cases take some minutes. With --cases and --ranks, only those rows of the file are measured again.

Each rank is a process of its own. What counts is by how much its memory grows at the most, from just before the
`Laplace` object is made to the end of the work: fit, evidence, and the variances of 8 inputs. That is the peak
(`resource.getrusage`, ru_maxrss), which Linux sets back to the present memory before. So neither torch itself nor the
data is in it. Of networks, what the rank holds of them anyway is said beside it: all, or its pieces.

glibc keeps freed blocks of less than 32 MB for later, so that the peak of small matrices depends on the order in which
they came and went. Larger ones go back to the system at once. The factors of this benchmark are small, and
MALLOC_MMAP_THRESHOLD_ has them treated as large ones are.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.distributed import ShardSampler, together

WIDTH, NARROW, DEPTH, N = 1400, 16, 12, 64  # of the network with large factors: pairs of layers, as adapters have them
WIDE, LAYERS = 2048, 16  # of the sharded network


class Adapted(nn.Module):
    """A frozen layer with an adapter of rank 4 beside it."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.base = nn.Linear(side, side).requires_grad_(False)
        self.down, self.up = nn.Linear(side, 4, bias=False), nn.Linear(4, side, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def factors(shard: bool) -> tuple[Any, int]:
    """Fit a network whose factors are much larger than itself. Return the work to measure, and 0.

    Each pair of layers has an A and a B of WIDTH^2 numbers, and as many eigenvectors.
    """
    pairs = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, NARROW, bias=False), nn.Tanh(),
                                                       nn.Linear(NARROW, WIDTH, bias=False))]  # fmt: skip
    model = nn.Sequential(*pairs, nn.Linear(WIDTH, 3))
    data = TensorDataset(torch.randn(N, WIDTH), torch.arange(N) % 3)
    group = distributed.group.WORLD

    def work() -> None:
        la = Laplace(model, "classification", "all", curvature="sketch")
        la.fit(DataLoader(data, 16, sampler=ShardSampler(data)), group=group, shard_factors=shard)
        la.tune(method="evidence", group=group)
        la.predict(data.tensors[0][:8], group=group if shard else None, diagonal_output=True)

    return work, 0


def network(subset: str, shard: bool, factors: bool = False) -> tuple[Any, int]:
    """Fit a large network's last layer, adapters or all weights. Return the work, and the bytes that the rank holds."""
    make = Adapted if subset == "adapters" else lambda side: nn.Linear(side, side)
    model = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (make(WIDE), nn.Tanh())], nn.Linear(WIDE, 3))
    if subset == "adapters":
        model[-1].requires_grad_(False)
    if shard:
        for layer in model:
            if not isinstance(layer, nn.Tanh):
                fully_shard(layer)
        fully_shard(model)
    data, group = TensorDataset(torch.randn(N, WIDE), torch.arange(N) % 3), distributed.group.WORLD

    def work() -> None:
        la = Laplace(model, "classification", "last_layer" if subset == "last layer" else "all", "diag")
        la.fit(DataLoader(data, 16, sampler=ShardSampler(data)), group=group, shard_factors=factors)
        with together(group):
            la.log_marginal_likelihood()
            la.predict(data.tensors[0][:8], diagonal_output=True)

    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return work, sum(p.numel() * p.element_size() for p in local)


CASES: dict[str, Any] = {
    "kron, whole on every rank": lambda: factors(False),
    "kron, shard_factors=True": lambda: factors(True),
    "plain network, last layer": lambda: network("last layer", False),
    "fully_shard, last layer": lambda: network("last layer", True),
    "plain network, adapters": lambda: network("adapters", False),
    "fully_shard, adapters": lambda: network("adapters", True),
    "plain network, all weights, diag": lambda: network("all", False),
    "fully_shard, all weights, diag": lambda: network("all", True),
    "fully_shard, all weights, diag, shard_factors=True": lambda: network("all", True, True),
}


def peak() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def rank_of(rank: int, size: int, name: str, folder: str, results: Any) -> None:
    """Do the work of one rank, and put the growth of its peak into a queue."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    torch.manual_seed(0)
    few = TensorDataset(torch.randn(16, 8), torch.arange(16) % 3)
    small = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    Laplace(small, "classification", "all").fit(DataLoader(few, 8), group=None).predict(few.tensors[0])  # imports
    work, held = CASES[name]()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present memory
    before = peak()
    work()
    results.put((rank, peak() - before, held))
    distributed.barrier()
    distributed.destroy_process_group()


os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))  # read by the processes that are started


def measured(name: str, size: int) -> tuple[list[int], int]:
    """Return the growth of each rank's peak, and the bytes of the network that a rank holds."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (size, name, folder, results)
        processes = [context.Process(target=rank_of, args=(rank, *args)) for rank in range(size)]
        for process in processes:
            process.start()
        found = {rank: (grown, held) for rank, grown, held in (results.get() for _ in processes)}
        for process in processes:
            process.join()
    return [found[rank][0] for rank in range(size)], found[0][1]


def main() -> None:
    """Measure all cases, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.cases:
        for size in args.ranks:
            if size == 1 and ("shard" in name):
                continue
            grown, held = measured(name, size)
            rows.append({"case": name, "ranks": size, "grown": grown, "network": held})
            listed = ", ".join(f"{each / 1e6:.0f}" for each in grown)
            beside = f" beside {held / 1e6:.0f} MB of the network" if held else ""
            print(f"{name:<52}{size:>3} ranks  {listed} MB{beside}", flush=True)
            if args.out is not None:
                before = json.loads(args.out.read_text()) if args.out.exists() else []
                new = {(row["case"], row["ranks"]): row for row in [*before, *rows]}
                order = sorted(new, key=lambda key: ([*CASES].index(key[0]), key[1]))
                args.out.write_text(json.dumps([new[key] for key in order], indent=1) + "\n")


if __name__ == "__main__":
    main()
