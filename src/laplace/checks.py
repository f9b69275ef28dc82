"""Check values that users pass. Return each in the form we work with, or refuse it and say what is allowed."""

from __future__ import annotations

import inspect
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from laplace.errors import OptionError

MANY: Final = 2**31 - 1  # upper limit for anything that is drawn, run or stored
LARGEST: Final = 2**63 - 1  # upper limit for counters and seeds
_SYNONYMS: Final = {  # what others call our options
    "kfac": "kron",
    "k_fac": "kron",
    "kronecker": "kron",
    "diagonal": "diag",
    "low_rank": "lowrank",
    "block_diagonal": "block",
    "blockdiag": "block",
    "gauss_newton": "ggn",
    "empirical_fisher": "ef",
}


def choice(value: object, valid: Iterable[str], what: str, objects: str = "") -> str:
    """Return the option `value` as a plain string, or raise an error that lists the valid options.

    `objects` lists what may be given instead of a name.
    """
    word = str(getattr(value, "value", value))
    valid = list(valid)
    if word in valid:
        return word
    listed = ", ".join([*map(repr, valid), *([objects] if objects else [])])
    raise OptionError(f"{what}={shown(value)} is not an option.{did_you_mean(word, valid)} Valid: {listed}.")


def did_you_mean(word: str, valid: Iterable[str], likeness: float = 0.6) -> str:
    """Return ' Did you mean ...?' with the nearest valid word, or '' if none is near.

    `likeness` says how similar a word must be: 0 for any word, 1 for the same.
    """
    valid = list(valid)
    same = [option for option in valid if option == _SYNONYMS.get(word.lower().replace("-", "_"))]
    longer = [option for option in valid if option.startswith(f"{word}_")] if word else []
    near = same or longer or get_close_matches(word, valid, 1, likeness)
    return f" Did you mean {near[0]!r}?" if near else ""


def whole_number(value: object, what: str, least: int = 1, most: int = MANY) -> int:
    """Return a whole number between `least` and `most`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a tensor of several numbers is not one index
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise OptionError(f"{what}={shown(value)} must be a whole number of at least {least}.")
    if number > most:
        raise OptionError(f"{what}={shown(value)} must be a whole number from {least} to {most:,}.")
    return number


def flag(value: object, what: str) -> bool:
    """Return True or False. Accepts numpy's booleans and 0 or 1; refuses tensors, whose truth value is ambiguous."""
    if value is True or value is False:
        return value
    plain = value.item() if type(value).__module__ == "numpy" and not getattr(value, "ndim", 1) else value  # type: ignore[attr-defined]
    if isinstance(plain, (bool, int)) and plain in (0, 1):
        return bool(plain)
    raise OptionError(f"{what}={shown(value)} must be True or False.")


def flag_or_none(value: object, what: str) -> bool | None:
    """Return True, False, or None, which leaves the choice to us."""
    try:
        return None if value is None else flag(value, what)
    except OptionError as error:
        raise OptionError(f"{what}={shown(value)} must be True, False or None.") from error


def path_of(value: Any, what: str) -> Path:
    """Return the path of a file."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError(f"{what}={shown(value)} must name a file, as in {what}='a.safetensors'.")
    return Path(text)


def dtype_name(value: Any, what: str, allowed: Sequence[str]) -> str | None:
    """Return the name of a dtype, given as torch has it or by its name. None stays None."""
    name = str(value).removeprefix("torch.") if isinstance(value, (str, torch.dtype)) else ""
    if value is not None and name not in allowed:
        written = ", ".join(f"torch.{one}" for one in allowed)
        raise OptionError(f"{what}={shown(value)} is not an option. Valid: None, {written}.")
    return None if value is None else name


def device_name(value: Any, what: str) -> str | None:
    """Return the name of a device that holds numbers, as in 'cpu' or 'cuda:1'. None stays None."""
    if value is None:
        return None
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"{what}={shown(value)} is no device. Write {what}='cpu' or {what}='cuda:0'.") from error
    if device.type == "meta":
        raise OptionError(f"{what}='meta' holds no numbers. Write {what}='cpu' or {what}='cuda:0'.")
    return str(device)


def how_many(n: int, what: str) -> str:
    """Return '1 example', '2 examples'."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def shown(value: object) -> str:
    """Return the repr of a value for an error message, cut to one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def options_of(part: Any) -> dict[str, Any]:
    """Return the options of a structure, a likelihood or a subset by name, tensors as lists.

    `part.options` names the constructor's arguments, which are attributes, or is a mapping from names to values.
    """
    named, kind = part.options, type(part).__name__
    if isinstance(named, Mapping):
        return dict(named)
    if isinstance(named, str) or not all(isinstance(name, str) for name in named):
        raise OptionError(f"{kind}.options={shown(named)} must be a tuple of names, as in options = ('rate',).")
    for name in named:
        if not hasattr(part, name):
            raise OptionError(
                f"{kind}.options has {name!r}, which is no attribute of the object. Write self.{name} = {name} in "
                f"{kind}.__init__."
            )
    values = {name: getattr(part, name) for name in named}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}


def changed_options(part: Any) -> list[str]:
    """Return 'name=value' for each option of a part that differs from the default of its constructor."""
    options = options_of(part)
    usual = inspect.signature(type(part)).parameters if options else {}
    return [
        f"{key}={option!r}"
        for key, option in options.items()
        if key not in usual or not unchanged(option, usual[key].default)
    ]


def written(part: Any) -> str:
    """Return the call that makes a part again: its class, with those options that differ from the defaults."""
    return f"{type(part).__name__}({', '.join(changed_options(part))})"


def unchanged(value: Any, usual: Any) -> bool:
    """Return whether an option still has its default value."""
    return value is usual or (isinstance(value, (int, float, str)) and value == usual)


def generator_or_none(generator: Any) -> torch.Generator | None:
    """Return the generator, or None for torch's global one."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(f"generator is a {type(generator).__name__}; write torch.Generator().manual_seed(0).")
    return generator


def positive(value: Tensor | float, what: str) -> Tensor:
    """Return `value` as a tensor of positive finite numbers."""
    tensor = real(value, what)
    if tensor.numel() == 0 or not (tensor > 0).all():
        shown = f"{float(tensor.min()):g}" if tensor.numel() else "nothing"
        raise OptionError(
            f"{what} must be positive; got {shown}{' as its smallest value' if tensor.numel() > 1 else ''}."
        )
    return tensor


def one_positive(value: Tensor | float, what: str) -> float:
    """Return one positive finite number."""
    tensor = positive(value, what)
    if tensor.numel() != 1:
        raise OptionError(f"{what} has {tensor.numel()} values; give one number.")
    return float(tensor)


def real(value: Tensor | float, what: str) -> Tensor:
    """Return `value` as a tensor of finite real numbers."""
    if isinstance(value, bool):
        raise OptionError(f"{what}={value!r} is not allowed; give a number or a tensor of numbers.")
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise OptionError(f"{what}={shown(value)} is not a number or a tensor of numbers; write {what}=1.0.") from error
    if tensor.is_complex() or tensor.dtype is torch.bool:
        raise OptionError(f"{what} has dtype {tensor.dtype}; real numbers needed.")
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    if not tensor.isfinite().all():
        raise OptionError(f"{what} holds NaN or infinite values; finite numbers are needed.")
    return tensor


def all_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite. One sum tells, unless it overflows itself."""
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())
