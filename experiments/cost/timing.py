"""What is measured: CPU seconds of calls that alternate, bytes of tensors, and predictions of sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

REPEATS = 3
BATCH = 500  # of predictions


@dataclass(frozen=True)
class Priced:
    """A source of predictions with what it takes.

    Attributes:
        source: A `Laplace` or a rival.
        training: Training time, fit and tuning included, over that of the network alone.
        nbytes: Bytes of what is kept, the network included.
        link: How Gaussians become probabilities; the default of `predict` if None.
    """

    source: Any
    training: float
    nbytes: int
    link: str | None = None


def priced(sources: Mapping[str, Priced], network: nn.Module, x: Tensor, repeats: int = REPEATS) -> dict[str, dict]:
    """Return training, probabilities, whole predictions (over those of the network alone) and megabytes."""
    parts = x.split(BATCH)

    def plain() -> None:
        with torch.no_grad():
            for part in parts:
                network(part).softmax(-1)

    def mean(one: Priced) -> Callable[[], None]:
        link = one.link or one.source.likelihood.default_link
        return lambda: [one.source(part, link_approx=link) for part in parts] and None

    def whole(one: Priced) -> Callable[[], None]:
        return lambda: [one.source.predict(part, link_approx=one.link).epistemic for part in parts] and None

    calls = {"": plain} | {f"mean {name}": mean(one) for name, one in sources.items()}
    spent = seconds(calls | {f"whole {name}": whole(one) for name, one in sources.items()}, repeats)
    return {
        name: {
            "training": round(one.training, 4),
            "mean": round(spent[f"mean {name}"] / spent[""], 3),
            "predict": round(spent[f"whole {name}"] / spent[""], 3),
            "mb": round(one.nbytes / 1e6, 3),
        }
        for name, one in sources.items()
    }


def nbytes(tree: object) -> int:
    """Return the bytes of all tensors in nested containers."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def seconds(calls: Mapping[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
    """Return the CPU seconds of each call, the least of a few rounds in which they alternate."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.process_time()
            call()
            found[name].append(time.process_time() - start)
    return {name: min(each) for name, each in found.items()}
