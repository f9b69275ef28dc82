"""Generated cases: networks, data, batches and options, all of which follow from a few values that hypothesis draws.

Every run has a seed of its own, which is printed; pytest shows it where a test fails, and always with `-rP`. The same
cases come again with

    GENERATED_SEED=<seed> python -m pytest tests/test_generated.py tests/test_mistakes.py

and a single failing one with the `@reproduce_failure` line that hypothesis prints.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import networks
import zoo
from laplace import Laplace
from laplace.errors import LaplaceWarning

SEED = int(os.environ.get("GENERATED_SEED", random.SystemRandom().randrange(2**32)))
DRAWS = 1  # seed of what curvature draws
TASKS = {"classification": (2, 4), "regression": (1, 3), "binary": (1, 1), "multilabel": (1, 3), "poisson": (1, 2)}


class Tokens(nn.Module):
    """Embedded tokens, normalised, and a scale without a layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, outputs)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.scale * self.norm(self.table(x.long() % 5)).mean(1)))


class Images(nn.Module):
    """A convolution on 4 x 4 images."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.avg_pool2d(self.conv(x.reshape(-1, 1, 4, 4)).tanh(), 2).flatten(1))


def _tiny(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))


def _linear(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, outputs))


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Tensor]]] = {
    "tiny": (_tiny, lambda n: torch.randn(n, 2)),
    "linear": (_linear, lambda n: torch.randn(n, 3)),
    "tokens": (Tokens, lambda n: torch.randint(5, (n, 3)).float()),
    "images": (Images, lambda n: torch.randn(n, 16)),
    "batchnorm": (networks.Residual, lambda n: torch.randn(n, 4)),
    "mapping": (networks.Wrapped, lambda n: torch.randn(n, 4)),
    "tied": zoo.ZOO["tied"],
    "functional": zoo.ZOO["functional"],
    "norms": zoo.ZOO["residual"],
    "recurrent": zoo.ZOO["recurrent"],
}
SMALL = ["tiny", "linear", "tokens", "images", "batchnorm", "mapping"]


@dataclass
class Case:
    """A network, its data in two orders of batches, and options; all of it follows from these few values."""

    network: str
    task: str
    outputs: int
    n: int
    cuts: tuple[list[int], list[int]]
    dtype: torch.dtype
    weighted: bool
    subset: str
    structure: str
    curvature: str
    options: dict[str, Any]
    prior: tuple[str, float]
    seed: int

    def make(self) -> tuple[nn.Module, Tensor, Tensor, Tensor | None]:
        """The network in eval mode, inputs, labels and weights."""
        torch.manual_seed(self.seed)
        build, data = NETWORKS[self.network]
        model, x = build(self.outputs), data(self.n)
        if any(isinstance(m, nn.BatchNorm1d) for m in model.modules()):
            model.train()
            model(data(8))
        y: Tensor = torch.randn(self.n, self.outputs)
        if self.task == "classification":
            y = torch.randint(self.outputs, (self.n,))
        elif self.task in ("binary", "multilabel"):
            y = torch.randint(2, (self.n, self.outputs)).float()
        elif self.task == "poisson":
            y = torch.randint(4, (self.n, self.outputs)).float()
        weights = 2 * torch.rand(self.n) + 0.1 if self.weighted else None
        y = y if self.task == "classification" else y.to(self.dtype)
        return model.eval().to(self.dtype), x.to(self.dtype), y, weights

    def given(self) -> dict[str, Any]:
        """What `Laplace` is told."""
        names = {"subset_of_weights": self.subset, "hessian_structure": self.structure}
        return names | {"curvature": self.curvature} | self.options


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    """Cases that are right, but for combinations that do not exist."""
    task = draw(st.sampled_from(["classification", "regression", *TASKS]))
    least, most = TASKS[task]
    n = draw(st.integers(1, 9))
    structure = draw(st.sampled_from(["full", "kron", "diag", "block", "lowrank", "ekfac", "inf", "gp"]))
    options: dict[str, Any] = {}
    if structure in ("kron", "ekfac", "inf") and draw(st.booleans()):
        options["weight_sharing"] = draw(st.sampled_from(["expand", "reduce"]))
    if structure == "kron":
        options["damping"] = draw(st.sampled_from([False, False, True, "balanced"]))
    if structure in ("lowrank", "inf") and draw(st.booleans()):
        options["rank"] = draw(st.integers(1, 5))
    if task == "regression":
        options["sigma_noise"] = draw(st.floats(0.1, 5.0))
    options["temperature"] = draw(st.floats(0.1, 10.0))
    options["prior_mean"] = draw(st.sampled_from([0.0, 0.0, 0.3]))
    parts = st.lists(st.integers(1, n), min_size=1, max_size=4)
    return Case(
        network=draw(st.sampled_from([*SMALL, *SMALL, *NETWORKS])),
        task=task,
        outputs=draw(st.integers(least, most)),
        n=n,
        cuts=(draw(parts), draw(parts)),
        dtype=draw(st.sampled_from([torch.float64] * 4 + [torch.float32] * 3 + [torch.bfloat16])),
        weighted=draw(st.integers(0, 4)) == 0,
        subset=draw(st.sampled_from(["last_layer", "all"])),
        structure=structure,
        curvature=draw(st.sampled_from(["ggn", "ggn", "ggn", "ef", "mc", "sketch", "hessian"])),
        options=options,
        prior=(draw(st.sampled_from(["scalar", "layerwise", "diag"])), draw(st.floats(0.01, 100.0))),
        seed=draw(st.integers(0, 2**16)),
    )


def run(examples: int, strategy: st.SearchStrategy[Any], check: Callable[..., None]) -> None:
    """So many generated cases of one check."""
    print(f"GENERATED_SEED={SEED}")  # noqa: T201
    skipped = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    how = settings(max_examples=examples, deadline=None, database=None, print_blob=True, suppress_health_check=skipped)

    def quietly(case: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LaplaceWarning)
            check(case)

    seed(SEED)(how(given(strategy)(quietly)))()


def batches(x: Tensor, y: Tensor, weights: Tensor | None, sizes: list[int]) -> list[tuple[Tensor, ...]]:
    parts = networks.cut(x, y, sizes)
    if weights is None:
        return parts
    return [(*pair, w) for pair, (w, _) in zip(parts, networks.cut(weights, weights, sizes), strict=True)]


def fit(case: Case, sizes: list[int]) -> Laplace:
    """The case's posterior from one way of cutting its data."""
    model, x, y, weights = case.make()
    la = Laplace(model, case.task, **case.given())
    la.fit(batches(x, y, weights, sizes), generator=torch.Generator().manual_seed(DRAWS))
    kind, value = case.prior
    count = {"scalar": 1, "layerwise": la.n_layers, "diag": la.n_params}[kind]
    spread = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    la.prior_precision = value * (1 + spread)
    la.log_marginal_likelihood()
    return la
