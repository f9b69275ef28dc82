"""Training by evidence on shards is that of one process, in DistributedDataParallel, too; faults end it on all."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from laplace import marglik_training
from laplace.distributed import ShardSampler
from laplace.errors import LaplaceError
from ranks import Pool

N = 61


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def data(task: str = "classification") -> TensorDataset:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1)).double()
    y = torch.arange(N) % 3 if task == "classification" else x.sum(1, keepdim=True).sin()
    return TensorDataset(x, y)


def shard(whole: TensorDataset, size: int = 7) -> DataLoader:
    return DataLoader(whole, size, sampler=ShardSampler(whole))


def trained(wrap: bool) -> dict[str, Any]:
    """Train on shards, and with the same batches in one process."""
    whole, options = data("regression"), {"n_epochs": 4, "optimizer_kwargs": {"lr": 1e-2}, "generator": None}
    model, other = network(1), network(1)
    size = distributed.get_world_size()
    batches = [*shard(whole, 7)]
    sizes = range(0, N, 7 * size)
    together = [tuple(t[i : i + 7 * size] for t in whole.tensors) for i in sizes]  # of each step, all ranks' examples
    given = DistributedDataParallel(model) if wrap else model
    la, _, evidences, losses = marglik_training(given, batches, "regression", group=distributed.group.WORLD, **options)
    one, _, expected, expected_losses = marglik_training(other, together, "regression", group=None, **options)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    every: list[Any] = [None] * size
    distributed.all_gather_object(every, weights)
    return {
        "evidence": float((torch.tensor(evidences) - torch.tensor(expected)).abs().max()),
        "loss": float((torch.tensor(losses) - torch.tensor(expected_losses)).abs().max()),
        "weights": float((weights - torch.cat([p.detach().flatten() for p in other.parameters()])).abs().max()),
        "same": all(torch.equal(weights, each) for each in every),
        "prior": float((la.prior_precision - one.prior_precision).abs().max()),
        "n": la.n_data,
    }


def assert_trained(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["same"]
        assert of_rank["n"] == N
        for name in ("evidence", "loss", "weights", "prior"):
            assert of_rank[name] < 1e-8, (name, of_rank)


def running_evidence() -> list[str]:
    found = []
    for evidence in ("running", "bound"):
        try:
            marglik_training(network(), shard(data()), "classification", evidence=evidence, n_epochs=1,
                             group=distributed.group.WORLD)  # fmt: skip
        except LaplaceError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_evidence_of_running_sums_is_refused_on_many_ranks_with_what_to_write(two):
    for found in two.run(running_evidence):
        for said, name in zip(found, ("running", "bound"), strict=True):
            assert said.startswith(
                f"UnsupportedError: evidence='{name}' reads the batches of one process; group= has 2"
            )
            assert "Take evidence='epochs'" in said


@pytest.mark.slow
def test_training_by_evidence_on_shards_is_that_of_one_process(two):
    assert_trained(two.run(trained, False))


@pytest.mark.slow
def test_training_by_evidence_runs_under_ddp(two):
    assert_trained(two.run(trained, True))


def hooked() -> float:
    """Train with a hook that doubles a gradient, in DistributedDataParallel or not. How far the weights are apart."""
    found = []
    for wrap in (False, True):
        model = network()
        model[0].weight.register_hook(lambda g: 2 * g)
        given = DistributedDataParallel(model) if wrap else model
        options = {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"lr": 1e-2}, "n_epochs": 2}
        marglik_training(given, shard(data()), **options, group=distributed.group.WORLD)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return float((found[0] - found[1]).abs().max())


@pytest.mark.slow
def test_hooks_of_parameters_run_once(two):
    assert max(two.run(hooked)) < 1e-12


class Greedy(torch.autograd.Function):
    """Passes values on. Runs out of memory on the way back of large ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.large = bool((x.abs() > 90).any())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if ctx.large:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradients[0]


class Faulty(nn.Module):
    """A layer that fails with large values: as they come, on their way back, or by Ctrl-C."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "backward":
            return Greedy.apply(x)
        if self.fault == "forward" and bool((x.abs() > 90).any()):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if self.fault == "interrupt" and bool((x.abs() > 90).any()):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # where it is raised
        return x


FAULTS = ("NaN", "forward", "backward", "interrupt")


def faults(wrap: bool) -> dict[str, str]:
    """By fault of rank 1 in its third batch, the error of this rank."""
    found, world = {}, distributed.group.WORLD
    for name in FAULTS:
        first, *others = network()
        model, batches = nn.Sequential(first, Faulty(name), *others), [*shard(data())]
        if distributed.get_rank() == 1:
            batches[2][0].mul_(float("nan") if name == "NaN" else 1e5)
        try:
            given = DistributedDataParallel(model) if wrap else model
            marglik_training(given, batches, n_epochs=2, group=world)
            found[name] = "none"
        except (LaplaceError, RuntimeError, KeyboardInterrupt) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [False, True])
def test_a_fault_of_one_rank_ends_the_training_on_all(two, wrap):
    zero, one = two.run(faults, wrap, seconds=50)  # the group's timeout is 60 seconds
    where = "epoch 1, batch 2"
    assert one["interrupt"].startswith("KeyboardInterrupt")
    assert re.match("RankError: rank 1 failed, .*KeyboardInterrupt", zero["interrupt"])
    assert re.match("InputError: rank 1: .*NaN", one["NaN"])
    assert re.match("RankError: rank 1 failed, .*InputError: .*batch 2: .*NaN", zero["NaN"])
    for name in ("forward", "backward"):
        assert one[name] == "OutOfMemoryError: CUDA out of memory."
        assert re.match(f"RankError: rank 1 failed, .*OutOfMemoryError: .*out of memory; raised in {where}", zero[name])


def kept(path: str, epochs: int) -> tuple[float, Tensor] | str:
    """Train with a file, and return the evidence and the weights."""
    model, whole = network(), data()
    try:
        la, *_ = marglik_training(model, shard(whole), n_epochs=epochs, checkpoint=path, group=distributed.group.WORLD)
    except LaplaceError as error:
        return f"{type(error).__name__}: {error}"
    return float(la.log_marginal_likelihood()), torch.cat([p.detach().flatten() for p in model.parameters()])


def elsewhere(path: str) -> tuple[float, Tensor] | str:
    """Go on where rank 1 does not see the file."""
    return kept(path if distributed.get_rank() == 0 else f"{path} of another machine", 4)


@pytest.mark.slow
def test_training_goes_on_from_its_file_with_the_same_number_of_ranks_alone(two, tmp_path):
    whole = two.run(kept, str(tmp_path / "whole"), 4)
    path = str(tmp_path / "training")
    two.run(kept, path, 2)
    alone = Pool(1)
    assert all("ranks (2 there, 1 here)" in message for message in alone.run(kept, path, 4))
    alone.close()
    assert all("rank 0 finds one of 2 epochs, rank 1 finds no file" in message for message in two.run(elsewhere, path))
    for (evidence, weights), (expected, there) in zip(two.run(kept, path, 4), whole, strict=True):
        assert evidence == pytest.approx(expected, rel=1e-12)
        assert torch.equal(weights, there)
