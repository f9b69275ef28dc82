"""Convert what is scored or drawn (tensors, numpy arrays, lists or numbers) to tensors."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from laplace.checks import shown
from laplace.errors import InputError

Values: TypeAlias = Any  # a tensor, or anything that numpy turns into an array


def tensor_of(values: Values, name: str) -> Tensor:
    """Return the values as a tensor without a graph, keeping their kind of numbers."""
    if isinstance(values, Tensor):
        found = values.detach()
        return found.to_dense() if found.layout is not torch.strided else found
    try:
        array = np.array(values)  # a copy: torch takes no array that is read-only or runs backwards
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}={shown(values)} is not an array of numbers: {error}") from error
    if array.dtype.kind == "b":
        return torch.from_numpy(array)
    if array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float16 if array.dtype.itemsize == 2 else np.float64))
    raise InputError(
        f"{name}={shown(values)} holds {array.dtype} where numbers are needed: a tensor, a numpy array or a list."
    )


def real_of(values: Values, name: str, finite: bool = True) -> Tensor:
    """Return the values in float64. Refuse complex numbers, booleans, NaN and, if `finite`, infinite values."""
    found = tensor_of(values, name)
    if found.is_complex() or found.dtype is torch.bool:
        raise InputError(f"{name} has dtype {found.dtype}; real numbers are needed.")
    found = found.double()
    bad = ~found.isfinite() if finite else found.isnan()
    if bad.any():
        what = "nan" if found.isnan().any() else "infinite values"
        raise InputError(f"{name} holds {what} ({int(bad.count_nonzero())} of {found.numel()}); leave them out.")
    return found
