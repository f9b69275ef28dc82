"""Take arrays where decisions need tensors."""

from __future__ import annotations

from typing import Any

from torch import nn

from laplace.inference.source import Source
from laplace.network.arrays import as_tensors, dtype_of


def inputs_for(la: Source, x: Any) -> Any:
    """Return inputs with arrays, DataFrames and lists of numbers as tensors, in the dtype of the source's weights."""
    model = getattr(la, "model", None)
    return as_tensors(x, dtype_of(model) if isinstance(model, nn.Module) else None)
