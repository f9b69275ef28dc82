"""Check a loaded state before it is used: keys, types, dtypes, shapes and ranges.

The structure lists the keys and shapes of its sums in its `Forms`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laplace.errors import InputError
from laplace.posterior.posterior import Fit
from laplace.structures import Forms, Sums
from laplace.weights import Layout

_MOST = 2**62  # upper limit for counts


def require_words(state: Mapping[str, Any]) -> None:
    """Refuse names, shapes and numbers of the wrong type."""
    names, shapes = state["names"], state["shapes"]
    _require(_list_of(names, str) and 0 < len(set(names)) == len(names), "names", names, "distinct names of parameters")
    sizes = isinstance(shapes, (list, tuple)) and all(_list_of(shape, int) for shape in shapes)
    _require(sizes and len(shapes) == len(names), "shapes", shapes, f"a shape for each of {len(names)} parameters")
    for key in ("n_data", "n_outputs", *(["n_earlier"] if "n_earlier" in state else [])):
        _require(_is_int(state[key]) and 0 < state[key] < _MOST, key, state[key], f"a whole number from 1 to {_MOST}")
    for key in ("linear", *(key for key in ("semidefinite", "flat") if key in state)):
        _require(isinstance(state[key], bool), key, state[key], "True or False")
    for key in ("last_layer", "feature_reduction"):
        _require(state[key] is None or isinstance(state[key], str), key, state[key], "a name or None")
    for key in ("temperature", *(["softmax_temperature"] if "softmax_temperature" in state else [])):
        value = state[key]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        _require(number and 0 < value < math.inf, key, value, "a number above 0")
    for key in ("mean", *(key for key in ("prior_precision", "prior_mean") if key in state), "sigma_noise"):
        value = state[key]
        real = isinstance(value, Tensor) and value.is_floating_point()
        _require(real, key, value, "a tensor of floating-point numbers")


def require_indices(layout: Layout) -> None:
    """Refuse indices of weights unless they are ascending whole numbers inside their tensor."""
    for name, shape, part in zip(layout.names, layout.tensor_shapes, layout.parts, strict=True):
        if part is None:
            continue
        index = part.index
        whole = index.dim() == 1 and index.dtype == torch.int64 and len(index) > 0
        inside = whole and int(index[0]) >= 0 and int(index[-1]) < math.prod(shape)
        if not inside or not (index.diff() > 0).all():
            raise InputError(
                f"the state is damaged: it has indices outside the parameter {name!r} of shape {shape}, or not in "
                "ascending order."
            )


def require_sums(fit: Fit, sums: Sums) -> None:
    """Refuse sums that do not fit the structure and the weights; those of this rank, if others have the rest."""
    own = fit.layout if fit.owners is None else fit.layout.only(fit.owners.mine)
    layout, forms, allowed = own, fit.structure.forms, {torch.float64, fit.mean.dtype}
    for key, value in (sums | fit.data).items():
        whole_numbers = forms is not None and key in forms.counts
        kinds = {torch.int64} if whole_numbers else allowed | ({torch.int64} if forms is None else set())
        _require(value.dtype in kinds, key, _told(value), f"a tensor of {' or '.join(sorted(map(str, kinds)))}")
        _require(value.isfinite().all(), key, "NaN or infinite values", "finite numbers")
    _require_data(fit)
    parts: dict[str, dict[str, Tensor]] = {each: {} for each in layout.names}
    whole: dict[str, Tensor] = {}
    for key, value in sums.items():
        tensor, _, kind = key.rpartition("/")
        if tensor and tensor not in parts:
            raise InputError(f"the state is damaged: {key} belongs to none of its parameters.")
        (parts[tensor] if tensor else whole)[kind] = value
    if forms is not None:
        _require_forms(forms, parts, whole, layout)


def _require_forms(forms: Forms, parts: Mapping[str, Sums], whole: Sums, layout: Layout) -> None:
    """Refuse sums that have none of the forms of the structure, per tensor and for all weights together."""
    found = _matched("", whole, forms.whole, {"P": layout.n_params})
    shared = {letter: size for letter, size in found.items() if letter in forms.shared}
    for each, size in zip(layout.names, layout.sizes, strict=True):
        found = _matched(each, parts[each], forms.tensor, shared | {"p": size})
        shared |= {letter: size for letter, size in found.items() if letter in forms.shared}
        if "g" in found and found["g"] * found["o"] * found["i"] != size:
            raise InputError(f"the state is damaged: the factors of {each} do not have {size} weights.")


def _require_data(fit: Fit) -> None:
    """Refuse sums from which the likelihood cannot compute its log-likelihood."""
    try:
        value = fit.likelihood.log_likelihood(fit.data, torch.ones((), dtype=torch.float64, device=fit.mean.device))
    except (KeyError, RuntimeError) as error:
        there = ", ".join(fit.data) or "nothing"
        raise InputError(
            f"the state is damaged: {fit.likelihood.name} cannot compute a log-likelihood from its sums, {there} "
            f"({error!r})."
        ) from error
    _require(value.shape == (), "the log-likelihood", value, "one number")


def require_same_form(sums: Sums, others: Sums) -> None:
    """Refuse sums of earlier tasks that cannot be added to these sums."""
    differ = [key for key in {**sums, **others} if _told(sums.get(key)) != _told(others.get(key))]
    if differ:
        raise InputError(
            f"the state is damaged: {differ[0]} is {_told(sums.get(differ[0]))} for this task and "
            f"{_told(others.get(differ[0]))} for the earlier tasks."
        )


def require_points(vectors: Any, inputs: Any, numbers: Any, outputs: int) -> None:
    """Refuse kept points whose vectors, inputs and numbers do not belong together."""
    lists = isinstance(vectors, (list, tuple)) and isinstance(inputs, (list, tuple)) and 0 < len(vectors) == len(inputs)
    _require(lists, "points/vectors", vectors, "as many parts as the inputs have")
    for part in vectors:
        good = isinstance(part, Tensor) and part.dim() == 3 and part.is_floating_point() and part.shape[2] == outputs
        _require(good and part.numel() and part.isfinite().all(), "points/vectors", _told(part), f"(m, K, {outputs})")
        _require(part.shape[1] == vectors[0].shape[1], "points/vectors", _told(part), f"K = {vectors[0].shape[1]}")
    count = sum(len(part) for part in vectors)
    good = isinstance(numbers, Tensor) and numbers.dtype == torch.int64 and numbers.shape == (count,)
    _require(good and (numbers >= 0).all(), "points/numbers", _told(numbers), f"{count} whole numbers")


def require_keys(contents: Any, kinds: Mapping[str, type | tuple[type, ...]], what: str) -> None:
    """Refuse contents if keys are missing or values have wrong types."""
    _require(isinstance(contents, Mapping), what, contents, "a mapping")
    for key, kind in kinds.items():
        if key not in contents:
            raise InputError(f"{what} is damaged: {key} is missing.")
        value = contents[key]
        right = isinstance(value, kind) and not (isinstance(value, bool) and kind is int)
        words = ", ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        _require(right and (kind is not int or 0 <= value < _MOST), key, value, words)


def require_forms(forms: Sequence[Any], tensors: int) -> None:
    """Refuse forms of gradients unless there is (name, factors) for each tensor, or none at all."""
    each = all(isinstance(form, (list, tuple)) and len(form) == 2 for form in forms)
    whole = each and all(isinstance(name, str) and _list_of(factors, int) for name, factors in forms)
    _require(whole and len(forms) in (0, tensors), "_forms", forms, f"a name and factors for each of {tensors} tensors")


def require_alike(found: Any, expected: Mapping[str, Any], what: str) -> None:
    """Refuse named tensors with unexpected names, shapes or dtypes, or with NaN or infinite values."""
    _require(isinstance(found, Mapping) and found.keys() == expected.keys(), what, found, "the network's own names")
    for key, value in expected.items():
        if isinstance(value, Tensor):
            _require(isinstance(found[key], Tensor), f"{key} of {what}", found[key], "a tensor")
            same = found[key].shape == value.shape and found[key].dtype == value.dtype
            _require(same, f"{key} of {what}", found[key], _told(value))
            finite = not value.is_floating_point() or bool(found[key].isfinite().all() or not value.isfinite().all())
            _require(finite, f"{key} of {what}", "NaN or infinite in places", "finite numbers")


def _matched(
    tensor: str, sums: Mapping[str, Tensor], forms: Sequence[Mapping[str, str]], sizes: dict[str, int]
) -> dict[str, int]:
    """Return the size of each letter in the form that fits the sums. Raise InputError if none fits."""
    for form in forms:
        bound = dict(sizes)
        if sums.keys() == form.keys() and all(_binds(value.shape, form[key], bound) for key, value in sums.items()):
            return bound
    where = f" of {tensor}" if tensor else ""
    there = ", ".join(f"{key} {tuple(value.shape)}" for key, value in sums.items()) or "nothing"
    known = [form for form in forms if form.keys() == sums.keys()] or forms
    shapes = ", ".join(f"{key} ({', '.join(shape)})" for key, shape in known[0].items()) or "nothing"
    given = ", ".join(f"{letter} = {size}" for letter, size in sizes.items())
    raise InputError(f"the state is damaged: its sums{where} are {there}; expected are {shapes} with {given}.")


def _binds(shape: Sequence[int], letters: str, bound: dict[str, int]) -> bool:
    return len(shape) == len(letters) and all(
        bound.setdefault(letter, size) == size for letter, size in zip(letters, shape, strict=True)
    )


def _require(holds: Any, key: str, came: Any, needed: str) -> None:
    if not holds:
        said = came if isinstance(came, str) else _told(came)
        raise InputError(f"the state is damaged: {key} is {said}; needed: {needed}.")


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} in {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list_of(value: Any, kind: type) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(item, kind) and not (kind is int and (isinstance(item, bool) or item < 0)) for item in value
    )
