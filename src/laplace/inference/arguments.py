"""Check what predictions are asked for: the kind of prediction, the number of draws, and which outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laplace.checks import choice, generator_or_none, shown, whole_number
from laplace.errors import OptionError, UnsupportedError
from laplace.inference.source import FEWER, Source
from laplace.linalg.sampling import Draws
from laplace.network.arrays import is_array

FEW_DRAWS = 1000  # so many draws are not checked: they fit into memory if the outputs do


def pred_type_named(name: str, functional: bool) -> str:
    """Return 'glm', the linearised network, or 'nn', the network itself. For functions, 'gp' means 'glm'."""
    if isinstance(name, Tensor) or is_array(name):
        raise OptionError(
            "a second tensor came after x, where pred_type= stands. Several inputs go into a tuple: write "
            "la((x1, x2)), or give them by the names that forward has."
        )
    word = str(getattr(name, "value", name))
    if word == "gp" and not functional:
        raise UnsupportedError(
            "pred_type='gp' is for a posterior over functions; this one is over weights. Write 'glm' or 'nn'."
        )
    if word == "nn" and functional:
        raise UnsupportedError(
            "pred_type='nn' draws weights; this is a posterior over functions. Write pred_type='glm' (or 'gp', the "
            "same), or take hessian_structure='full', 'kron' or 'diag'."
        )
    return "glm" if word == "gp" else choice(name, ["glm", "nn"], "pred_type")


def draws_asked(source: Source, n_outputs: int, n_samples: Any, least: int, generator: Any) -> Draws:
    """Return how many draws, and their generator. Refuse more than fit into memory for a single input."""
    draws = Draws(whole_number(n_samples, "n_samples", least), generator_or_none(generator))
    if draws.n > FEW_DRAWS:
        like, c = source.noise_level, n_outputs
        needed = 4 * like.element_size() * draws.n * c
        source.frame.budget.require(needed, like.device, f"{draws.n:,} draws of {c:,} outputs", FEWER)
    return draws


def chosen_outputs(source: Source, n_outputs: int, outputs: Any, refused: bool) -> Tensor | None:
    """Return the indices of the wanted outputs. None means all."""
    if outputs is None and refused:
        return None
    located = range(n_outputs)[source.likelihood.response.location_outputs(n_outputs)]
    n = len(located)
    if outputs is None:
        return None if n == n_outputs else torch.tensor(located)
    try:
        index = torch.as_tensor(outputs).reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        index = torch.empty(0)
    if (
        refused
        or index.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        or not len(index)
        or int(index.min()) < 0
        or int(index.max()) >= n
    ):
        raise OptionError(
            f"outputs={shown(outputs)} must be indices from 0 to {n - 1}, for regression with pred_type='glm'."
        )
    return index.long()
