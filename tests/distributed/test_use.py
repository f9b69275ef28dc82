"""What is done with a posterior on many processes: predict over shards, save."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace import Laplace
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


def tensors_of_each_rank() -> dict[str, tuple[int, list[str]]]:
    """By what the ranks give to predict, the number of rows, and the warnings of this rank."""
    world, whole, rank = distributed.group.WORLD, data(), distributed.get_rank()
    la, x = Laplace(network(), "classification").fit(shard(whole), group=world), whole.tensors[0]
    found = {}
    for name, own in {"others": x[rank:], "none": x[:0], "some": x[: 4 * rank], "the same": x[:3]}.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                rows = len(la.predict(own, group=world).mean)
            except LaplaceError:
                rows = 0
        found[name] = rows, [str(w.message) for w in warned]
    return found


def test_the_same_inputs_on_all_ranks_are_told_once(two):
    zero, one = two.run(tensors_of_each_rank)
    expected = {"others": (2 * N - 1, []), "none": (0, []), "some": (4, []), "the same": (6, [])}
    assert one == expected
    (said,) = zero["the same"][1]
    assert zero == expected | {"the same": (6, [said])}
    assert "all 2 ranks predict the same inputs, which come 2 times in the result. With group=, each rank" in said


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
