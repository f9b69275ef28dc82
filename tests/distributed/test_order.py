"""The order of the data: shuffling stays, each epoch has its own, and draws belong to examples, not to ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from laplace import Laplace, marglik_training
from laplace.distributed import Reduce, ShardSampler
from laplace.distributed.shards import shard_of
from laplace.errors import InputError, UnsupportedError

N = 13


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data() -> TensorDataset:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1)).double()
    return TensorDataset(x, torch.arange(N) % 3)


class Noted(Dataset):
    """Examples that note when they are read."""

    def __init__(self) -> None:
        self.whole, self.read = data(), list[int]()

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        self.read.append(int(i))
        return self.whole[i]


def orders() -> dict[str, list[list[int]]]:
    """By sampler, the examples of this rank in the order of each epoch."""
    found = {}
    for name in ("distributed", "shards"):
        noted = Noted()
        sampler = DistributedSampler(noted) if name == "distributed" else ShardSampler(noted, shuffle=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            marglik_training(network(), DataLoader(noted, 4, sampler=sampler), n_epochs=3, n_epochs_burnin=9,
                             group=distributed.group.WORLD)  # fmt: skip
        n = len(range(distributed.get_rank(), N, distributed.get_world_size()))
        runs = [noted.read[i : i + n] for i in range(0, len(noted.read), n)]  # one to count, three epochs, a fit
        found[name] = [run for run in runs[-4:-1] if len(run) == n]
    return found


def test_training_keeps_the_shuffling_of_its_sampler_and_each_epoch_has_its_own(two):
    zero, one = two.run(orders)
    for name in ("distributed", "shards"):
        for epoch, (of_zero, of_one) in enumerate(zip(zero[name], one[name], strict=True)):
            expected = torch.randperm(N, generator=torch.Generator().manual_seed(epoch)).tolist()
            assert of_zero == expected[::2]
            assert of_one == expected[1::2]
        assert len(zero[name]) == 3


def test_training_in_one_process_tells_its_sampler_the_epoch():
    noted = Noted()
    loader = DataLoader(noted, 4, sampler=ShardSampler(noted, 0, 1, shuffle=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        marglik_training(network(), loader, n_epochs=2, n_epochs_burnin=9, group=None)
    for epoch in range(2):
        start = N * (1 + epoch)
        order = torch.randperm(N, generator=torch.Generator().manual_seed(epoch)).tolist()
        assert noted.read[start : start + N] == order


def drawn() -> dict[str, float]:
    """By loader and curvature, the evidence. By sampler, the mean of predictions by Monte Carlo after one seed."""
    world, whole, found = distributed.group.WORLD, data(), {}
    rank, size = distributed.get_rank(), distributed.get_world_size()
    samplers = {
        "shards": ShardSampler(whole),
        "shuffled": ShardSampler(whole, shuffle=True, seed=4),
        "distributed": DistributedSampler(whole),
    }
    loaders = {name: DataLoader(whole, 4, sampler=sampler) for name, sampler in samplers.items()}
    loaders["subset"] = DataLoader(Subset(whole, [*range(N - 1 - rank, -1, -size)]), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, loader in loaders.items():
            for curvature in ("sketch", "mc"):
                la = Laplace(network(), "classification", "all", curvature=curvature)
                la.fit(loader, group=world, generator=torch.Generator().manual_seed(2))
                found[f"{name} {curvature}"] = float(la.log_marginal_likelihood())
        la = Laplace(network(), "classification", "all").fit(loaders["shards"], group=world)
        for name in ("mc", None):
            torch.manual_seed(0)
            p = la.predict(loaders["shards"], link_approx=name, n_samples=7, group=world)
            found[f"mean {name}"], found[f"epistemic {name}"] = float(p.mean[:, 0].sum()), float(p.epistemic.sum())
    return found


@pytest.mark.slow
def test_draws_do_not_depend_on_the_number_of_ranks(some):
    alone = _drawn_alone()
    for found in some.run(drawn):
        assert set(found) == set(alone)
        for name, value in found.items():
            assert abs(value - alone[name]) < 1e-10, name


def _drawn_alone() -> dict[str, float]:
    """Return what one process finds that reads all data in order."""
    whole, found = data(), {}
    loader = DataLoader(whole, 5)
    for curvature in ("sketch", "mc"):
        la = Laplace(network(), "classification", "all", curvature=curvature)
        la.fit(loader, generator=torch.Generator().manual_seed(2))
        for name in ("shards", "shuffled", "distributed", "subset"):
            found[f"{name} {curvature}"] = float(la.log_marginal_likelihood())
    la = Laplace(network(), "classification", "all").fit(loader)
    for name in ("mc", None):
        torch.manual_seed(0)
        p = la.predict(loader, link_approx=name, n_samples=7)
        found[f"mean {name}"], found[f"epistemic {name}"] = float(p.mean[:, 0].sum()), float(p.epistemic.sum())
    return found


class Stream(IterableDataset):
    """Gives a rank every k-th example of a stream."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(data()), self.rank, None, self.size)


