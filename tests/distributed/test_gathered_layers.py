"""All weights of a network that `fully_shard` has sharded: each layer is gathered when it runs, and none stays."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.distributed import Ranks, ShardSampler, together
from peak import peak
from ranks import Pool

pytestmark = pytest.mark.slow  # the first DTensor of a process takes seconds
N = 23


class Attending(nn.Module):
    """Words, attention, a norm, a weight that no layer has, and an output layer tied to the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.randn(6))
        self.head = nn.Linear(6, 7)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0]) * self.scale
        return self.head(h.mean(1))


class Recurring(nn.Module):
    """Two recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.head = (
            nn.LSTM(4, 5, batch_first=True),
            nn.GRU(5, 3, batch_first=True),
            nn.Linear(3, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(x.unflatten(1, (2, 2)).repeat(1, 1, 2))[0])[0][:, -1])


class Remembering(nn.Module):
    """A block whose layers run again on the way back, and a weight that is read past its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.by_hand, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Any = checkpoint(self.inner, x, use_reentrant=False)
        return self.head(torch.tanh(F.linear(h, self.by_hand.weight, self.by_hand.bias)))


class Pictures(nn.Module):
    """Convolutions with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(27, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.unflatten(1, (1, 2, 2))))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attending,
    "recurrent": Recurring,
    "checkpoint": Remembering,
    "convolution": Pictures,
}


IN_ROOT = {"attention": ("words", "head"), "checkpoint": ("by_hand",)}  # tied weights, or read without a call


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]().double().eval()


def examples(kind: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    if kind == "attention":
        return TensorDataset(torch.randint(7, (N, 5), generator=generator), torch.arange(N) % 7)
    return TensorDataset(torch.randn(N, 4, generator=generator).double(), torch.arange(N) % 3)


def sharded(kind: str, units: str) -> nn.Module:
    model = made(kind)
    if units == "layers":
        for name, module in model.named_children():
            if name not in IN_ROOT.get(kind, ()):
                fully_shard(module)
    fully_shard(model)
    return model


def compared(kind: str, units: str, structure: str, curvature: str, factors: bool) -> dict[str, Any]:
    """How far the posterior of a sharded network is from that of the plain one."""
    data, world, rank = examples(kind), distributed.group.WORLD, distributed.get_rank()
    options: dict[str, Any] = {"hessian_structure": structure, "curvature": curvature}
    one = Laplace(made(kind), "classification", "all", **options).fit(DataLoader(data, 5), group=None)
    la = Laplace(sharded(kind, units), "classification", "all", **options)
    at = slice(0, N - 4) if rank == 0 else slice(N - 4, N)  # other numbers of batches
    la.fit([*DataLoader(TensorDataset(*data[at]), 4)], group=world, shard_factors=factors)
    whole = data.tensors[0]
    x = whole if factors else whole[:3] if rank == 0 else whole[3:]  # with shard_factors, all ranks ask the same
    with together(world):
        evidence = float((la.log_marginal_likelihood() - one.log_marginal_likelihood()).abs())
        answers = float((la(x) - one(x)).abs().max())
    p, q = la.predict(x, group=world), one.predict(whole)
    answers = max(answers, float((p.mean - q.mean).abs().max()), float((p.variance - q.variance).abs().max()))
    seeds = [torch.Generator().manual_seed(2) for _ in range(2)]
    drawn = la.predict(x, "nn", n_samples=3, generator=seeds[0], group=world).mean
    answers = max(answers, float((drawn - one.predict(whole, "nn", n_samples=3, generator=seeds[1]).mean).abs().max()))
    left = [name for name, p in la.model.named_parameters() if p.untyped_storage().nbytes() > 8]
    return {"evidence": evidence, "answers": answers, "left": left}


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize(
    ("units", "structure", "curvature", "factors"),
    [
        ("layers", "kron", "ggn", False),
        ("layers", "diag", "ef", True),
        ("network", "ekfac", "ggn", False),
        ("layers", "lowrank", "hessian", False),
    ],
)
def test_all_weights_of_a_sharded_network_have_the_posterior_of_the_plain_one(
    two, kind, units, structure, curvature, factors
):
    if kind == "checkpoint" and curvature == "hessian":
        pytest.skip("torch's checkpoint has no second derivatives: the plain network is refused, too")
    for found in two.run(compared, kind, units, structure, curvature, factors):
        near = 1e-6 if structure == "lowrank" else 1e-10
        assert found["evidence"] < near
        assert found["answers"] < near
        assert found["left"] == []


class Block(nn.Module):
    """Six parameters that belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 9), nn.Linear(9, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.up(x).tanh()))


def exchanges() -> tuple[list[set[str]], list[set[str]]]:
    """Return the units of a network, and what is gathered at once in a prediction: its way there and those back."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(6, 3)).double()
    names = [name for name, _ in model.named_parameters()]
    for block in model[:2]:
        fully_shard(block)
    fully_shard(model)
    data, world = TensorDataset(torch.randn(N, 6).double(), torch.arange(N) % 3), distributed.group.WORLD
    la = Laplace(model, "classification", "all").fit(DataLoader(data, 4, sampler=ShardSampler(data)), group=world)
    ask, found = Ranks.ask, []

    def noted(ranks: Ranks, service: str, key: Any, detail: Any = None) -> Any:
        found.append({names[index] for index in key[1]})
        return ask(ranks, service, key, detail)

    Ranks.ask = noted  # type: ignore[method-assign]
    try:
        with together(world):
            la(data.tensors[0][:5])
    finally:
        Ranks.ask = ask  # type: ignore[method-assign]
    return [{name for name in names if name[0] == unit} for unit in "201"], found  # the root first


def test_all_parameters_of_a_layer_are_gathered_in_one_exchange(two):
    for units, found in two.run(exchanges):
        assert found[: len(units)] == units
        back = [next(i for i, unit in enumerate(units) if names <= unit) for names in found[len(units) :]]
        assert back[:3] == [0, 2, 1]
        assert all(one != other for one, other in pairwise(back))  # once for each vector that is sent back


def grown_in_a_prediction() -> tuple[int, int]:
    """By how many bytes the memory of this process grows at most in a prediction, and those of the network."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(600, 600), nn.Tanh())], nn.Linear(600, 3))
    size = sum(p.nbytes for p in model.parameters())
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    data, world = TensorDataset(torch.randn(8, 600), torch.arange(8) % 3), distributed.group.WORLD
    la = Laplace(model, "classification", "all", "diag")
    la.fit(DataLoader(data, 4, sampler=ShardSampler(data)), group=world)
    la.predict(data.tensors[0][:2], group=world)  # makes the posterior's variances
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present memory
    before = peak()
    la.predict(data.tensors[0][:2], group=world)
    return 1024 * (peak() - before), size


def test_a_run_holds_a_few_layers_at_a_time(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**18))  # freed memory goes back at once, as that of large layers
    pool = Pool(2)
    for grown, size in pool.run(grown_in_a_prediction):
        assert grown < size / 3
    pool.close()
