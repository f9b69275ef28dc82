"""Take a sample of the training data, spread over all of it, as batches that the network can run on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from laplace.distributed import Reduce
from laplace.distributed.shards import Shard
from laplace.errors import InputError, within
from laplace.inference.runner import Runner
from laplace.inference.shared import Warns, divided
from laplace.inference.targets import counted
from laplace.network.batch_merging import Group, gathered
from laplace.network.batches import Batch
from laplace.network.datasets import indices_of
from laplace.posterior.posterior import Posterior
from laplace.tuning.validation import Labelled

_NUMBERS: Final = 2**18  # in the inputs of batches that are joined
_BATCHES: Final = 32  # of a list of many batches, how many are read


@dataclass(frozen=True)
class Sample:
    """Takes some examples of a loader.

    A DataLoader over a map-style dataset gives examples drawn from everything that its sampler names. A list of batches
    gives some examples of batches spread over the list. Anything else gives its first batches.

    Attributes:
        loader: What `fit` was given, or the like.
        most: How many examples at most.
        seed: Which examples of a dataset are drawn.
    """

    loader: Iterable[Any]
    most: int
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.loader, Iterator):
            raise InputError(
                f"train_loader is a {type(self.loader).__name__}, which can be read once, and tuning reads it more "
                "than once. Give a DataLoader or a list of batches."
            )

    def batches(self, runner: Runner, what: str, progress_bar: bool | None = None) -> Iterator[Batch]:
        """Yield the batches of the sample, with at most `most` examples in all.

        Small ones are joined up to the size of the loader's own, or further while their inputs are small: a look at a
        few examples would otherwise spend its time on calling the network.
        """
        room = 1

        def some() -> Iterator[Batch]:
            nonlocal room
            loader, each = self._source()
            left = self.most
            for batch in runner.batches(loader, progress_bar, what):
                small = _NUMBERS * len(batch.y) // max(1, sum(t.numel() for t in batch.tensors()))
                room = max(len(batch.y), min(small, self.most))
                batch = _some(batch, min(left, each))
                left -= len(batch.y)
                yield batch
                if left <= 0:
                    return

        for group in gathered(some(), lambda: room):
            yield group.joined() if isinstance(group, Group) else group

    def reading(self) -> Iterable[Any]:
        """Return whole batches as `fit` takes them, with about `most` examples in all."""
        loader = self.loader
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            return self._source()[0]
        if isinstance(loader, Sequence) and len(loader):
            total = sum(_length(batch) for batch in loader)
            count = max(1, min(len(loader), round(len(loader) * self.most / max(total, 1))))
            return [loader[i] for i in torch.linspace(0, len(loader) - 1, count).round().long().tolist()]
        return _first(loader, self.most)

    def runs(self, runner: Runner, posterior: Posterior, what: str, progress_bar: bool | None = None) -> Labelled:
        """Yield runs of the network on the sample, with their labels."""
        for batch in self.batches(runner, what, progress_bar):
            with within(f"{what} batch {batch.index}"):
                yield from labelled(runner, posterior, batch)

    def _source(self) -> tuple[Iterable[Any], int]:
        """Return batches to read, and how many examples to take of each."""
        loader = self.loader
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            indices = indices_of(loader)
            if indices is not None:
                return self._drawn(loader, indices), self.most
        if isinstance(loader, Sequence) and len(loader):
            count = min(len(loader), _BATCHES, self.most)
            total = sum(_length(batch) for batch in loader)
            if total > self.most:
                where = torch.linspace(0, len(loader) - 1, count).round().long().tolist()
                return [loader[i] for i in where], self.most // count
        return loader, self.most

    def _drawn(self, loader: DataLoader[Any], indices: Sequence[int]) -> Iterable[Any]:
        """Return batches of some examples."""
        return _read(loader, [indices[i] for i in _chosen(len(indices), self.most, self.seed)])


def of_all_ranks(loader: Iterable[Any], most: int, reduce: Reduce, who: Warns, seed: int = 0) -> Iterable[Any]:
    """Return up to about `most` examples of all ranks' data, the same on each rank. One process returns all its data.

    Where samplers can say the places of the examples in the data set, these are the ones that one process would draw.
    """
    if reduce.size == 1:
        return loader
    shard = divided(loader, reduce, who)
    read = reduce.agree(lambda: [*_part(shard, most, -(-most // reduce.size), seed)])
    return [batch for of_rank in read for batch in of_rank]


def _part(shard: Shard, most: int, share: int, seed: int) -> Iterable[Any]:
    """Return what this rank has of a sample of `most` examples; about `share` where it cannot say what it has."""
    loader = shard.loader
    if not isinstance(loader, DataLoader) or shard.examples is None or shard.places is None:
        return Sample(loader, share, seed).reading()
    chosen = torch.tensor(_chosen(shard.examples, most, seed))
    return _read(loader, chosen[torch.isin(chosen, shard.places)].tolist())


def _chosen(n: int, most: int, seed: int) -> list[int]:
    """Return which of n examples are in a sample of `most`."""
    order = torch.arange(n) if n <= most else torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[:most].tolist()


def _read(loader: DataLoader[Any], rows: Sequence[int]) -> Iterable[Any]:
    """Return batches of these rows of a data set, read as the loader reads them."""
    dataset, each = loader.dataset, loader.batch_size or 128
    if type(dataset) is TensorDataset and loader.collate_fn is default_collate:  # all at once: it is much faster
        return [[t[rows[i : i + each]] for t in dataset.tensors] for i in range(0, len(rows), each)]
    return DataLoader(
        dataset,
        batch_size=each,
        sampler=rows,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # the caller's random numbers stay as they are
    )


def labelled(runner: Runner, posterior: Posterior, batch: Batch) -> Labelled:
    """Yield runs of the network on parts of a batch, with their labels."""
    start, n = 0, len(batch.y)
    for whole in runner.uncut(posterior.fit, batch.inputs):
        stop = start + whole.positions.n
        part = batch if n <= stop - start else batch.labels(start, stop)
        run, targets, _ = counted(whole, part, runner.spec.likelihood)
        start = stop
        yield from ((part, targets.part(rows)) for part, rows in run.cut() if len(run.outputs))
    if start != n:
        raise InputError(f"{n} labels for {start} inputs.")


def _some(batch: Batch, most: int) -> Batch:
    """Return up to `most` examples, evenly spaced over the batch; a batch that cannot be split stays whole."""
    n = len(batch.y)
    if n <= most or batch.inputs.size != n:
        return batch
    index = torch.linspace(0, n - 1, most).round().long()
    return replace(batch.at(index.to(batch.y.device)), inputs=batch.inputs.at(index))


def _first(loader: Iterable[Any], most: int) -> list[Any]:
    """Return the first batches, until there are `most` examples."""
    found: list[Any] = []
    left = most
    for batch in loader:
        found.append(batch)
        left -= _length(batch)
        if left <= 0:
            break
    return found


def _length(batch: Any) -> int:
    """Return the number of examples in a batch as a loader gives it; 1 if it is unknown."""
    parts = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, (tuple, list)) else ()
    return max((len(part) for part in parts if isinstance(part, Tensor) and part.dim()), default=1)
