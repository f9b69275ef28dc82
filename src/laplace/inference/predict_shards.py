"""Put the predictions of several processes together, each of which has predicted its own part of the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from laplace.distributed import Reduce
from laplace.distributed.shards import Shard
from laplace.errors import InputError
from laplace.inference.shared import divided
from laplace.inference.source import Source
from laplace.linalg.sampling import Draws, seed_from
from laplace.network.batches import is_one_batch
from laplace.network.digests import Digest
from laplace.network.inputs import Inputs
from laplace.network.pytree import tensors_in
from laplace.predictive.mixtures import Outputs, joined
from laplace.predictive.positions import Positions
from laplace.predictive.reshape import Reshaper

Batch = tuple[str, Inputs]  # where it is, for errors, and what the network is called with
Part = tuple[Outputs, Tensor | None]  # outputs, and the mean through the link
_ONCE = (
    "Give each rank its own part: DataLoader(dataset, batch_size, sampler=laplace.distributed.ShardSampler(dataset)). "
    "If every rank should predict all of it, leave out group=."
)
Report = tuple[Outputs, Tensor | None, Positions, Tensor | None]


def same_draws(draws: Draws, reduce: Reduce) -> Draws:
    """Return draws that are the same on all ranks: those that the first would make in one process."""
    source = torch.default_generator if draws.generator is None else draws.generator
    first = torch.Generator(source.device)
    first.set_state(reduce.share(0, source.get_state()))
    seed_from(source)  # so that the next call draws others
    return Draws(draws.n, first, draws.apart)


def divided_inputs(x: Any, reduce: Reduce, source: Source) -> Shard:
    """Return the part of the inputs that this rank predicts. Refuse a data set that every rank reads whole.

    One batch, as a tensor, is this rank's own, and may be empty. If all ranks have the same, it may be meant so.
    """
    empty = isinstance(x, Tensor) and x.shape[:1] == (0,)
    given = reduce.agree(lambda: _digest(x) if is_one_batch(x) else None)
    if any(digest is not None for digest in given):
        if given[0] and len(set(given)) == 1 and reduce.rank == 0:
            source.warn_once(
                "the same inputs",
                f"all {reduce.size} ranks predict the same inputs, which come {reduce.size} times in the result. "
                "With group=, each rank gives inputs of its own, x[:0] if it has none. If every rank wants the "
                "predictions of x: `with laplace.distributed.together(group): la.predict(x)`.",
            )
        return Shard([] if empty else x)
    return divided(x, reduce, source, "would be predicted")


def _digest(x: Any) -> str:
    """Return a digest of one batch of inputs; nothing of an empty one, or of one without tensors."""
    tensors = [t for t in tensors_in(x) if t.numel()]
    return Digest().add(*tensors).hex() if tensors else ""


def marked(batches: Iterable[Batch], marks: list[float]) -> Iterator[Batch]:
    """Yield a rank's batches. Notes a sum of each that comes from a loader."""
    for where, inputs in batches:
        if where:
            marks.append(sum(float(t.double().sum()) for t in inputs.tensors() if not t.is_complex()))
        yield where, inputs


def parts_in_order(
    parts: Sequence[Part], shape: Reshaper, shard: Shard, marks: Sequence[float], reduce: Reduce
) -> tuple[list[Part], Reshaper]:
    """Return the predictions of all ranks in the order of the data; rank after rank where no loader can say it.

    Raises:
        InputError: two ranks have predicted the same batches, or all of them more examples than the data set has.
    """
    found = reduce.agree(lambda: (_report(parts, shape, shard.places), math.fsum(marks) if marks else None))
    _require_each_once([(None if report is None else report[2].n, mark) for report, mark in found], shard.examples)
    reports = [report for report, _ in found if report is not None]
    if not reports:
        return [], shape
    outputs = joined([outputs for outputs, *_ in reports])
    means = [mean for _, mean, *_ in reports if mean is not None]
    mean = torch.cat(means) if means else None
    whole = Reshaper([positions for *_, positions, _ in reports])
    places = [at for *_, at in reports]
    known = [at for at in places if at is not None]
    if len(known) == len(places):
        count = whole.positions.count
        order = (torch.cat(known).argsort().unsqueeze(1) * count + torch.arange(count)).flatten()
        outputs = outputs.map_rows(lambda t: t[order.to(t.device)])
        mean = None if mean is None else mean[order.to(mean.device)]
    return [(outputs, mean)], whole


def in_step(batches: Iterable[Batch], reduce: Reduce) -> Iterator[Batch]:
    """Yield the same batches on all ranks, for a posterior whose factors are on several.

    Raises:
        InputError: the ranks have different inputs.
    """
    for batch in chain(batches, [None]):
        told = reduce.agree(lambda batch=batch: None if batch is None else Digest().add(*batch[1].tensors()).hex())
        if len(set(told)) > 1:
            raise InputError(
                "the ranks predict different inputs, and the factors of this posterior stay on several ranks "
                "(shard_factors=True): each adds the variances of its own layers, for the same inputs. Give all ranks "
                "the same: a tensor, or DataLoader(dataset, batch_size) without a sampler that divides it."
            )
        if batch is not None:
            yield batch


def _require_each_once(ranks: Sequence[tuple[int | None, float | None]], examples: int | None) -> None:
    """Refuse inputs that would be predicted more than once. Of each rank comes their number, and the sum of them."""
    for (i, (n, mark)), (j, (m, other)) in combinations(enumerate(ranks), 2):
        same = mark is not None and other is not None and math.isclose(mark, other, rel_tol=1e-6, abs_tol=1e-12)
        if n and n == m and same:
            raise InputError(
                f"ranks {i} and {j} predict the same {n} examples, which would come twice in the result. {_ONCE}"
            )
    total = sum(n or 0 for n, _ in ranks)
    if examples is not None and total > examples:
        raise InputError(
            f"the ranks predict {total} examples together, and the data set has {examples}: some would come twice in "
            f"the result. {_ONCE}"
        )


def _report(parts: Sequence[Part], shape: Reshaper, places: Tensor | None) -> Report | None:
    if not parts:
        return None
    outputs, positions = joined([outputs for outputs, _ in parts]), shape.positions
    means = [mean for _, mean in parts if mean is not None]
    at = places[: positions.n] if places is not None and len(places) >= positions.n else None
    sent = outputs.map_rows(lambda t: t)  # without products with a covariance, which cannot be sent
    return sent, torch.cat(means) if means else None, positions, at
