"""Decide which rows of a batch count, and how much: ignored labels, masks, weights.

If an example has several rows (positions), rows that do not count are left out, so that padding costs nothing and
changes nothing. If it has one row, the row stays, with weight 0.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from laplace.backprop.gradients import Forward
from laplace.checks import all_finite, how_many
from laplace.errors import InputError
from laplace.likelihoods.base import Likelihood, Targets
from laplace.network.batches import Batch
from laplace.network.inputs import MASK
from laplace.predictive.positions import Positions


def counted(forward: Forward, batch: Batch, likelihood: Likelihood) -> tuple[Forward, Targets, Tensor | None]:
    """Return a run and its labels, checked, without the rows that do not count.

    Last comes the number of the example, within the batch, that each row belongs to; None if each example is one row.
    """
    at = forward.positions
    labels, kept = labelled_rows(at, batch, likelihood, forward.outputs.device)
    of = torch.arange(at.n * at.count) if kept is None else kept
    forward = forward if kept is None else forward.counting(kept)
    return forward, checked(forward.outputs, labels, likelihood), of // max(at.count, 1) if at.several else None


def labelled_rows(
    at: Positions, batch: Batch, likelihood: Likelihood, device: torch.device
) -> tuple[Batch, Tensor | None]:
    """Return the labels, weights and so on of the rows that count, and the indices of these rows. None means all."""
    y = at.labels(batch.y.to(device))
    given = {key: at.given(value.to(device), key) for key, value in batch.given.items() if key != MASK}
    if MASK in batch.given:
        given["weights"] = _masked(given.get("weights"), at.mask(batch.given[MASK].to(device)))
    labels = replace(batch, y=y, given=given)
    if not at.several:
        return labels, None
    counts = torch.ones(len(y), dtype=torch.bool, device=device)
    if likelihood.ignored is not None:
        counts &= (y.flatten(1) != likelihood.ignored).any(1) if y.dim() > 1 else y != likelihood.ignored
    if "weights" in given:
        counts &= (given["weights"].flatten(1) != 0).any(1) if given["weights"].dim() > 1 else given["weights"] != 0
    kept = None if bool(counts.all()) else counts.nonzero().flatten()
    labels = labels if kept is None else labels.at(kept)
    if "weights" in given and bool((labels.given["weights"] == 1).all()):
        labels = replace(labels, given={key: value for key, value in labels.given.items() if key != "weights"})
    return labels, kept


def _masked(weights: Tensor | None, mask: Tensor) -> Tensor:
    """Return the weights, set to 0 where the mask is false. A wrong length is refused later."""
    if weights is None or len(weights) != len(mask):
        return mask if weights is None else weights
    return weights * mask.reshape(-1, *[1] * (weights.dim() - 1))


def checked(f: Tensor, labels: Batch, likelihood: Likelihood) -> Targets:
    """Return the labels of rows of outputs. Raises InputError if they or the outputs do not fit."""
    if not len(f):
        likelihood.check_outputs(f)
        return Targets(labels.y)
    check_finite(f.detach(), "the network's outputs hold", start=labels.start)
    return likelihood.targets(f, labels)


def check_finite(f: Tensor, what: str, rows_each: int = 1, start: int = 0, why: str = "") -> None:
    """Refuse NaN and infinity, naming the examples. They are counted from `start`, with `rows_each` rows each.

    `why` is added to the message.
    """
    if not all_finite(f):
        rows = sorted({start + row // rows_each for row in (~f.isfinite()).any(1).nonzero().flatten().tolist()})
        raise InputError(
            f"{what} NaN or infinite values for {how_many(len(rows), 'example')}, the first is number {rows[0]} of the "
            f"batch.{why}"
        )
