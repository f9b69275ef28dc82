"""What is done with a posterior on many processes: tune, predict over shards, train, save."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace import Laplace, marglik_training
from laplace.distributed import ShardSampler
from laplace.errors import LaplaceError

N = 61


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def data(task: str = "classification", seed: int = 1) -> TensorDataset:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(seed)).double()
    y = torch.arange(N) % 3 if task == "classification" else x.sum(1, keepdim=True).sin()
    return TensorDataset(x, y)


def shard(whole: TensorDataset, size: int = 7) -> DataLoader:
    return DataLoader(whole, size, sampler=ShardSampler(whole))


class Brier:
    """A metric object, whose values of two parts do not add."""

    def reset(self) -> None:
        self.parts: list[Any] = []

    def update(self, p: torch.Tensor, y: torch.Tensor) -> None:
        self.parts.append((p, y))

    def compute(self) -> torch.Tensor:
        p, y = (torch.cat(column) for column in zip(*self.parts, strict=True))
        return (p - nn.functional.one_hot(y, p.shape[1])).square().sum(1).mean().sqrt()


def tuned() -> dict[str, tuple[float, float]]:
    """By call, the prior precision that this rank finds, and that of one process with all data."""
    world, whole, val = distributed.group.WORLD, data(), data(seed=2)
    one = Laplace(network(), "classification").fit(DataLoader(whole, 9), group=None)
    la = Laplace(network(), "classification").fit(shard(whole), group=world)
    found: dict[str, tuple[float, float]] = {}
    calls: dict[str, Any] = {
        "evidence": {"method": "evidence"},
        "auto": {},
        "loo": {"method": "loo", "grid_size": 5},
        "validation": {"method": "validation", "val_loader": val, "grid_size": 5},
        "metric": {"method": "validation", "val_loader": val, "grid_size": 5, "loss": Brier()},
        "loss": {"method": "validation", "val_loader": val, "grid_size": 5,
                 "loss": lambda p, y: nn.functional.nll_loss(p.log(), y)},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, options in calls.items():
            with_val = "val_loader" in options
            one.tune(**options | ({"val_loader": DataLoader(val, 5)} if with_val else {}), group=None)
            la.tune(**options | ({"val_loader": shard(val)} if with_val else {}), group=world)
            found[name] = (float(la.prior_precision), float(one.prior_precision))
        for each, loader, group in ((one, DataLoader(val, 5), None), (la, shard(val), world)):
            each.optimize_prior_precision(method="gridsearch", val_loader=loader, grid_size=9, group=group)
        found["gridsearch"] = (float(la.prior_precision), float(one.prior_precision))
        la.optimize_prior_precision()  # by evidence: no data, nothing to exchange
    return found


@pytest.mark.slow
def test_tuning_on_shards_finds_what_one_process_finds(two):
    for found in two.run(tuned):
        for name, (here, there) in found.items():
            assert here == pytest.approx(there, rel=1e-8), name


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Let everything that sends something to other ranks fail."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was sent to other ranks")

    names = ("all_gather_object", "all_gather", "all_reduce", "reduce", "broadcast", "barrier")
    own = {name: getattr(distributed, name) for name in names}
    try:
        for name in names:
            setattr(distributed, name, refuse)
        yield
    finally:
        for name in names:
            setattr(distributed, name, own[name])


def predicted() -> dict[str, Any]:
    world, whole = distributed.group.WORLD, data()
    la = Laplace(network(), "classification", "all").fit(shard(whole), group=world)
    expected = la.predict(DataLoader(whole, 9))
    found: dict[str, Any] = {}
    loaders = {
        "shards": shard(whole, 5),
        "shuffled": DataLoader(whole, 5, sampler=ShardSampler(whole, shuffle=True)),
        "padded": DataLoader(whole, 5, sampler=DistributedSampler(whole)),
        "one rank has none": [whole.tensors[0]] if distributed.get_rank() == 0 else [],
    }
    for name, loader in loaders.items():
        p = la.predict(loader, group=world)
        found[name] = max(float((getattr(p, key) - getattr(expected, key)).abs().max()) for key in ("mean", "variance"))
    for name, options in {"nn": {"pred_type": "nn"}, "mc": {"link_approx": "mc"}}.items():
        seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
        many = la.predict(shard(whole, 5), **options, n_samples=5, generator=seeds[0], group=world)
        one = la.predict(DataLoader(whole, 9), **options, n_samples=5, generator=seeds[1])
        found[name] = float((many.mean - one.mean).abs().max())
    torch.manual_seed(5)
    again = [la.predict(shard(whole, 5), "nn", n_samples=5, group=world).mean for _ in range(2)]
    found["two calls draw the same"] = bool(torch.equal(*again))
    with warnings.catch_warnings(), nothing_sent():
        warnings.simplefilter("error")
        found["alone"] = [len(la.predict(whole.tensors[0][:3]).mean), len(la(whole.tensors[0][:3]))]
    try:
        la.tune(method="validation", val_loader=DataLoader(whole, 5))
    except LaplaceError as error:
        found["refused"] = str(error)
    return found


def test_predictions_of_shards_are_gathered_in_order(two):
    for found in two.run(predicted):
        assert max(found[name] for name in ("shards", "shuffled", "padded", "one rank has none", "nn", "mc")) < 1e-12
        assert not found["two calls draw the same"]
        assert found["alone"] == [3, 3]
        assert "a posterior that 2 ranks fitted together" in found["refused"]


def saved(path: str) -> bool:
    world, whole = distributed.group.WORLD, data()
    la = Laplace(network(), "classification").fit(shard(whole), group=world)
    la.save(Path(path) / "together", group=world)
    back = Laplace.load(Path(path) / "together", network())
    la.save(Path(path) / f"of {distributed.get_rank()}")  # rank 0 writes for all
    return torch.equal(back(whole.tensors[0]), la(whole.tensors[0])) and back.n_data == N


def test_the_first_rank_writes_the_file_and_all_read_it(two, tmp_path):
    assert two.run(saved, str(tmp_path)) == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of 0", "together"]


def trained(wrap: bool, path: str) -> dict[str, Any]:
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
def test_training_by_evidence_on_shards_is_that_of_one_process(two, tmp_path):
    assert_trained(two.run(trained, False, str(tmp_path)))


@pytest.mark.slow
def test_training_by_evidence_runs_under_ddp(two, tmp_path):
    assert_trained(two.run(trained, True, str(tmp_path)))
