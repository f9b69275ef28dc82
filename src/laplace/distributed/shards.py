"""Find out which part of the data a loader gives to this rank.

A posterior counts each example once, but the samplers of training repeat examples so that all ranks have equally many.
Where one does, its data set is dealt out again without repeats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from laplace.distributed.reduce import Reduce
from laplace.distributed.sampler import ShardSampler
from laplace.errors import InputError, UnsupportedError

_REPEATS = (
    "repeats examples to give every rank equally many, and a posterior would count them twice; the data set is read "
    "without repeats. To say so, write DataLoader(dataset, batch_size, sampler=ShardSampler(dataset)) with the one of "
    "laplace.distributed."
)
_NOT_SENT = "Let every rank read its own part: DataLoaderConfiguration(dispatch_batches=False)"
STREAM = (
    "Of a stream, give each rank its own part by an __iter__ of your own, itertools.islice(stream, rank, None, "
    "world_size), in a plain DataLoader(dataset, batch_size)"
)


@dataclass(frozen=True)
class Shard:
    """Describes the part of the data that one rank reads.

    Attributes:
        loader: the batches, without repeats.
        examples: the number of examples in the data set that all ranks share, if a sampler divides one.
        places: of the examples in that data set, in the order of reading, (n,). None if the loader cannot say.
        note: what was changed, for a warning.
    """

    loader: Iterable[Any]
    examples: int | None = None
    places: Tensor | None = None
    note: str | None = None


def divided_by(loader: Any) -> str | None:
    """Return what divides a loader's data over several ranks, or None."""
    sampler = _sampler_of(loader)
    if isinstance(sampler, (ShardSampler, DistributedSampler)):
        ranks = sampler.size if isinstance(sampler, ShardSampler) else sampler.num_replicas
        return f"its {type(sampler).__name__}" if ranks > 1 else None
    for part in (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)):
        if getattr(part, "num_processes", 1) > 1 and hasattr(part, "process_index"):
            return f"accelerate ({type(part).__name__})"
    return "accelerate (DataLoaderDispatcher)" if _is_dispatched(loader) else None


def shard_of(loader: Iterable[Any], ranks: Reduce) -> Shard:
    """Return the part of the data that this rank reads, from what its loader says.

    Raises:
        InputError: the sampler was made for other ranks than these.
        UnsupportedError: one rank reads the data for all, or a stream is padded.
    """
    sampler, dataset = _sampler_of(loader), getattr(loader, "dataset", None)
    if isinstance(sampler, ShardSampler):
        _require_rank(sampler, sampler.rank, sampler.size, ranks)
        return Shard(loader, sampler.examples, _places(loader, sampler))
    if isinstance(sampler, DistributedSampler):
        _require_rank(sampler, sampler.rank, sampler.num_replicas, ranks)
        examples = len(sampler.dataset)  # type: ignore[arg-type]
        if sampler.drop_last or examples % sampler.num_replicas == 0:
            return Shard(loader, examples, _places(loader, sampler))
        return _dealt_out(loader, ranks, type(sampler).__name__, sampler)
    if _is_dispatched(loader):
        streamed = isinstance(dataset, IterableDataset)
        instead = f"{STREAM}, without accelerator.prepare" if streamed else _NOT_SENT
        raise UnsupportedError(f"accelerate reads this data on rank 0 and sends it to the others. {instead}.")
    if getattr(dataset, "num_processes", 1) > 1 and hasattr(dataset, "process_index"):
        raise UnsupportedError(
            f"accelerate's {type(dataset).__name__} repeats examples of a stream to give every rank equally many, and "
            f"they cannot be told apart. {STREAM}, without accelerator.prepare."
        )
    batches: Any = getattr(loader, "batch_sampler", None)
    if getattr(batches, "num_processes", 1) > 1 and hasattr(batches, "process_index"):
        _require_rank(batches, batches.process_index, batches.num_processes, ranks)
        inner = getattr(getattr(batches, "batch_sampler", None), "sampler", None)
        return _dealt_out(loader, ranks, "accelerate", inner, getattr(batches, "even_batches", True))
    return read_alone(loader)


