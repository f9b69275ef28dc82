"""Write predictions into pandas tables, a row for each input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.checks import shown
from laplace.errors import OptionError

if TYPE_CHECKING:
    from laplace.predictive.prediction import Prediction


def table_of(prediction: Prediction, names: Sequence[str] | None, level: float | None) -> Any:
    """Return the summaries of a prediction as a DataFrame.

    Classes have their label, the probability of each class, and both uncertainties. Others have mean, standard
    deviation and both uncertainties of each output; with several outputs, a name follows each: `mean_height`.
    """
    pandas, kind, c = _pandas(), prediction.kind, prediction.mean.shape[1]
    if names is not None and (isinstance(names, str) or len(names) != c):
        raise OptionError(f"names={shown(names)} must be {c} names, one for each class or output.")
    if names is not None and len({str(name) for name in names}) < c:
        raise OptionError(f"names={shown(names)} has a name twice; each class or output needs one of its own.")
    words = [str(name) for name in (range(c) if names is None else names)]
    columns: dict[str, Any] = {}

    def add(name: str, values: Tensor) -> None:  # (N,) or (N, C)
        values = values.detach().cpu()
        values = values.float() if values.dtype is torch.bfloat16 else values
        if values.dim() == 1:
            columns[name] = values.numpy()
            return
        for word, column in zip(words, values.T, strict=True):
            columns[name if len(words) == 1 and names is None else f"{name}_{word}"] = column.numpy()

    if kind == "classes":
        label = prediction.label.tolist()
        columns["label"] = label if names is None else [names[i] for i in label]
        add("p", prediction.mean)
    else:
        add("mean", prediction.mean)
        add("std", prediction.std)
    if level is not None:
        low, high = prediction.interval(level)
        add("lower", low)
        add("upper", high)
    add("epistemic", prediction.epistemic)
    add("aleatoric", prediction.aleatoric)
    return pandas.DataFrame(columns)


def levels_of(grid: tuple[int, ...]) -> Any:
    """Return the index of a table over examples and their positions."""
    names = ["example", *(["position"] if len(grid) == 2 else [f"position_{i}" for i in range(len(grid) - 1)])]
    return _pandas().MultiIndex.from_product([range(size) for size in grid], names=names)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError("tables need pandas: pip install 'laplace-redux[pandas]'") from error
    return pandas
