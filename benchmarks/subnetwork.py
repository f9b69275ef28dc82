"""What a subnetwork costs: 200 weights of one layer of a ResNet-20, full structure.

Fits are measured in passes: a forward pass of the network and a backward pass that goes down to that layer's output and
no further, over the same batches, CPU seconds on one thread, both taking turns in one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

import machine
import networks
from data import random_batches
from laplace import Laplace
from laplace.utils import ModuleNameSubnetMask
from measure import best_seconds, use_one_thread, warmed

WEIGHTS, EXAMPLES, BATCH = 200, 512, 64
LAYERS = {"first": "0", "middle": "7.conv1", "late": "11.conv2"}


def main() -> None:
    """Measure and print a line for each layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="turns that compared things take, at least (default 5)")
    repeats = parser.parse_args().repeats
    use_one_thread()
    print(f"{machine.describe()}\n\nfit on {EXAMPLES} examples, {WEIGHTS} weights of one layer of a ResNet-20, full\n")
    print(f"{'layer':<10}{'passes':>10}{'sketch':>16}{'exact ggn':>16}")
    for layer in LAYERS.values():
        found = best_seconds(works(layer), repeats)
        ratios = [f"{found[kind]:.2f} s {found[kind] / found['passes']:.2f} x" for kind in ("sketch", "ggn")]
        print(f"{layer:<10}{found['passes']:>8.2f} s" + "".join(f"{ratio:>16}" for ratio in ratios), flush=True)


def works(layer: str) -> dict[str, Callable[[], Callable[[], object]]]:
    """The passes, and the fits that are compared with them."""
    torch.manual_seed(0)
    model = networks.resnet20()
    batches = random_batches((3, 32, 32), 10, EXAMPLES, BATCH)
    candidates = ModuleNameSubnetMask(model, [layer]).select()
    chosen = candidates[torch.randperm(len(candidates))[:WEIGHTS]].sort().values

    def passes() -> None:
        edges = []
        module = model.get_submodule(layer)
        model.requires_grad_(False)
        module.requires_grad_(True)
        handle = module.register_forward_hook(lambda m, args, out: edges.append(get_gradient_edge(out)))
        for x, y in batches:
            torch.autograd.grad(F.cross_entropy(model(x), y), [edges.pop()])
        handle.remove()
        model.requires_grad_(True)

    def fit(curvature: str) -> Callable[[], object]:
        options = {"curvature": curvature, "subnetwork_indices": chosen}
        return lambda: Laplace(model, "classification", "subnetwork", "full", **options).fit(batches)

    return {"passes": warmed(passes), "sketch": lambda: fit("sketch"), "ggn": lambda: fit("ggn")}


if __name__ == "__main__":
    main()
