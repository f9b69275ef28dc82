"""Add up what the batches of a run contribute, and refuse sums that cannot be added, kept or used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laplace.backprop.gradients import Moments, is_absent
from laplace.budget import Budget, in_bytes
from laplace.errors import NumericalError
from laplace.inference.reads import ABSENT, Form
from laplace.linalg.folded import all_finite
from laplace.linalg.gram_sums import GramRows, GramSum
from laplace.linalg.shared_sums import share_equal_rows
from laplace.linalg.symmetric import gram, in_sums, or_double
from laplace.structures import STRUCTURES, Structure, Sums
from laplace.weights.layout import Layout


def add_to(total: dict[str, Any], part: dict[str, Any], times: float = 0.0) -> None:
    """Add the contributions of a batch to sums: tensors, `GramRows` and numbers. Each leaves `part` as it is added.

    `times` is how often as many rows as here will come in all; 0 if nobody knows.
    """
    added = share_equal_rows(total, part, times)
    for key in list(part):
        value = part.pop(key)
        so_far = total.get(key)
        if isinstance(value, GramRows) and isinstance(so_far, Tensor):
            value = gram(value.rows).unsqueeze(0)  # a batch with one position after others with several
        if isinstance(so_far, GramSum):
            if isinstance(value, GramRows):
                added.once(so_far, value)
            elif isinstance(value, Tensor):
                so_far.add_gram(value.squeeze(0))
        elif so_far is None:
            total[key] = in_sums(value, copy=True) if isinstance(value, Tensor) else value
        else:
            total[key] += value


def require_finite_sums(sums: Sums, dtype: torch.dtype) -> None:
    """Refuse sums with an overflow or a gradient that does not exist."""
    bad = [key for key, value in sums.items() if not all_finite(value)]
    if bad:
        raise NumericalError(
            f"the sums over the data hold NaN or infinite values in {', '.join(bad[:3])}; all outputs are finite. "
            "A product has overflowed, or the network has no derivative at some example (a root of 0, say). Scale the "
            f"inputs and labels to about 1{or_double(dtype)}."
        )


def as_tensor(total: Tensor | float, like: Tensor) -> Tensor:
    """Return a finished sum as a tensor, on the device of `like`."""
    return total if isinstance(total, Tensor) else torch.tensor(total, dtype=torch.float64, device=like.device)


def forms_of(moments: Moments, before: Sequence[Form], names: Sequence[str]) -> tuple[list[Form], list[str]]:
    """Return the form of each tensor's gradients after a batch, and the names of those that had another one before.

    A tensor whose gradients are outer products in one batch, and not in another, has sums that do not add.
    """
    forms: list[Form] = [
        ABSENT if is_absent(m) else (m.form, tuple(m.factors) if m.form == "kron" else ()) for m in moments.parameters
    ]
    if not before:
        return forms, []
    known: list[Form] = [(form, tuple(factors)) for form, factors in before]
    forms = [old if new == ABSENT else new for old, new in zip(known, forms, strict=True)]
    return forms, [name for name, old, new in zip(names, known, forms, strict=True) if old not in (new, ABSENT)]


def require_memory(structure: Structure, moments: Moments, layout: Layout, budget: Budget, like: Tensor) -> None:
    """Refuse a structure that does not fit into memory, and name those that do."""
    needed = structure.memory(moments, layout, like.element_size())
    if budget.has(needed, like.device):
        return
    able = {name: make for name, make in STRUCTURES.items() if make.scattered or not layout.scattered}
    others = {name: make().memory(moments, layout, like.element_size()) for name, make in able.items()}
    fitting = [f"{name!r} ({in_bytes(n)})" for name, n in others.items() if budget.has(n, like.device)]
    budget.refuse(
        needed,
        like.device,
        f"hessian_structure={structure.name!r} of {layout.n_params:,} weights",
        f"What would fit: {', '.join(fitting) or 'no structure; take fewer weights'}.",
    )
