"""Turn what holds training data into batches: a `transformers.Trainer`, a dataset with its collator, or a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
)

from laplace.checks import shown, whole_number
from laplace.distributed.shards import divided_by
from laplace.errors import InputError, OptionError

BATCH_SIZE: Final = 32  # of a dataset, if the user names none


def loader_of(
    data: Any, collate_fn: Callable[[list[Any]], Any] | None = None, batch_size: int | None = None
) -> Iterable[Any]:
    """Return the batches of `data`.

    Args:
        data: a trainer of transformers, whose training data is read in order with its own collator; a dataset of single
            examples; or batches, which are returned as they are.
        collate_fn: for a dataset, a function from a list of examples to a batch. torch's own by default.
        batch_size: for a dataset, the number of examples in a batch. 32 by default.
    """
    if collate_fn is not None and not callable(collate_fn):
        raise OptionError(f"collate_fn={shown(collate_fn)} must be a function from a list of examples to a batch.")
    options = {"collate_fn": collate_fn, "batch_size": batch_size}
    if _is_dataset(data, collate_fn is not None):
        size = BATCH_SIZE if batch_size is None else whole_number(batch_size, "batch_size")
        return DataLoader(data, size, collate_fn=collate_fn or _collated, generator=torch.Generator())
    if given := [name for name, value in options.items() if value is not None]:
        raise OptionError(
            f"{given[0]}= is for a dataset of single examples, and batch_size= for la.fit(x, y), too; a "
            f"{type(data).__name__} makes its batches itself. Leave it out, or give the dataset."
        )
    if callable(getattr(data, "get_train_dataloader", None)):
        return _training_data_of(data)
    return data


def held_out_of(data: Any) -> Any:
    """Return batches of data that was not trained on: of a trainer of transformers, its evaluation data.

    A dataset of single examples is joined to batches by torch's collator; anything else is returned as it is.
    """
    if not callable(getattr(data, "get_eval_dataloader", None)):
        return loader_of(data) if _is_dataset(data, False) else data
    given = getattr(data, "eval_dataset", None)
    if given is None or isinstance(given, Mapping):
        came = "no eval_dataset" if given is None else f"several evaluation datasets, {', '.join(map(str, given))}"
        raise InputError(
            f"this {type(data).__name__} has {came}, and its training data is not taken where held-out data is needed. "
            "Write trainer.get_eval_dataloader(dataset) with the dataset that is meant."
        )
    return in_order(data.get_eval_dataloader())


def in_order(loader: Iterable[Any]) -> Iterable[Any]:
    """Return a loader of the same examples, each once and in their order, with the same collator and batch size.

    Data that is divided over several processes is read whole. A loader over a stream, of another class, or whose
    dataset makes the batches, is returned as it is. No random number is drawn.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    everything = range(len(loader.dataset))  # type: ignore[arg-type]
    indices = everything if divided_by(loader) else indices_of(loader)
    if indices is None:
        return loader
    sizes = loader.batch_size, getattr(loader.batch_sampler, "batch_size", None), BATCH_SIZE
    return DataLoader(
        loader.dataset,
        next(size for size in sizes if isinstance(size, int)),
        sampler=None if indices == everything else sorted(indices),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # a loader draws a seed when it is read
    )


def is_shuffled(loader: Any) -> bool:
    """Return whether a DataLoader reads its examples in a random order."""
    if not isinstance(loader, DataLoader):
        return False
    sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    return isinstance(sampler, (RandomSampler, SubsetRandomSampler))


def indices_of(loader: DataLoader[Any]) -> Sequence[int] | None:
    """Return which examples of its dataset a loader reads; None where it does not batch them by number.

    Samplers that draw are not asked: that would move the random numbers of the caller.
    """
    sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if isinstance(sampler, (SequentialSampler, RandomSampler)):
        return range(len(sampler.data_source))  # type: ignore[arg-type]
    if isinstance(sampler, SubsetRandomSampler):
        return list(sampler.indices)
    if sampler is None:
        return None
    with torch.random.fork_rng(devices=[]):
        found = list(sampler)
    indices = [i for part in found for i in (part if isinstance(part, (list, tuple)) else [part])]
    return sorted(set(indices)) if all(isinstance(i, int) for i in indices) else None


def _training_data_of(trainer: Any) -> Iterable[Any]:
    """Return the training data of a trainer of transformers: its collator is kept, and its shuffling is not."""
    if getattr(trainer, "train_dataset", None) is None:
        raise InputError(
            f"this {type(trainer).__name__} has no train_dataset. Write la.fit(dataset, collate_fn=...), or give the "
            "trainer its data."
        )
    return in_order(trainer.get_train_dataloader())


def doubts_about(trainer: Any, model: nn.Module, likelihood: Any) -> Iterator[str]:
    """Yield in what a trainer of transformers and a posterior differ: the network, or how labels are smoothed."""
    trained = getattr(trainer, "model", None)
    if not callable(getattr(trainer, "get_train_dataloader", None)) or not isinstance(trained, nn.Module):
        return
    own = {id(p) for p in trained.parameters()}
    if own and not any(id(p) in own for p in model.parameters()):
        yield (
            f"this {type(trainer).__name__} trains another network than the posterior's: no weight is shared. Its data "
            "is read all the same. Write Laplace(trainer.model, ...) if that network is meant."
        )
    trained_with = float(getattr(getattr(trainer, "args", None), "label_smoothing_factor", 0) or 0)
    smoothing = getattr(likelihood, "label_smoothing", None)
    if smoothing is not None and trained_with > 0 and abs(trained_with - smoothing) > 1e-6:
        yield (
            f"this {type(trainer).__name__} trains with label_smoothing_factor={trained_with:g}, the likelihood with "
            f"label_smoothing={smoothing:g}. Write Laplace(model, Categorical(label_smoothing={trained_with:g}), ...) "
            "for the same loss."
        )


def _collated(examples: list[Any]) -> Any:
    """Join examples as torch does."""
    try:
        return default_collate(examples)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"torch cannot join the examples of this dataset: {error}. Write la.fit(dataset, collate_fn=...) with a "
            "function that makes a batch of a list of examples, such as a data collator of transformers, which pads."
        ) from error


def _is_dataset(data: Any, with_collator: bool) -> bool:
    """Return whether `data` holds single examples: a dataset of torch, or a sequence that comes with a collator."""
    if isinstance(data, Dataset):
        return with_collator or not isinstance(data, IterableDataset)
    known = isinstance(data, (Tensor, DataLoader)) or hasattr(data, "get_train_dataloader")
    return with_collator and not known and hasattr(data, "__getitem__") and hasattr(data, "__len__")
