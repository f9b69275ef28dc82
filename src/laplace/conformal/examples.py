"""Read labelled examples, and put predictions and their labels into rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace.errors import InputError, MissingKeyError, UnsupportedError, within
from laplace.inference.predict import predict
from laplace.inference.source import Source
from laplace.likelihoods.base import check_range, class_indices, shaped_like_outputs
from laplace.network.arrays import as_tensors
from laplace.network.graphs import is_graph, labels_in
from laplace.network.inputs import MASK, reads_mask
from laplace.network.loaders import ArrayBatches, held_out_batches, is_pair
from laplace.network.progress import with_bar
from laplace.predictive.prediction import Prediction
from laplace.predictive.reshape import PredictionAtPositions

AnyPrediction = Prediction | PredictionAtPositions


def labelled(
    source: Source, data: Any, options: dict[str, Any], progress_bar: bool | None
) -> Iterator[tuple[Prediction, Tensor]]:
    """Yield the prediction and the labels of each batch of a loader, or of whole data (x, y), in rows."""
    loader = ArrayBatches(*data) if is_pair(data) else held_out_batches(data)
    if isinstance(loader, Tensor) or not hasattr(loader, "__iter__"):
        raise InputError(
            f"a {type(data).__name__} has no labels. Give a loader of batches (x, y), or write conformal(x, y=y)."
        )
    for index, batch in enumerate(with_bar(loader, progress_bar, "conformal")):
        x, y, mask = _split(batch, source, index)
        if len(y):
            with within(f"batch {index}"):
                rows = rows_of(predict(source, x, **options))
                if mask is not None:
                    rows, y = _counting(rows, y, mask)
                target = targets_of(rows, y)
            yield rows, target


def _split(batch: Any, source: Source, index: int) -> tuple[Any, Tensor, Tensor | None]:
    """Return the inputs and the labels of a batch, and which labels count if it says so."""
    keys, model = source.frame.keys, getattr(source, "model", None)
    given: dict[str, Any]
    if is_graph(batch):
        x, (y, given) = batch, labels_in(batch, index, keys.given)
    elif isinstance(batch, Mapping):
        if keys.y not in batch:
            raise MissingKeyError(
                f"batch {index} is a mapping with keys {sorted(map(str, batch))}, none of which is the label key "
                f"{keys.y!r}. Say where the labels are: Laplace(..., dict_key_y='...')."
            )
        theirs = isinstance(model, nn.Module) and reads_mask(model, batch, keys)
        apart = ("weights",) if theirs else ("weights", MASK)
        x, y, given = batch, batch[keys.y], {key: batch[key] for key in apart if key in batch}
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)) and len(batch) in (2, 3):
        x, y, given = batch[0], batch[1], {} if len(batch) == 2 else {"weights": batch[2]}
    else:
        raise InputError(
            f"batch {index} is a {type(batch).__name__}; a pair (x, y) or a mapping with labels is needed."
        )
    mask = given.pop(MASK, None)
    if given:
        raise UnsupportedError(
            f"batch {index} has weights. A guarantee for exchangeable examples counts each once; leave the weights out."
        )
    y = as_tensors(y)
    if not isinstance(y, Tensor) or not y.dim():
        raise InputError(
            f"the labels of batch {index} are a {type(y).__name__}; a tensor with one per example is needed."
        )
    return x, y, None if mask is None else torch.as_tensor(as_tensors(mask))


def _counting(rows: Prediction, y: Tensor, mask: Tensor) -> tuple[Prediction, Tensor]:
    """Return the predictions and labels that count."""
    if mask.shape != (len(rows.mean),) or len(y) != len(rows.mean):
        raise InputError(
            f"there are {len(rows.mean)} predictions, {len(y)} labels and a mask of shape {tuple(mask.shape)}; one of "
            "each per example is needed."
        )
    kept = mask.to(rows.mean.device).bool().nonzero().flatten()
    return rows[kept], y.to(kept.device)[kept]


def rows_of(prediction: AnyPrediction) -> Prediction:
    """Return a prediction with one row per example. Refuse several positions per example."""
    if isinstance(prediction, Prediction):
        return prediction
    if prediction.positions.several:
        raise UnsupportedError(
            f"the network has outputs at positions {prediction.positions.shape}. Positions of one example are not "
            "exchangeable, so nothing can be promised for each; calibrate a network with one prediction per example."
        )
    return prediction.rows


def shaped_like(prediction: AnyPrediction, rows: Tensor) -> Tensor:  # (N, G) -> the shape of the mean
    """Return rows in the shape and dtype of the prediction's mean."""
    rows = rows.to(prediction.mean.dtype)
    return rows if isinstance(prediction, Prediction) else prediction.positions.shaped(rows)


def targets_of(rows: Prediction, y: Any) -> Tensor:  # (N, G)
    """Return the labels that go with a prediction: class indices, or numbers in float64."""
    y = as_tensors(y)
    if not isinstance(y, Tensor):
        raise InputError(f"the labels are a {type(y).__name__}; a tensor or an array is needed.")
    y, mean = y.detach().to(rows.mean.device), rows.mean.detach().double()
    if len(y) != len(mean):
        raise InputError(f"there are {len(y)} labels for {len(mean)} predictions; one per example is needed.")
    if rows.kind == "classes":
        y = class_indices(len(mean), y)
        check_range(y, mean.shape[1], f"{mean.shape[1]} classes")
        return y.unsqueeze(1)
    y = shaped_like_outputs(mean, y.double() if y.dtype is torch.bool else y, rows.kind)
    if rows.kind != "labels":
        return y
    if not ((y == 0) | (y == 1)).all():
        raise InputError(f"labels must be 0 or 1, got {y.min().item():g}..{y.max().item():g}.")
    return y.long()


def candidates(rows: Prediction) -> Tensor:  # (N, G, K)
    """Return the probabilities among which sets choose: (N, 1, C) of classes, (N, C, 2) of labels 0 and 1."""
    p = rows.mean.detach().double()
    return p.unsqueeze(1) if rows.kind == "classes" else torch.stack([1 - p, p], -1)
