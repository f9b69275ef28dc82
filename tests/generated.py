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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import networks
import oracle
import zoo
from laplace import Laplace
from laplace.errors import LaplaceWarning
from laplace.likelihoods import Ordinal

SEED = int(os.environ.get("GENERATED_SEED", random.SystemRandom().randrange(2**32)))
DRAWS = 1  # seed of what curvature draws
TASKS = {"classification": (2, 4), "regression": (1, 3), "binary": (1, 1), "multilabel": (1, 3), "poisson": (1, 2),
         "heteroscedastic": (2, 2), "ordinal": (1, 1)}  # fmt: skip

TABLE = torch.linspace(-1, 1, 6).reshape(3, 2)  # an input that all examples share


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


class Branch(nn.Module):
    """A layer for the examples that need it, which is not called where none does."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.inp, self.more, self.head = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inp(x))
        needed = x[:, 0] > 0
        if needed.any():
            h = h.clone()
            h[needed] = torch.tanh(self.more(h[needed]))
        return self.head(h)


class Shared(nn.Module):
    """Examples that look at one table, which is an input without a batch dimension."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.of_x, self.of_table, self.head = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, outputs)

    def forward(self, inputs: Any) -> Tensor:
        x, table = (inputs, TABLE.to(inputs)) if isinstance(inputs, Tensor) else (inputs["x"], inputs["table"])
        keys = torch.tanh(self.of_table(table))  # (3, 3)
        return self.head(torch.softmax(self.of_x(x) @ keys.T, -1) @ keys)


class Held(nn.Module):
    """A layer that is called through an object which is no module."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(2, 3), nn.Linear(3, outputs)
        self.parts = SimpleNamespace(inp=self.inp, heads=[self.head])

    def forward(self, x: Tensor) -> Tensor:
        return self.parts.heads[0](torch.tanh(self.parts.inp(x)))


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
    "branch": (Branch, lambda n: torch.randn(n, 2)),
    "shared": (Shared, lambda n: torch.randn(n, 2)),
    "held": (Held, lambda n: torch.randn(n, 2)),
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
    reused: bool = False  # whether the loader fills the same tensors again
    large: float = 1.0  # by what the last layer is multiplied

    @property
    def likelihood(self) -> Any:
        """What `Laplace` is told of the task."""
        return Ordinal(oracle.CUTS) if self.task == "ordinal" else self.task

    def pack(self, x: Tensor) -> Any:
        """What the network is called with."""
        return {"x": x, "table": TABLE.to(x)} if self.network == "shared" else x

    def make(self) -> tuple[nn.Module, Tensor, Tensor, Tensor | None]:
        """The network in eval mode, inputs, labels and weights."""
        torch.manual_seed(self.seed)
        build, data = NETWORKS[self.network]
        model, x = build(self.outputs), data(self.n)
        if any(isinstance(m, nn.BatchNorm1d) for m in model.modules()):
            model.train()
            model(data(8))
        with torch.no_grad():
            for p in [*model.parameters()][-2:]:
                p.mul_(self.large)
        y: Tensor = torch.randn(self.n, 1 if self.task == "heteroscedastic" else self.outputs)
        if self.task == "classification":
            y = torch.randint(self.outputs, (self.n,))
        elif self.task in ("binary", "multilabel"):
            y = torch.randint(2, (self.n, self.outputs)).float()
        elif self.task == "ordinal":
            y = torch.randint(len(oracle.CUTS) + 1, (self.n,))
        elif self.task == "poisson":
            y = torch.randint(4, (self.n, self.outputs)).float()
        weights = 2 * torch.rand(self.n) + 0.1 if self.weighted else None
        y = y if self.task in ("classification", "ordinal") else y.to(self.dtype)
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
    wide = task not in ("poisson", "heteroscedastic")  # of which a wide prior has no finite mean
    precisions = (
        st.sampled_from([1e-8, 1e-6, 1e-4]) if wide and draw(st.integers(0, 6)) == 0 else st.floats(0.01, 100.0)
    )
    parts = st.lists(st.integers(1, n), min_size=1, max_size=4)
    return Case(
        network=draw(st.sampled_from([*SMALL, *SMALL, *SMALL, *NETWORKS])),
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
        prior=(draw(st.sampled_from(["scalar", "layerwise", "diag"])), draw(precisions)),
        seed=draw(st.integers(0, 2**16)),
        reused=draw(st.integers(0, 19)) == 0,
        large=draw(st.sampled_from([1.0] * 19 + [8.0])),
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


class Reused:
    """A loader whose batches are views of the same tensors, filled again for each."""

    def __init__(self, parts: list[tuple[Any, ...]]) -> None:
        self.parts, most = parts, max(len(part[1]) for part in parts)
        self.buffers = [t.new_empty(most, *t.shape[1:]) if t is not TABLE else t for t in self._tensors(parts[0])]

    def _tensors(self, part: tuple[Any, ...]) -> list[Tensor]:
        return [part[0]["x"] if isinstance(part[0], dict) else part[0], *part[1:]]

    def __iter__(self) -> Iterator[Any]:
        for part in self.parts:
            filled = [buffer[: len(t)].copy_(t) for buffer, t in zip(self.buffers, self._tensors(part), strict=True)]
            yield ({**part[0], "x": filled[0]} if isinstance(part[0], dict) else filled[0], *filled[1:])


def fit(case: Case, sizes: list[int]) -> Laplace:
    """The case's posterior from one way of cutting its data."""
    model, x, y, weights = case.make()
    if case.network == "shared":  # one example alone does not show which inputs all examples share
        sizes = [max(2, size) for size in sizes]
    la = Laplace(model, case.likelihood, **case.given())
    parts = [(case.pack(x), *rest) for x, *rest in batches(x, y, weights, sizes)]
    la.fit(Reused(parts) if case.reused else parts, generator=torch.Generator().manual_seed(DRAWS))
    kind, value = case.prior
    count = {"scalar": 1, "layerwise": la.n_layers, "diag": la.n_params}[kind]
    spread = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    la.prior_precision = value * (1 + spread)
    la.log_marginal_likelihood()
    return la
