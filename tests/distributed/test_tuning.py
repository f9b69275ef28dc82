"""Tuning on shards finds what one process finds that has all data, and all ranks find the same."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from laplace import Laplace
from laplace.distributed import ShardSampler
from laplace.errors import LaplaceWarning
from laplace.tuning.problem import Problem
from laplace.tuning.result import Tuned

N = 261  # more than the examples that a sample of the training data has


def data(task: str = "classification", seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 4, generator=generator).double()
    noise = 0.3 * torch.randn(N, 1, generator=generator).double()
    numbers = x[:, :1].sin() + noise
    return TensorDataset(x, numbers if task == "regression" else (numbers > 0).squeeze(1).long())


def network(task: str = "classification") -> nn.Module:
    """Return a network that is trained, so that neither evidence nor scores lie at the edge of their range."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1 if task == "regression" else 2)).double()
    optimizer, (x, y) = torch.optim.Adam(model.parameters(), 0.05), data(task).tensors
    loss = nn.functional.mse_loss if task == "regression" else nn.functional.cross_entropy
    for _ in range(60):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model


def shards(whole: Dataset, sampler: type[Any] = ShardSampler) -> DataLoader:
    return DataLoader(whole, 16, sampler=sampler(whole))


class Brier:
    """A metric object, whose values of two parts do not add."""

    def reset(self) -> None:
        self.parts: list[Any] = []

    def update(self, p: torch.Tensor, y: torch.Tensor) -> None:
        self.parts.append((p, y))

    def compute(self) -> torch.Tensor:
        p, y = (torch.cat(column) for column in zip(*self.parts, strict=True))
        return (p - nn.functional.one_hot(y, p.shape[1])).square().sum(1).mean().sqrt()


def calls(task: str) -> dict[str, dict[str, Any]]:
    """Return the options of `la.tune` by name."""
    scored = {"method": "validation", "grid_size": 5, "val_loader": data(task, 2)}
    return {
        "evidence": {"method": "evidence"},
        "auto": {},
        "loo": {"method": "loo", "grid_size": 5, "seed": 3},
        "validation": scored,
        **({} if task == "regression" else {
            "metric": scored | {"loss": Brier()},
            "loss": scored | {"loss": lambda p, y: nn.functional.nll_loss(p.log(), y)},
        }),
    }  # fmt: skip


def tuned(task: str, sampler: type[Any]) -> dict[str, tuple[float, float]]:
    """By call and value, what this rank finds, and what one process finds that has all data."""
    world, whole = distributed.group.WORLD, data(task)
    found: dict[str, tuple[float, float]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = Laplace(network(task), task, "all").fit(DataLoader(whole, 20), group=None)
        la = Laplace(network(task), task, "all").fit(shards(whole, sampler), group=world)

        def note(name: str) -> None:
            found[name] = float(la.prior_precision), float(one.prior_precision)
            found[f"noise {name}"] = float(la.sigma_noise), float(one.sigma_noise)

        for name, options in calls(task).items():
            val = options.get("val_loader")
            one.tune(**options | ({} if val is None else {"val_loader": DataLoader(val, 50)}), group=None)
            la.tune(**options | ({} if val is None else {"val_loader": shards(val, sampler)}), group=world)
            note(name)
        for each, val, group in ((one, DataLoader(data(task, 2), 50), None), (la, shards(data(task, 2)), world)):
            each.optimize_prior_precision(method="gridsearch", val_loader=val, grid_size=9, group=group)
        note("gridsearch")
        la.optimize_prior_precision()  # by evidence: no data, nothing to exchange
    return found


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("sampler", [ShardSampler, DistributedSampler])
def test_tuning_on_shards_finds_what_one_process_finds(some, task, sampler):
    for found in some.run(tuned, task, sampler):
        for name, (here, there) in found.items():
            assert here == pytest.approx(there, rel=1e-6), name


class Unreadable(Dataset):
    """Examples of which one cannot be read a second time."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.whole, self.act, self.on = data("regression"), act, False

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        if self.on and i % 2:  # of rank 1
            self.act()
        return self.whole[i]


def missing() -> None:
    raise ValueError("a file is missing")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def failing() -> dict[str, Any]:
    """By method and fault of rank 1 as it reads the training data again: what tuning finds, or its error."""
    world, found = distributed.group.WORLD, {}
    for fault, act in (("missing", missing), ("interrupt", interrupt)):
        broken = Unreadable(act)
        la = Laplace(network("regression"), "regression", "all").fit(shards(broken), group=world)
        broken.on = True
        for method in ("auto", "loo", "evidence"):
            la.prior_precision = la.sigma_noise = 1.0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", LaplaceWarning)
                try:
                    la.tune(method=method, group=world)
                    found[f"{method}, {fault}"] = (float(la.prior_precision), float(la.sigma_noise))
                except (Exception, KeyboardInterrupt) as error:
                    found[f"{method}, {fault}"] = f"{type(error).__name__}: {error}"
        broken.on = False
        found[f"then, {fault}"] = len(la.predict(shards(broken), group=world).mean)
    return found


def test_data_that_one_rank_cannot_read_again_are_left_out_by_all_or_end_the_call(two):
    zero, one = two.run(failing)
    for method in ("auto", "evidence"):  # which need no data
        assert isinstance(zero[f"{method}, missing"], tuple)
        assert zero[f"{method}, missing"] == one[f"{method}, missing"]
    assert one["loo, missing"] == "ValueError: a file is missing"
    assert zero["loo, missing"].startswith("RankError: rank 1 failed, so that rank 0 cannot go on: ValueError: a file")
    for method in ("auto", "loo", "evidence"):
        assert one[f"{method}, interrupt"].startswith("KeyboardInterrupt")
        assert zero[f"{method}, interrupt"].startswith("RankError: rank 1 failed, so that rank 0 cannot go on: Keyb")
    for found in (zero, one):
        assert found["then, missing"] == found["then, interrupt"] == N


def own_methods() -> Iterator[str]:
    """By a method that does something else on each rank, the error; and whether the posterior stayed."""
    world, rank, val = distributed.group.WORLD, distributed.get_rank(), data(seed=2)
    la = Laplace(network(), "classification").fit(shards(data()), group=world)

    def drawn(problem: Problem) -> Tuned:
        problem.losses([problem.start + rank])
        return problem.tuned("drawn")

    def longer(problem: Problem) -> Tuned:
        for _ in range(2 + rank):
            problem.losses([problem.start])
        return problem.tuned("longer")

    for method, options in ((drawn, {}), (longer, {"val_loader": shards(val)})):
        try:
            la.tune(method=method, **options, group=world)
            yield "none"
        except Exception as error:
            yield f"{type(error).__name__}: {error}"
    yield str(float(la.prior_precision))
    yield str(len(la.predict(shards(val), group=world).mean))


def own_methods_said() -> list[str]:
    return [*own_methods()]


def test_a_method_that_finds_something_else_on_each_rank_is_refused(two):
    for drawn, longer, prior, predicted in two.run(own_methods_said):
        assert drawn.startswith("OptionError: la.tune has found other values on each rank: prior_precision, 1 on rank")
        assert "RankError: the ranks do different work in la.tune" in longer
        assert (prior, predicted) == ("1.0", str(N))
