"""What a prediction of the Gaussian process on 256 training points costs, in forward passes of its inputs.

Two classifiers of ten classes with all weights: LeNet and 784-100-100-10. Fit, first and later predictions of 16
inputs are timed apart, in CPU seconds on one thread. The data are noise: the cost does not depend on them.

    python benchmarks/gp_predictions.py [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import machine
from laplace import Laplace
from measure import best_seconds, use_one_thread, warmed

POINTS, TESTED, CLASSES = 256, 16, 10


def main() -> None:
    """Measure both networks, print a row for each way of predicting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="print the dearest functions of later calls instead")
    options = parser.parse_args()
    use_one_thread()
    print(machine.describe(), flush=True)
    for name, make in {"784-100-100-10": mlp, "LeNet": lenet}.items():
        for independent in (False, True):
            measure(f"{name}{', independent outputs' if independent else ''}", make, independent, options.profile)


def mlp() -> nn.Module:
    """89,610 weights."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, CLASSES)
    )


def lenet() -> nn.Module:
    """61,706 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES),
    )  # fmt: skip


def measure(name: str, make: type[nn.Module] | object, independent: bool, profiled: bool) -> None:
    """Fit, predict, and print the CPU seconds relative to the network's own forward pass of the same inputs."""
    torch.manual_seed(0)
    model = make().eval()  # type: ignore[operator]
    x, y, x_test = torch.randn(POINTS, 1, 28, 28), torch.randint(CLASSES, (POINTS,)), torch.randn(TESTED, 1, 28, 28)
    loader = DataLoader(TensorDataset(x, y), batch_size=64)
    la = Laplace(model, "classification", "all", "gp", n_subset=POINTS, independent_outputs=independent)
    start = time.process_time()
    la.fit(loader)
    fitted = time.process_time() - start
    start = time.process_time()
    la(x_test)
    first = time.process_time() - start
    if profiled:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(10):
            la(x_test)
        profile.disable()
        print(f"\n{name}")
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)
        return

    def forward() -> None:
        with torch.no_grad():
            model(x_test)

    later = best_seconds({"forward": warmed(forward), "later": warmed(lambda: la(x_test))}, 5, at_least=1.5)
    unit = later["forward"]
    print(
        f"{name}: forward {1e6 * unit:.0f} us; fit {fitted:.2f} s, first call {first / unit:,.0f} x ({first:.3f} s), "
        f"later calls {later['later'] / unit:,.0f} x ({1e3 * later['later']:.1f} ms)",
        flush=True,
    )


if __name__ == "__main__":
    main()
