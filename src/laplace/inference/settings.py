"""Compare, over ranks, the values of a posterior that users set without a fit: prior, noise and temperatures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laplace.distributed import Reduce
from laplace.errors import OptionError
from laplace.inference.values import Values

_FEW = 64  # values that are compared one by one


def require_same_settings(source: Any, reduce: Reduce) -> None:
    """Refuse ranks whose priors, noise or temperatures differ: their posteriors are not the same."""
    if reduce.size > 1 and (told := _apart(reduce.agree(lambda: settings_of(source)))):
        raise OptionError(
            f"the ranks differ in {told}. All ranks must hold the same posterior before they work together. Set the "
            "same values on every rank, as in la.prior_precision = 1.0."
        )


def require_same_results(values: Mapping[str, Any], what: str, reduce: Reduce) -> None:
    """Refuse numbers that every rank has found by itself and that are not the same on all of them."""
    facts = {name: _summary(torch.as_tensor(value)) for name, value in values.items()}
    if reduce.size > 1 and (told := _apart(reduce.agree(lambda: facts))):
        raise OptionError(
            f"{what} has found other values on each rank: {told}. Nothing was set. Give all ranks the same options "
            "(method=, loss=, seed=, train_loader=), and a method without random numbers of its own."
        )


def _apart(every: list[dict[str, Any]]) -> str:
    """Return in which values, by name, ranks differ from the first; nothing if they do not."""
    apart = {
        name: [rank for rank, own in enumerate(every) if not _same(own.get(name), every[0].get(name))]
        for name in dict.fromkeys(name for own in every for name in own)
    }
    told = [
        f"{name}, {' and '.join(f'{_shown(every[rank].get(name))} on rank {rank}' for rank in (0, *ranks[:3]))}"
        for name, ranks in apart.items()
        if ranks
    ]
    return "; in ".join(told)


def settings_of(source: Any) -> dict[str, Any]:
    """Return prior, noise and temperatures by name; of a mixture, those of every member."""
    values = getattr(source, "values", None)
    if isinstance(values, Values):
        prior, names = values.prior, {"precision": "prior_precision"}
        found: dict[str, Any] = {"prior": prior.described}
        found |= {names.get(name, name): _summary(value) for name, value in prior.hyperparameters.items()}
        if isinstance(mean := getattr(prior, "mean", None), Tensor):
            found["prior_mean"] = _summary(mean)
        found["sigma_noise"] = _summary(source.runner.spec.likelihood.noise_at(values.sigma))
        return found | {"temperature": values.temperature, "softmax_temperature": values.softmax_temperature}
    own = {"sigma_noise": _summary(source.noise_level), "softmax_temperature": source.softmax_temperature}
    members = [settings_of(member).items() for member in getattr(source, "members", ())]
    return own | {f"{name} of member {i}": value for i, items in enumerate(members) for name, value in items}


def _summary(value: Tensor) -> list[float]:
    """Return a few numbers, or sums over many, so that nothing as long as the network is sent."""
    flat = value.detach().double().flatten().cpu()
    if len(flat) <= _FEW:
        return flat.tolist()
    sums = flat.sum(), flat.square().sum(), flat @ torch.arange(len(flat), dtype=flat.dtype).cos()
    return [len(flat), *map(float, sums)]


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, numbers up to rounding on other hardware."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)
    return one == other


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]:.6g}" if len(value) == 1 else "a vector"
    return f"{value:.6g}" if isinstance(value, float) else "none" if value is None else str(value)
