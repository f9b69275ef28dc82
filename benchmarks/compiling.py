"""What torch.compile gains for a network's pass and for a way back through it, and what its first call costs.

With all weights, a prediction is one pass, and one way back for each output. CPU seconds on one thread; the first call
includes the compiler, which runs in processes of its own.

    python benchmarks/compiling.py
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import machine
import networks
from measure import best_seconds, use_one_thread

NETWORKS = {
    "MLP, 256 inputs": (networks.digits_mlp, (256, 784)),
    "LeNet, 256 inputs": (networks.lenet, (256, 1, 28, 28)),
    "ResNet-20, 64 inputs": (networks.resnet20, (64, 3, 32, 32)),
}


def main() -> None:
    """Measure, and print a row for each work."""
    use_one_thread()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # so that nothing was compiled before
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool that outlives a call: its seconds would not be counted
    torch.manual_seed(0)
    print(machine.describe(), flush=True)
    print(f"{'':44}{'eager':>10}{'compiled':>10}{'ratio':>7}{'first call':>12}")
    for name, (make, shape) in NETWORKS.items():
        network, x = make().requires_grad_(False), torch.randn(shape)
        with torch.no_grad():
            row(f"pass of {name}", network, x)
        row(f"pass and way back, {name}", network, x.requires_grad_())


def row(name: str, network: nn.Module, x: Tensor) -> None:
    """Time a network as it is and compiled, and print both."""
    torch._dynamo.reset()
    compiled = torch.compile(network)
    start = _spent()
    work(compiled, x)
    first = _spent() - start
    works: dict[str, Any] = {"eager": lambda: partial(work, network, x), "compiled": lambda: partial(work, compiled, x)}
    best = best_seconds(works, 30, at_least=3)
    eager, fast = best["eager"], best["compiled"]
    print(f"{name:44}{eager * 1e3:7.2f} ms{fast * 1e3:7.2f} ms{fast / eager:7.2f}{first:10.1f} s", flush=True)


def work(network: Any, x: Tensor) -> None:
    """Run a network, and send a vector back to its inputs if they require gradients."""
    out = network(x)
    if x.requires_grad:
        torch.autograd.grad(out, x, torch.ones_like(out))


def _spent() -> float:
    """Return the CPU seconds of this process and of those that it has waited for, as the compiler's."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


if __name__ == "__main__":
    main()
