"""Loaders are read in the order of their data, each example that they name once, and nothing that they leave out."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from laplace.network.datasets import in_order

DATA = TensorDataset(torch.arange(20))
SUBSET = [7, 3, 11, 5, 2]


class Pairs:
    """A batch sampler of one's own."""

    def __iter__(self):
        return iter([[7, 3], [11, 5], [2]])

    def __len__(self):
        return 3


class Batches(torch.utils.data.Dataset):
    """A dataset whose items are batches."""

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return [torch.arange(3) + 3 * i]


def read(loader):
    state = torch.get_rng_state()
    found = [x.tolist() for (x,) in in_order(loader)]
    assert torch.equal(torch.get_rng_state(), state)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2, "sampler": SubsetRandomSampler(SUBSET)},
        {"batch_size": 2, "sampler": SUBSET},
        {"batch_sampler": BatchSampler(SubsetRandomSampler(SUBSET), 2, drop_last=True)},
    ],
    ids=["subset", "list", "batches of a subset"],
)
def test_examples_outside_of_a_subset_are_not_read(options):
    assert read(DataLoader(DATA, **options)) == [[2, 3], [5, 7], [11]]


def test_a_batch_sampler_of_ones_own_is_asked():
    assert read(DataLoader(DATA, batch_sampler=Pairs())) == [[2, 3, 5, 7, 11]]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 8, "shuffle": True, "drop_last": True},
        {"batch_sampler": BatchSampler(RandomSampler(DATA), 8, drop_last=True)},
        {"batch_size": 8, "sampler": DistributedSampler(DATA, 2, 0)},
    ],
    ids=["shuffled", "shuffled batches", "divided over processes"],
)
def test_all_data_is_read_whole(options):
    assert [i for batch in read(DataLoader(DATA, **options)) for i in batch] == list(range(20))


def test_examples_that_are_drawn_twice_are_read_once():
    weights = torch.zeros(20)
    weights[[4, 9]] = 1.0
    loader = DataLoader(DATA, 8, sampler=WeightedRandomSampler(weights, 20))
    assert read(loader) == [[4, 9]]


def test_a_dataset_of_batches_is_returned_as_it_is():
    loader = DataLoader(Batches(), batch_size=None)
    assert in_order(loader) is loader
