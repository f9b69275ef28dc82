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
from laplace.inference.fit import fit as sums_of
from laplace.inference.values import Holder
from laplace.linalg.autocast import plainly
from laplace.network.loaders import training_data
from laplace.spec import refuse_unknown_keywords

Fits = TypeVar("Fits", bound=Holder)


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

    Where a batch is refused, the error names it, and the posterior stays as it was.

    Args:
        train_loader: batches, read once or as often as the structure needs: pairs `(x, y)`, or `(x, y, weights)`
            with one weight per example, or mappings. A DataLoader, a list, or (for one run) an iterator. Or the
            inputs of all data, as arrays, DataFrames or tensors, with labels beside them: `la.fit(x, y)`. Or a
            dataset of single examples, a Lightning DataModule, or a `transformers.Trainer`, whose training data is
            read in order.
        override: False adds the data to what was seen before. In `la.fit(x, y)`, the labels.
        progress_bar: whether one is shown; None shows one in a terminal after a few seconds.
        y: the labels, if `train_loader` is the inputs of all data; the same as a second argument.
        generator: what curvature 'mc' and 'sketch' draw from; torch's own if left out.
        checkpoint: a file to which the sums so far are written; after an interruption the same call goes on from
            there, and removes it.
        every: how many batches apart that is.
        collate_fn: of a dataset, makes a batch of a list of examples, as a data collator of transformers does.
        batch_size: of a dataset or of `la.fit(x, y)`, examples in a batch; 32 or 128 if left out.
        group: the process group whose ranks fit one posterior together, each reading its own part of the data, as
            `torch.distributed.group.WORLD`. None keeps the posterior of this process's own batches.
        shard_factors: of structures with a block per tensor, with `group`: whether the factors of each layer stay on
            one rank, for a posterior that is larger than the memory of one. All ranks must then predict and tune
            together, with `group=` or within `laplace.distributed.together(group)`.

    Returns:
        The object itself.

    Raises:
        InputError: a batch that does not fit, or a loader without an example.
        ModelError: a network that cannot be treated as asked.
        MemoryBudgetError: sums that would not fit into memory.
        UnsupportedError: `override=False` of a structure whose sums do not add, or of a network that has changed;
            `shard_factors` of a structure that cannot be divided.
        CheckpointError: a file `checkpoint` of another fit.
        RankError: another rank of `group` has failed; the message names it and its error.
    """
    train_loader, override = training_data(train_loader, override, y, batch_size, collate_fn)
    before = None if flag(override, "override") else la.values.fit
    reduce = reduce_over(group, la.runner.spread, train_loader)
    if group is OWN:
        la.runner.notice_processes()
    journal = None
    if checkpoint is not None:
        journal = partial(progress_of, la.runner, path=checkpoint, every=every, reduce=reduce)
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
