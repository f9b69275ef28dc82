"""Each example counts once, whatever divides the data; and sharded data or networks need `group=`."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace import Laplace, marglik_training, report
from laplace.distributed import ShardSampler
from laplace.errors import LaplaceError, OptionError, ProcessesWarning

N = 61


def parts() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    generator = torch.Generator().manual_seed(1)
    return model, TensorDataset(torch.randn(N, 4, generator=generator).double(), torch.arange(N) % 3)


def said(call: Any) -> str:
    try:
        call()
    except LaplaceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Repeating(ShardSampler):
    """Gives the first examples of its part a second time, as a sampler that draws with replacement may."""

    def __iter__(self):
        own = [*super().__iter__()]
        return iter(own + own[:4])


def refusals() -> dict[str, str]:
    model, data = parts()
    sampler = DistributedSampler(data, shuffle=False)
    sharded, whole = DataLoader(data, 8, sampler=sampler), DataLoader(data, 8)
    world, other = distributed.group.WORLD, ShardSampler(N, 1 - distributed.get_rank(), 2)

    def fit(loader: Any, **options: Any) -> Any:
        return lambda: Laplace(model, "classification").fit(loader, **options)

    found = {
        "sampler": said(fit(sharded)),
        "shards": said(fit(DataLoader(data, 8, sampler=ShardSampler(data)))),
        "accelerate": said(fit(prepare_data_loader(whole, num_processes=2, process_index=distributed.get_rank()))),
        "training": said(lambda: marglik_training(model, sharded, "classification", n_epochs=1)),
        "whole": said(fit(whole, group=world)),
        "shuffled": said(fit(DataLoader(data, 8, shuffle=True), group=world)),
        "whole in a list": said(fit([*whole], group=world)),
        "more than there are": said(fit(DataLoader(data, 8, sampler=Repeating(data)), group=world)),
        "another rank": said(fit(DataLoader(data, 8, sampler=other), group=world)),
        "own": said(fit(sharded, group=None)),
        "calibrate": said(lambda: fit(sharded, group=None)().calibrate(sharded)),
        "conformal": said(lambda: fit(sharded, group=None)().conformal(sharded)),
        "report": said(lambda: report(fit(sharded, group=None)(), whole, val_loader=sharded)),
        "shift": said(lambda: report(fit(sharded, group=None)(), whole, shifts={"noise": {1: whole, 2: sharded}})),
    }
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit([*whole])()
    found["plain"] = str(next(w for w in warned if w.category is ProcessesWarning).message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found["alone"] = str(Laplace(model, "classification").fit(sharded, group=None).n_data)
    return found


def test_shards_without_a_group_are_refused_and_so_is_data_that_every_rank_reads(two):
    for found in two.run(refusals):
        for name in ("sampler", "shards", "accelerate", "training"):
            assert re.search(r"OptionError: the data is divided over 2 ranks.*group=torch.distributed.group.WORLD.*"
                             "group=None", found[name])  # fmt: skip
        for name in ("whole", "shuffled"):
            assert "every rank reads the whole data set of 61 examples" in found[name]
        assert "ranks 0 and 1 read the same 61 examples" in found["whole in a list"]
        assert re.search(r"ShardSampler is of rank . of 2; this is rank", found["another rank"])
        assert "the ranks read 69 examples together, and the data set has 61" in found["more than there are"]
        assert found["own"] == "nothing"
        for name in ("calibrate", "conformal"):
            assert f"la.{name}: its DistributedSampler gives this rank a part of the data" in found[name]
        for name in ("report", "shift"):
            assert "laplace.report: its DistributedSampler gives this rank a part of the data" in found[name]
        assert "one of 2 processes" in found["plain"]
        assert found["alone"] == "31"


def counted() -> dict[str, tuple[int, float, bool]]:
    """By loader: the examples counted, the difference to one process, and whether a warning was given."""
    model, data = parts()
    model.eval()
    rank = distributed.get_rank()
    one = Laplace(model, "classification", "all").fit(DataLoader(data, 8), group=None)
    loaders: dict[str, Any] = {
        "ShardSampler": DataLoader(data, 8, sampler=ShardSampler(data)),
        "shuffled": DataLoader(data, 8, sampler=ShardSampler(data, shuffle=True, seed=3)),
        "padded": DataLoader(data, 8, sampler=DistributedSampler(data)),
        "even": DataLoader(TensorDataset(*data[:60]), 8, sampler=DistributedSampler(data.tensors[0][:60])),
        "accelerate": prepare_data_loader(DataLoader(data, 8, shuffle=True), num_processes=2, process_index=rank),
    }
    found = {}
    for name, loader in loaders.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            la = Laplace(model, "classification", "all").fit(loader, group=distributed.group.WORLD)
        away = float((la.log_marginal_likelihood() - one.log_marginal_likelihood()).abs())
        found[name] = (la.n_data, away, any("repeats examples" in str(w.message) for w in warned))
    return found


def test_padding_samplers_count_each_example_once(two):
    zero, one = two.run(counted)
    for name, (n, away, warned) in zero.items():
        if name == "even":
            assert n == 60
            continue
        assert n == N
        assert away < 1e-10
        assert warned == (name in ("padded", "accelerate"))
        assert not one[name][2], "one rank says it for all"


def test_a_shard_sampler_gives_every_example_once():
    for n in (0, 1, 5, 12):
        for size in (1, 2, 5):
            for options in ({}, {"shuffle": True, "seed": 4}):
                shards = [ShardSampler(range(n), rank, size, **options) for rank in range(size)]
                assert sorted(i for shard in shards for i in shard) == [*range(n)]
                assert all(len([*shard]) == len(shard) for shard in shards)
    one = ShardSampler(50, 0, 2, shuffle=True)
    before = [*one]
    one.set_epoch(1)
    assert [*one] != before
    assert [*ShardSampler(5)] == [0, 1, 2, 3, 4]  # without processes
    with pytest.raises(OptionError, match="rank=3 and size=None: give both"):
        ShardSampler(5, 3)
    with pytest.raises(OptionError, match="rank=3"):
        ShardSampler(5, 3, 2)
