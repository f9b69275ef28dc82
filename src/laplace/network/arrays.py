"""Take numpy arrays, DataFrames and lists of numbers wherever tensors are taken.

An array is whatever numpy can read: an object with `__array__` (numpy, pandas, polars, jax), or a nested list of
numbers. Floating-point arrays get the dtype of the network's weights, because numpy's default is float64 and torch's is
float32. Tensors stay as they are.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laplace.errors import InputError
from laplace.network.pytree import map_leaves


def is_array(value: object) -> bool:
    """Return whether a value is an array, a DataFrame, a Series or a nested list of numbers, but not a tensor."""
    if isinstance(value, (Tensor, np.generic, Mapping, tuple)):
        return False
    return hasattr(value, "__array__") or _is_list_of_numbers(value)


def as_tensors(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a nested value with each array in it as a tensor, floating-point ones in `dtype` if one is given."""
    if isinstance(value, Tensor):
        return value
    return map_leaves(value, is_array, lambda array: tensor_of(array, dtype))


def tensor_of(array: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return an array as a tensor that shares its memory where possible, a floating-point one in `dtype`.

    Integers and booleans keep their kind, except those of a DataFrame: with a `dtype`, its columns are features.
    """
    values = numbers_in(array)
    if not values.dtype.isnative or not values.flags.writeable or any(stride < 0 for stride in values.strides):
        values = values.astype(values.dtype.newbyteorder("="), copy=True)  # torch takes none of these
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:  # torch computes little with these
        values = values.astype(np.int64)
    found = torch.from_numpy(np.ascontiguousarray(values).reshape(values.shape))
    if dtype is None or not (found.is_floating_point() or _is_table(array)):
        return found
    return found.to(dtype)


def numbers_in(array: Any) -> np.ndarray:
    """Return an array, a DataFrame or a list as a numpy array of numbers. Refuse strings, dates and missing values."""
    if isinstance(array, np.ma.MaskedArray):
        raise InputError(
            "a masked numpy array came, whose mask would be lost. Write x.filled(...), or leave these examples out."
        )
    try:
        values = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"a {_name(array)} does not become one array of numbers: {error}") from error
    if values.dtype.kind in "biufc" and values.dtype.itemsize <= 16 and values.dtype != np.longdouble:
        return values
    if values.dtype.kind in "Of" and not _has_words(values):  # a DataFrame of several dtypes, or long doubles
        try:
            return values.astype(np.float64)
        except (TypeError, ValueError):
            pass
    raise InputError(f"{_described(array, values)} Numbers are needed.{_remedy(array)}")


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the network's first floating-point weight, or torch's default one."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _is_list_of_numbers(value: object) -> bool:
    """Return whether a list is an array: its first number is found by going down its first elements."""
    found = value
    while isinstance(found, list) and found:
        found = found[0]
    return isinstance(value, list) and isinstance(found, (numbers.Number, np.generic))


def _is_table(array: Any) -> bool:
    return hasattr(array, "columns") and hasattr(array, "__array__")


def _name(array: Any) -> str:
    return type(array).__name__


def _described(array: Any, values: np.ndarray) -> str:
    if _is_table(array):
        columns = {str(name): np.asarray(array[name]) for name in array.columns}
        others = [name for name, column in columns.items() if not _are_numbers(column)]
        if others:
            return f"the columns {', '.join(others[:5])} of a DataFrame do not hold numbers only."
        gaps = [name for name, column in columns.items() if np.isnan(column.astype(np.float64)).any()]
        return f"the columns {', '.join(gaps[:5])} of a DataFrame have missing values."
    first = values.reshape(-1)[:1].tolist()
    return f"a {_name(array)} of dtype {values.dtype} came{f', which begins with {first[0]!r}' if first else ''}."


def _has_words(values: np.ndarray) -> bool:
    """Return whether an array of objects holds strings. Those of digits would become numbers: "02139" would be 2139."""
    return values.dtype.kind == "O" and any(isinstance(value, (str, bytes)) for value in values.reshape(-1))


def _are_numbers(values: np.ndarray) -> bool:
    if _has_words(values):
        return False
    try:
        values.astype(np.float64)
    except (TypeError, ValueError):
        return False
    return values.dtype.kind in "biufO"


def _remedy(array: Any) -> str:
    if _is_table(array):
        return " Encode categories, for example with pandas.get_dummies, and fill in missing values."
    return (
        " For labels write classes, y = np.unique(labels, return_inverse=True), or take "
        "laplace.integrations.sklearn.LaplaceClassifier, which keeps the names of the classes."
    )
