"""Change the parameters of a `torch.distributions` object: move them, take some of their rows, join them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace.errors import InputError, UnsupportedError

_OTHER_NAMES = {"probs": ("logits",), "scale_tril": ("covariance_matrix", "precision_matrix")}  # of a parameter


def map_parameters(distribution: Distribution, f: Callable[[Tensor], Tensor]) -> Distribution:
    """Return a distribution of the same family with f applied to every parameter."""
    make: Any = type(distribution)
    changed = {key: f(value) for key, value in _parameters(distribution).items()}
    return make(**changed, validate_args=False)  # which were valid


def concatenate(distributions: Sequence[Distribution]) -> Distribution:
    """Return one distribution of all rows. They must be of one family."""
    if len(families := sorted({type(d).__name__ for d in distributions})) > 1:
        raise InputError(f"predictions of the families {', '.join(families)} cannot be joined; take one link for all.")
    make: Any = type(distributions[0])
    found = [_parameters(d) for d in distributions]
    return make(**{key: torch.cat([one[key] for one in found]) for key in found[0]}, validate_args=False)


def _parameters(distribution: Distribution) -> dict[str, Tensor]:
    """Return the tensors that a distribution was made of, by name."""
    own = distribution.__dict__
    given = {key: value for key in distribution.arg_constraints if isinstance(value := own.get(key), Tensor)}
    for key, others in _OTHER_NAMES.items():  # torch caches the other names beside the given one
        given = {k: v for k, v in given.items() if key not in given or k not in others}
    if not given:
        raise UnsupportedError(
            f"a {type(distribution).__name__} has no parameters that are tensors: it cannot be reshaped, moved or "
            "joined. Predict on the inputs that are wanted, in one call; .rows.distribution has it at all positions."
        )
    return given
