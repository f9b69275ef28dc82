"""Compute second moments of the gradients of all parameters, of which as many exist at once as the budget has room for.

Those of a last layer alone are in head_moments.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from laplace.backprop.uses import Use, along, split
from laplace.budget import Budget
from laplace.linalg.symmetric import gram, in_sums, precise_gram


class Sized(Protocol):
    """Defines what moments ask of the engine: how much memory there is, and the bytes of one number."""

    @property
    def budget(self) -> Budget: ...

    @property
    def item_size(self) -> int: ...


class NetworkMoments:
    """Computes second moments of all parameters, for some vectors."""

    held = 2**62  # a batch's graph and gradients are not kept for later

    def __init__(self, parameters: list[Use], network: Sized) -> None:
        self.parameters, self.network = parameters, network

    def merged(self, others: Sequence[Any]) -> NetworkMoments:
        raise NotImplementedError("moments of several runs cannot be merged")

    def gram(self) -> Tensor:  # (P, P)
        total = None
        for rows in _rows(self.parameters, self.network):
            term = precise_gram(rows.flatten(0, 1))
            total = term if total is None else total.add_(term)
        assert total is not None
        return total

    def products(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Return H times each vector: coefficients <G, u>, sent back, some examples at a time."""
        vectors, n = in_sums(vectors.to(self.parameters[0].g)), self.parameters[0].shape[1]
        each = sum(use.load(len(vectors)) for use in self.parameters)
        step = self.network.budget.count(self.network.item_size * each, share=0.25)
        total = None
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            uses = [use.settled(part) for use in self.parameters]
            if vectors.dtype == torch.float64:  # their sum is: directions that it lacks must be zero here, too
                uses = [use.double() for use in uses]
            coefficients = along(uses, split(vectors, uses))
            term = torch.cat([use.back(coefficients) for use in uses], 1)
            total = term if total is None else total.add_(term)
        assert total is not None
        return total

    def gram_along(self, steps: Sequence[Tensor]) -> Tensor:  # (r, r)
        uses = [use.double() for use in self.parameters] if steps[0].dtype == torch.float64 else self.parameters
        return gram(along(uses, steps).flatten(1).T.double())

    def trace(self) -> Tensor:
        return torch.stack([use.double().trace() for use in self.parameters]).sum()


def _rows(uses: list[Use], network: Sized) -> Iterator[Tensor]:
    """Yield the gradients of all parameters side by side, (K, n, P), for some examples at a time."""
    for part in examples_beside(uses, network):
        yield torch.cat([use.contracted(part) for use in uses], 2)


def examples_beside(uses: Sequence[Any], network: Sized) -> Iterator[slice]:
    """Yield slices of examples for which the gradients of all parameters fit side by side."""
    k, n, _ = uses[0].shape
    width = sum(use.shape[2] for use in uses)
    step = network.budget.count((network.item_size + 8) * k * width, share=0.25)  # 8 bytes: their copy in float64
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
