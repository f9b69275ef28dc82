"""Fit the posterior that a `Laplace` object holds: `la.fit(loader)`, resumable from a file.

It stands above `inference.fit`, which makes the sums, because a long fit writes its progress to a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from laplace.checkpoints.progress import progress_of
from laplace.checks import flag, flag_or_none
from laplace.distributed import OWN, Group, reduce_over
from laplace.distributed.together import jointly
from laplace.inference.fit import fit as sums_of
from laplace.inference.settings import require_same_settings
from laplace.inference.values import Holder
from laplace.keywords import refuse_unknown_keywords
from laplace.linalg.autocast import plainly
from laplace.network.datasets import doubts_about
from laplace.network.loaders import training_data

Fits = TypeVar("Fits", bound=Holder)


@jointly("la.fit")
@refuse_unknown_keywords
@plainly
def fit(
    la: Fits,
    /,
    train_loader: Any,
    override: Any = True,
    progress_bar: bool | None = None,
    *,
    y: Any = None,
    generator: torch.Generator | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 100,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    batch_size: int | None = None,
    group: Group = OWN,
    shard_factors: bool = False,
) -> Fits:
    """Run the network over the data and keep the sums of its curvature, at the weights that it has now.

    If a batch is refused, the error names it, and the posterior stays as it was.

    Args:
        train_loader: a DataLoader, a list, or (for structures that read the data once) an iterator of batches: pairs
            `(x, y)`, `(x, y, weights)` with one weight per example, or mappings. Or the inputs of all data, as arrays,
            DataFrames or tensors, followed by their labels: `la.fit(x, y)`. Or a dataset of single examples, a
            Lightning DataModule, or a `transformers.Trainer`, whose training data is read in order.
        override: False adds the data to that of earlier fits. In `la.fit(x, y)`, the labels.
        progress_bar: whether to show a progress bar; None shows one in a terminal after a few seconds.
        y: the labels, if `train_loader` is the inputs of all data. The same as the second argument.
        generator: the random generator of curvature 'mc' and 'sketch'. By default torch's global one.
        checkpoint: a file to which the partial sums are written. After an interruption the same call continues from
            there. The file is removed at the end.
        every: how many batches lie between two writes.
        collate_fn: for a dataset, a function from a list of examples to a batch, such as a data collator of
            transformers.
        batch_size: for a dataset or `la.fit(x, y)`, the number of examples in a batch. By default 32 or 128.
        group: the process group whose ranks fit one posterior together, each on its own part of the data, such as
            `torch.distributed.group.WORLD`. With None, the posterior covers only the batches of this process.
        shard_factors: with `group`, for structures with a block per tensor: whether the factors of each layer stay on
            one rank, for a posterior that is larger than the memory of one. All ranks must then predict and tune
            together, with `group=` or within `laplace.distributed.together(group)`.

    Returns:
        The object itself.

    Raises:
        InputError: a batch does not fit, or the loader has no example.
        ModelError: the network does not allow the chosen weights or structure; the message names the layer.
        MemoryBudgetError: the sums would not fit into memory.
        UnsupportedError: `override=False`, but the sums of the structure do not add, or the network has changed;
            `shard_factors=True`, but the structure cannot be divided.
        CheckpointError: the file `checkpoint` belongs to another fit.
        RankError: another rank of `group` has failed; the message names it and its error.
    """
    for doubt in doubts_about(train_loader, la.runner.model, la.runner.spec.likelihood):
        la.runner.warn_once(doubt, doubt)
    train_loader, override = training_data(train_loader, override, y, batch_size, collate_fn)
    before = None if flag(override, "override") else la.values.fit
    reduce = reduce_over(group, la.runner.spread, train_loader)
    if group is OWN:
        la.runner.notice_processes()
    journal = None
    if checkpoint is not None:
        journal = partial(progress_of, la.runner, path=checkpoint, every=every, reduce=reduce)
    require_same_settings(la, reduce)
    if flag(shard_factors, "shard_factors") and (group is OWN or group is None):
        la.runner.warn_once(
            "shard_factors",
            "shard_factors=True has no effect here: without group=, this process keeps all factors. Write "
            "group=torch.distributed.group.WORLD, if several processes should divide them.",
        )
    fit = sums_of(
        la.runner,
        train_loader,
        la.values.prior,
        before,
        progress_bar=flag_or_none(progress_bar, "progress_bar"),
        generator=generator,
        journal=journal,
        reduce=reduce,
        shard_factors=flag(shard_factors, "shard_factors"),
    )
    again = before is None and not isinstance(train_loader, Iterator)
    la.values = replace(la.values, fit=fit, training_data=train_loader if again else None)
    return la
