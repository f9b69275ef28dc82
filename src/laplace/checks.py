"""Values that users give: each comes back in the form that is worked with, or is refused with what is allowed."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laplace.errors import OptionError


def choice(value: object, valid: Iterable[str], what: str) -> str:
    """The option `value` as a plain string, or an error that lists the valid ones."""
    word = str(getattr(value, "value", value))
    valid = list(valid)
    if word in valid:
        return word
    listed = ", ".join(repr(v) for v in valid)
    raise OptionError(f"{what}={shown(value)} is not an option. Valid: {listed}.")


def whole_number(value: object, what: str, least: int = 1) -> int:
    """A whole number that is large enough."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise OptionError(f"{what}={shown(value)} must be a whole number of at least {least}.")
    return number


def shown(value: object) -> str:
    """A value in an error message, cut to what fits on a line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def unchanged(value: Any, usual: Any) -> bool:
    """Whether an option has its usual value."""
    return value is usual or (isinstance(value, (int, float, str)) and value == usual)


def generator_or_none(generator: Any) -> torch.Generator | None:
    """The generator, or None for torch's own."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(f"generator is a {type(generator).__name__}; write torch.Generator().manual_seed(0).")
    return generator


def positive(value: Tensor | float, what: str) -> Tensor:
    """`value` as a tensor of positive finite numbers."""
    tensor = real(value, what)
    if tensor.numel() == 0 or not (tensor > 0).all():
        shown = f"{float(tensor.min()):g}" if tensor.numel() else "nothing"
        raise OptionError(
            f"{what} must be positive; got {shown}{' as its smallest value' if tensor.numel() > 1 else ''}."
        )
    return tensor


def real(value: Tensor | float, what: str) -> Tensor:
    """`value` as a tensor of finite real numbers."""
    if isinstance(value, bool):
        raise OptionError(f"{what}={value!r}: a number or a tensor of numbers is needed.")
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise OptionError(f"{what}={shown(value)} is no number or tensor of numbers; write {what}=1.0.") from error
    if tensor.is_complex() or tensor.dtype is torch.bool:
        raise OptionError(f"{what} has dtype {tensor.dtype}; real numbers needed.")
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    if not tensor.isfinite().all():
        raise OptionError(f"{what} holds NaN or infinite values.")
    return tensor
