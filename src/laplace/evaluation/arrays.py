"""Convert what is scored or drawn (tensors, numpy arrays, lists or numbers) to tensors, and check it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from laplace.checks import shown, whole_number
from laplace.errors import InputError, OptionError

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


def classified(probs: Values, y: Values) -> tuple[Tensor, Tensor]:  # (N, C), (N,)
    """Return probabilities of classes in float64 and the true classes. Refuse anything else."""
    probs, y = probabilities(probs), tensor_of(y, "y")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InputError(f"labels must be integer class indices, got {y.dtype}. Write y.long(), or y.astype(int).")
    if y.shape != probs.shape[:1]:
        hint = " Write y.argmax(-1) for one-hot labels." if y.shape == probs.shape else ""
        raise InputError(f"labels must have shape ({len(probs)},), one per row of probs, got {tuple(y.shape)}.{hint}")
    n_classes = probs.shape[-1]
    if y.min() < 0 or y.max() >= n_classes:
        raise InputError(
            f"labels must lie in 0..{n_classes - 1} for {n_classes} classes, got {int(y.min())}..{int(y.max())}."
        )
    return probs, y.to(probs.device, torch.long)


def probabilities(probs: Values) -> Tensor:  # (N, C)
    """Return probabilities of classes in float64. Refuse rows that are no distribution."""
    probs = tensor_of(probs, "probs")
    if probs.dim() != 2 or probs.shape[-1] < 2:
        raise InputError(
            f"probs must have shape (N, C) with at least two classes, got {tuple(probs.shape)}. "
            "For a single probability p of class 1, write torch.stack([1 - p, p], -1)."
        )
    if len(probs) == 0:
        raise InputError("probs holds no examples.")
    if probs.is_complex():
        raise InputError(f"probs has dtype {probs.dtype}; real numbers are needed.")
    # Rows in a half-precision type sum to one only to a few parts in a thousand.
    tolerance = 3e-2 if probs.dtype in (torch.float16, torch.bfloat16) else 1e-3
    probs = probs.double()
    # Written so that nan fails too.
    if not ((probs >= -tolerance).all() and ((probs.sum(-1) - 1).abs() <= tolerance).all()):
        raise InputError(
            "every row of probs must be non-negative and sum to one. For logits, write torch.softmax(logits, -1)."
        )
    return probs.clamp_min(0)


def scores_of(scores: Values, name: str) -> Tensor:  # (N,)
    """Return one score per example in float64. Infinite ones have a rank, nan has none."""
    found = tensor_of(scores, name)
    if found.dim() != 1 or len(found) == 0:
        raise InputError(f"{name} must be one score per example, shape (N,) with N > 0, got {tuple(found.shape)}.")
    return real_of(found, name, finite=False)


def same_shape(**tensors: Tensor) -> list[Tensor]:
    """Return the tensors on the device of the first one. Refuse shapes that differ."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        came = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(f"shapes must be equal, since broadcasting would hide a mistake: got {came}.")
    shape = next(iter(shapes.values()))
    if len(shape) not in (1, 2) or 0 in shape:
        raise InputError(f"expected shape (N,) or (N, C) with N > 0, got {shape}.")
    first = next(iter(tensors.values()))
    return [tensor.to(first.device) for tensor in tensors.values()]


def bins_of(n_bins: int) -> int:
    """Return a number of bins. Refuse what is no whole number of at least one."""
    try:
        return whole_number(n_bins, "n_bins")
    except OptionError as error:
        raise InputError(str(error)) from error


def share_of(value: Values, name: str, least: float = 0.0) -> Tensor:  # () or (L,)
    """Return one number, or a vector of numbers, strictly between `least` and 1 in float64."""
    found = real_of(value, name)
    if found.dim() > 1 or not found.numel() or not ((found > least) & (found < 1)).all():
        raise InputError(f"{name}={shown(value)} must be a number, or a vector of numbers, between {least:g} and 1.")
    return found