def streamed() -> list[float]:
    """By curvature, the evidence of a stream that is dealt out; the error if every rank reads all of it."""
    found: list[Any] = []
    stream = Stream(distributed.get_rank(), distributed.get_world_size())
    for curvature in ("ggn", "sketch"):
        la = Laplace(network(), "classification", "all", curvature=curvature)
        la.fit(DataLoader(stream, 4), group=distributed.group.WORLD, generator=torch.Generator().manual_seed(2))
        found.append(float(la.log_marginal_likelihood()))
    try:
        la.fit(DataLoader(Stream(), 4), group=distributed.group.WORLD)
    except InputError as error:
        found.append(str(error))
    return found


def test_a_stream_of_which_each_rank_reads_every_kth_example_has_the_posterior_of_one_process(two):
    alone = []
    for curvature in ("ggn", "sketch"):
        la = Laplace(network(), "classification", "all", curvature=curvature)
        la.fit(DataLoader(Stream(), 5), generator=torch.Generator().manual_seed(2))
        alone.append(float(la.log_marginal_likelihood()))
    for *evidences, error in two.run(streamed):
        assert evidences == pytest.approx(alone, abs=1e-10)
        assert "read the same 13 examples" in error
        assert "itertools.islice(stream, rank, None, world_size)" in error


def test_streams_that_accelerate_has_prepared_are_refused_with_what_to_write():
    accelerate = pytest.importorskip("accelerate.data_loader")
    shard = accelerate.IterableDatasetShard(Stream(), 4, num_processes=2)
    sent, whole = (accelerate.DataLoaderDispatcher(each, batch_size=4) for each in (Stream(), data()))
    for loader in (DataLoader(shard, 4), sent):
        with pytest.raises(UnsupportedError, match=r"itertools.islice\(stream, rank.*without accelerator"):
            shard_of(loader, FirstOfTwo())
    with pytest.raises(UnsupportedError, match=r"on rank 0 .*DataLoaderConfiguration\(dispatch_batches=False\)\."):
        shard_of(whole, FirstOfTwo())


class FirstOfTwo(Reduce):
    """The first of two ranks, which exchange nothing."""

    rank, size = 0, 2


@pytest.mark.parametrize("even", [True, False])
def test_accelerate_is_said_to_repeat_examples_only_where_it_does(even):
    accelerate = pytest.importorskip("accelerate.data_loader")
    batches = BatchSampler(RandomSampler(range(N)), 4, False)
    loader = DataLoader(data(), batch_sampler=accelerate.BatchSamplerShard(batches, 2, 0, even_batches=even))
    found = shard_of(loader, FirstOfTwo())
    assert (found.note is not None) == even
    expected = torch.randperm(N, generator=torch.Generator().manual_seed(0))[::2]
    assert torch.equal(found.places, expected)  # shuffled, the same order on all ranks, without repeats


class Opened(Dataset):
    """Examples that a worker of the loader has to open first, as a file."""

    opened = False

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> int:
        if not self.opened:
            raise ValueError("not opened")
        return i


def opening(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.opened = True  # type: ignore[union-attr]


class Wrapper:
    """Has what a loader keeps, but not its properties, as the wrapper of Lightning Fabric."""

    def __init__(self, loader: DataLoader) -> None:
        self.__dict__.update(loader.__dict__)


def test_data_read_without_repeats_has_the_workers_of_its_loader():
    opened = Opened()
    loader = DataLoader(opened, 4, sampler=DistributedSampler(opened, 2, 0, shuffle=False), num_workers=1,
                        worker_init_fn=opening, timeout=60)  # fmt: skip
    for given in (loader, Wrapper(loader)):
        found = shard_of(given, FirstOfTwo())  # type: ignore[arg-type]
        assert found.note is not None
        assert torch.cat([*found.loader]).tolist() == [*range(0, N, 2)]
        assert found.loader.timeout == 60  # type: ignore[attr-defined]