def read_alone(loader: Iterable[Any]) -> Shard:
    """Return all that a loader gives, with the places of the examples in the data set where it can say them."""
    sampler, dataset = _sampler_of(loader), getattr(loader, "dataset", None)
    if isinstance(sampler, (ShardSampler, DistributedSampler)):
        return Shard(loader, None, _places(loader, sampler))
    if isinstance(dataset, Subset) and isinstance(sampler, SequentialSampler):
        return Shard(loader, None, _within(dataset))
    return Shard(loader)


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader: its own, and what its batches are made of."""
    found = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    found.append(getattr(found[1], "sampler", None))
    return list({id(each): each for each in found if each is not None}.values())


def _within(subset: Subset[Any]) -> Tensor:
    """Return the places of a subset's examples in the data set that it was taken from."""
    places = torch.as_tensor(list(subset.indices), dtype=torch.long)
    return _within(subset.dataset)[places] if isinstance(subset.dataset, Subset) else places


def reads_all_of(loader: Any) -> Any:
    """Return the data set that a plain DataLoader reads from end to end, or None."""
    plain = isinstance(loader, DataLoader) and isinstance(loader.sampler, (SequentialSampler, RandomSampler))
    return loader.dataset if plain and hasattr(loader.dataset, "__len__") else None


def places(shard: Shard, ranks: Reduce, start: int, n: int) -> Tensor:  # (n,)
    """Return the places in the data of n examples, from the one that this rank read as number `start`.

    They key the random draws. A loader that cannot say its places is taken to read every k-th example.
    """
    if shard.places is not None and start + n <= len(shard.places):
        return shard.places[start : start + n]
    return torch.arange(start, start + n) * ranks.size + ranks.rank


def _dealt_out(loader: Any, ranks: Reduce, what: str, order: Any, repeats: bool = True) -> Shard:
    """Return the same data without repeats, and in a random order if `order` is a sampler that shuffles.

    For the same seed and epoch, that order is the one of a `DistributedSampler`.
    """
    dataset, collate = loader.dataset, loader.collate_fn
    sizes = getattr(loader, "batch_size", None), getattr(loader.batch_sampler, "batch_size", None)
    size = next((size for size in sizes if isinstance(size, int)), None)
    if size is None:
        raise UnsupportedError(
            f"{what} {_REPEATS.split(';')[0]}, and its batches cannot be made again. Give a DataLoader with "
            "sampler=laplace.distributed.ShardSampler(dataset)."
        )
    shuffle = bool(getattr(order, "shuffle", isinstance(order, RandomSampler)))
    seed = order.seed if isinstance(order, DistributedSampler) else 0  # the same on all ranks
    sampler = ShardSampler(len(dataset), ranks.rank, ranks.size, shuffle=shuffle, seed=seed)
    sampler.set_epoch(getattr(order, "epoch", 0))
    kept = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    options = {name: getattr(loader, name) for name in kept if hasattr(loader, name)}  # Fabric's wrapper lacks some
    made = DataLoader(dataset, size, sampler=sampler, collate_fn=collate, generator=torch.Generator(), **options)
    return Shard(made, len(dataset), torch.tensor(list(sampler)), f"{what} {_REPEATS}" if repeats else None)


def _places(loader: Any, sampler: Iterable[int]) -> Tensor | None:
    """Return the places that a sampler gives, if batches are made of them in order."""
    return torch.tensor(list(sampler)) if type(getattr(loader, "batch_sampler", None)) is BatchSampler else None


def _sampler_of(loader: Any) -> Any:
    """Return the sampler of a loader, or that of its batch sampler."""
    own = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return inner if isinstance(inner, (ShardSampler, DistributedSampler)) else own


def _is_dispatched(loader: Any) -> bool:
    return type(loader).__name__ == "DataLoaderDispatcher"


def _require_rank(sampler: Any, rank: int, size: int, ranks: Reduce) -> None:
    if (rank, size) != (ranks.rank, ranks.size):
        raise InputError(
            f"the {type(sampler).__name__} is of rank {rank} of {size}; this is rank {ranks.rank} of {ranks.size} of "
            "the group. Make it with the rank and size of the group that fits."
        )
