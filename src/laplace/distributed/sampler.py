"""Deal a data set out over ranks, every example once."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch import distributed
from torch.utils.data import Sampler

from laplace.checks import LARGEST, flag, whole_number
from laplace.errors import OptionError


class ShardSampler(Sampler[int]):
    """Gives rank r of k the examples r, r + k, r + 2 k, ... of a data set, each exactly once.

    `DistributedSampler` repeats examples so that all ranks have the same number of them. For training that does not
    matter; a posterior would count these examples twice. Here some ranks have one example fewer, or none.

        loader = DataLoader(dataset, 128, sampler=ShardSampler(dataset))

    Args:
        dataset: the data set, or the number of its examples.
        rank: the number of this process. That in `group` if left out; 0 without torch.distributed.
        size: how many processes there are. That of `group` if left out; 1 without torch.distributed.
        shuffle: whether to deal out a random order, the same on all ranks.
        seed: of that order, together with the epoch.
        group: the process group; torch.distributed's default group if left out.

    Raises:
        OptionError: a value is outside its range, or only one of `rank` and `size` is given.
    """

    def __init__(
        self,
        dataset: Sized | int,
        rank: int | None = None,
        size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        if (rank is None) != (size is None):
            raise OptionError(f"rank={rank} and size={size}: give both, or leave both out.")
        started = distributed.is_available() and distributed.is_initialized()
        found = (distributed.get_rank(group), distributed.get_world_size(group)) if started else (0, 1)
        self.size = found[1] if size is None else whole_number(size, "size")
        self.rank = found[0] if rank is None else whole_number(rank, "rank", 0, self.size - 1)
        self.examples = whole_number(dataset, "dataset", 0) if isinstance(dataset, int) else len(dataset)
        self.shuffle, self.seed, self.epoch = flag(shuffle, "shuffle"), whole_number(seed, "seed", 0, LARGEST), 0

    def set_epoch(self, epoch: int) -> None:
        """Deal out another random order. All ranks must set the same epoch."""
        self.epoch = whole_number(epoch, "epoch", 0)

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.rank, self.examples, self.size))
        order = torch.randperm(self.examples, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        return iter(order[self.rank :: self.size].tolist())

    def __len__(self) -> int:
        return len(range(self.rank, self.examples, self.size))
