"""LeNets: trained once, kept in the cache, with the CPU seconds that it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from benchmarks.harm.networks import Network, lenet, train
from experiments.uq.cache import Cache
from torch import Tensor, nn

DECAY = 5e-4  # L2 on all weights
BATCH = 128


@dataclass(frozen=True)
class Trained:
    """A network and the CPU seconds of its training."""

    network: nn.Module
    seconds: float


def lenet_with_dropout(p: float = 0.25) -> Network:
    """LeNet with dropout before its three linear layers."""
    plain = lenet()
    layers = list(plain.body)
    at = [i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
    for i in reversed(at):
        layers.insert(i, nn.Dropout(p))
    return Network(nn.Sequential(*layers, nn.Dropout(p)), plain.head)


def trained(
    cache: Cache, name: str, make: Callable[[], nn.Module], data: tuple[Tensor, Tensor], epochs: int, seed: int
) -> Trained:
    """Train a network by Adam with a cosine schedule, or read it."""
    torch.manual_seed(seed)
    network = make()

    def run() -> dict[str, Tensor]:
        start, steps = time.process_time(), epochs * len(data[0]) // BATCH
        train(network, *data, steps=steps, seed=seed, decay=DECAY, batch=BATCH)
        print(f"trained {name}: {time.process_time() - start:.0f} CPU seconds", flush=True)
        return {**network.state_dict(), "seconds": torch.tensor(time.process_time() - start)}

    kept = cache.get(name, run)
    seconds = float(kept.pop("seconds"))
    network.load_state_dict(kept)
    return Trained(network.eval(), seconds)
