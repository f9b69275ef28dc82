"""Take what decisions are asked with: a fitted posterior, and arrays where tensors are needed."""

from __future__ import annotations

from typing import Any

from torch import nn

from laplace.errors import OptionError
from laplace.inference.source import Source
from laplace.network.arrays import as_tensors, dtype_of


def inputs_for(la: Source, x: Any) -> Any:
    """Return inputs with arrays, DataFrames and lists of numbers as tensors, in the dtype of the source's weights."""
    model = getattr(la, "model", None)
    return as_tensors(x, dtype_of(model) if isinstance(model, nn.Module) else None)


def require_source(la: Any) -> None:
    """Refuse a network, or anything else that is no posterior."""
    if hasattr(la, "likelihood") and hasattr(la, "frame"):
        return
    fix = " Write Laplace(model, likelihood).fit(train_loader)." if isinstance(la, nn.Module) else ""
    raise OptionError(f"la is a {type(la).__name__}; a fitted Laplace, or a rival of laplace.rivals, is needed.{fix}")
