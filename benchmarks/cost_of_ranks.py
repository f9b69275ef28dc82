"""Model the time of a fit on 1 to 1,024 ranks: compute, one reduction of the sums, dealt-out eigendecompositions.

    python benchmarks/cost_of_ranks.py --measured benchmarks/results/many_processes.json

    T(k) = fixed + compute / k + reduction(k) + decompositions(k)

    reduction(k) = 2 (k - 1) / k * bytes / bandwidth + 2 (k - 1) * latency per bucket of 64 MB       (a ring)
    decompositions(k) = the load of the busiest rank, when matrices are dealt out by cost

First the model's form is fitted to what `many_processes.py` measured here with 1 to 4 processes (the constants fixed
and compute, by least squares), and its error is printed. Then it is evaluated for two large networks on an assumed
cluster; the assumptions are the constants below.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laplace.distributed.buckets import BUCKET
from laplace.linalg.symmetric import EIGH
from laplace.structures.dealing import dealt

FLOPS = 120e12  # of one accelerator in matrix products, as reached
EIGH_FLOPS = 1.5e12  # of one accelerator in eigendecompositions: they run far below its matrix products
BANDWIDTH = 20e9  # bytes per second between ranks
LATENCY = 20e-6  # seconds per step of the ring
FIXED = 10.0  # seconds: the plan and its audit, digests, the first batch
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Case:
    """A fit: its examples, the multiplications per example, and the sides of its factors."""

    name: str
    examples: int
    flops: float  # per example
    sides: tuple[int, ...]

    @property
    def bytes(self) -> float:
        """Return the size of the sums: float64 up to 1,024 columns, else float32."""
        return float(sum((8 if d <= 1024 else 4) * d * d for d in self.sides))

    def seconds(self, ranks: int) -> dict[str, float]:
        """Return the parts of the time on the busiest rank."""
        costs = [2 * EIGH * float(d) ** 3 / EIGH_FLOPS for d in self.sides]
        owners = dealt(costs, ranks)
        loads = [0.0] * ranks
        for cost, owner in zip(costs, owners, strict=True):
            loads[owner] += cost
        exchanged = 2 * self.bytes if ranks > 1 else 0.0  # the sums, and later the eigenvectors
        return {
            "compute": -(-self.examples // ranks) * self.flops / FLOPS,
            "reduction": ring(exchanged, ranks),
            "decompositions": max(loads),
            "fixed": FIXED,
        }


def ring(size: float, ranks: int) -> float:
    """Return the seconds of a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * size / BANDWIDTH + 2 * (ranks - 1) * LATENCY * -(-size // BUCKET)


def resnet50() -> Case:
    """All weights of a ResNet-50 on ImageNet, sketched: a forward and a backward pass, and the factors' products."""
    sides = [147, 64]
    for inner, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            before = (64 if inner == 64 else 2 * inner) if block == 0 else 4 * inner
            sides += [before, inner, 9 * inner, inner, inner, 4 * inner]
            sides += [before, 4 * inner] if block == 0 else []
    return Case("ResNet-50, kron, sketch, 1.28 M images", 1_281_167, 3 * 2 * 4.1e9 * 1.5, (*sides, 2048, 1000))


def lora() -> Case:
    """Adapters of rank 16 on the queries and values of a 7B language model, sketched, 512 tokens per example."""
    sides = (4096, 16, 16, 4096) * (2 * 32)
    return Case("7B, LoRA 16, kron, sketch, 50 k texts", 50_000, 512 * 7e9 * 2 * 2, sides)


def fitted(rows: list[dict[str, float]]) -> tuple[np.ndarray, list[float], float]:
    """Fit T(k) = fixed + compute / k. Return both, the relative errors, and that at the last k from the ks before."""
    ranks, seconds = np.array([row["ranks"] for row in rows]), np.array([row["seconds"] for row in rows])
    design = np.stack([np.ones(len(ranks)), 1 / ranks], 1)

    def solve(use: slice) -> np.ndarray:
        weights = 1 / seconds[use, None]  # relative errors count
        return np.linalg.lstsq(design[use] * weights, np.ones(len(seconds[use])), rcond=None)[0]

    found = solve(slice(None))
    errors = list(design @ found / seconds - 1)
    return found, errors, float(design[-1] @ solve(slice(0, -1)) / seconds[-1] - 1)


def main() -> None:
    """Print what the model makes of the measurements, and of the large networks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, default=Path("benchmarks/results/many_processes.json"))
    args = parser.parse_args()
    rows = json.loads(args.measured.read_text())
    for name in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == name]
        if len(own) < 4:
            continue
        (fixed, compute), errors, ahead = fitted(own)
        worst = max(map(abs, errors))
        print(f"{name}: T(k) = {fixed:.2f} + {compute:.2f} / k CPU s; error up to {worst:.0%}, "
              f"{ahead:+.0%} at {own[-1]['ranks']} ranks from those before")  # fmt: skip
    for case in (resnet50(), lora()):
        print(f"\n{case.name}: sums of {case.bytes / 1e9:.2f} GB, {len(case.sides)} factors up to {max(case.sides)}")
        print(f"{'ranks':>6}{'compute':>11}{'reduction':>11}{'eigh':>9}{'total, s':>10}{'efficiency':>12}")
        one = sum(case.seconds(1).values())
        for ranks in RANKS:
            parts = case.seconds(ranks)
            total = sum(parts.values())
            print(f"{ranks:>6}{parts['compute']:>11.1f}{parts['reduction']:>11.2f}{parts['decompositions']:>9.1f}"
                  f"{total:>10.1f}{one / total / ranks:>12.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
