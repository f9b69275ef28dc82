"""A network of `fully_shard` is the user's: whatever happens in a fit, FSDP trains it on as if nothing had been."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.distributed import ShardSampler, together
from laplace.errors import LaplaceError, StaleWarning
from laplace.network import pieces

pytestmark = pytest.mark.slow  # the first DTensor of a process takes seconds
N, BAD = 23, 99.0


class Fails(nn.Module):
    """A layer that raises at some inputs."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.abs() > BAD).any()):
            raise RuntimeError("a fault of the network's own")
        return x


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(Fails(), nn.Tanh()), nn.Linear(6, 4), nn.Linear(4, 3)).double()


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, 4, generator=generator).double(), torch.arange(N) % 3)


class Trained:
    """A sharded network with its optimiser, after one step of training with FSDP."""

    def __init__(self) -> None:
        self.model = network()
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.step()

    def step(self) -> None:
        x, y = examples()[:8]
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        return [p.full_tensor().detach().clone() for p in self.model.parameters()]


def state_of(model: nn.Module) -> list[Any]:
    """Return what must be the very same: classes, hooks, attributes, flags, and the pieces with their memory."""
    found: list[Any] = []
    for name, module in model.named_modules():
        hooks = [[*map(id, module.__dict__[key].values())] for key in sorted(module.__dict__) if key.endswith("_hooks")]
        found.append((name, type(module), module.training, hooks, sorted(module.__dict__)))
        for key, p in module._parameters.items():
            if p is not None:
                piece = p.to_local()
                found.append((key, id(p), type(p), p.requires_grad, p.grad is None, p.placements))
                found.append((piece.data_ptr(), piece._version, piece.flatten().tolist()))
    return found


class Noting(list[Any]):
    """Batches that note when one in their midst is read."""

    reading = False

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(super().__iter__()):
            self.reading = self.reading or i == 2
            yield batch


def fitted(subset: str, fault: str) -> dict[str, Any]:
    """Fit, perhaps with a fault of rank 1 in its midst. How the network is afterwards, and trains on."""
    rank, world, data = distributed.get_rank(), distributed.group.WORLD, examples()
    own, other = Trained(), Trained()
    before = state_of(own.model)
    batches = Noting((x, y) for x, y in DataLoader(TensorDataset(*data[slice(0, 15) if rank else slice(15, N)]), 4))
    gather = pieces.gather

    def interrupting(*args: Any) -> list[Tensor]:
        if batches.reading:  # while a batch runs
            pieces.gather = gather
            os.kill(os.getpid(), signal.SIGINT)
        return gather(*args)

    if fault == "exception" and rank == 1:
        batches[2] = (batches[2][0] * 1e6, batches[2][1])
    if fault == "interrupt" and rank == 1:
        pieces.gather = interrupting
    raised = "nothing"
    try:
        Laplace(own.model, "classification", subset).fit(batches, group=world)
    except (LaplaceError, RuntimeError, KeyboardInterrupt) as error:
        raised = type(error).__name__
    finally:
        pieces.gather = gather
    same = before == state_of(own.model)
    for network in (own, other):
        network.step()
    pairs = zip(own.values(), other.values(), strict=True)
    return {"raised": raised, "same": same, "trains on": all(torch.equal(a, b) for a, b in pairs)}


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        ("none", ["nothing", "nothing"]),
        ("exception", ["RankError", "ModelError"]),
        ("interrupt", ["RankError", "KeyboardInterrupt"]),
    ],
)
def test_the_network_is_as_it_was_and_trains_on(two, subset, fault, raised):
    found = two.run(fitted, subset, fault)
    assert [of_rank["raised"] for of_rank in found] == raised
    for of_rank in found:
        assert of_rank["same"]
        assert of_rank["trains on"]


def after_more_training(subset: str) -> dict[str, Any]:
    """Fit, train on, predict, and fit again."""
    world, data = distributed.group.WORLD, examples()
    own, shard = Trained(), DataLoader(data, 4, sampler=ShardSampler(data))
    la = Laplace(own.model, "classification", subset).fit(shard, group=world)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.model(data.tensors[0])  # a run with FSDP's own hooks changes nothing
        la.predict(data.tensors[0][distributed.get_rank() :], group=world)
    own.step()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        la.predict(data.tensors[0], group=world)
    la.fit(shard, group=world)
    plain = network()
    with torch.no_grad():
        for p, value in zip(plain.parameters(), own.values(), strict=True):
            p.copy_(value)
    one = Laplace(plain, "classification", subset).fit(DataLoader(data, 5), group=None)
    with together(world):
        away = float((la(data.tensors[0]) - one(data.tensors[0])).abs().max())
    away = max(away, float((la.log_marginal_likelihood() - one.log_marginal_likelihood()).abs()))
    return {"away": away, "warned": any(w.category is StaleWarning for w in warned)}


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_more_training_with_fsdp_is_noticed_and_a_new_fit_sees_it(two, subset):
    for found in two.run(after_more_training, subset):
        assert found["warned"]
        assert found["away"] < 1e-10
