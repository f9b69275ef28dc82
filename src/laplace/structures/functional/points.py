"""The points of the data that a posterior over functions is made of, and the network's gradients there.

Kept are the inputs and the vectors that are sent back from the outputs. The gradients are had by running the network
again; they are kept too where they are small.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from laplace.backprop.asked import Asked
from laplace.backprop.gradients import Engine, Forward, Jacobian, JacobianOf, KroneckerCovariance
from laplace.backprop.uses import Use
from laplace.network.batches import Batch

Value = TypeVar("Value")
Gradients = Callable[[], Iterable[list[Use]]]  # of the kept points, some at a time, for each parameter


@dataclass
class Points:
    """Inputs and vectors (m, K, C), together where their shapes agree."""

    parts: Sequence[Batch]
    numbers: Tensor  # (M,), of the points among the examples as they were read, ascending
    _held: list[list[Use]] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return sum(len(part.y) for part in self.parts)

    def gradients(self, engine: Engine, limit: int) -> Iterable[list[Use]]:
        """The gradients of each parameter, some points at a time; kept from then on if they take `limit` bytes."""
        if self._held:
            return self._held
        runs = self._runs(engine)
        first = next(runs)
        each = sum(use.nbytes for use in first) / first[0].shape[1]
        if each * len(self) > limit:
            return chain([first], runs)
        self._held = [first, *runs]
        return self._held

    def _runs(self, engine: Engine) -> Iterator[list[Use]]:
        for part in self.parts:
            start = 0
            for inputs in engine.chunks(part.inputs, part.y.shape[1]):
                forward = engine.forward(inputs)
                stop = start + len(forward.outputs)
                yield [*forward.sent(part.y[start:stop].transpose(0, 1))]
                start = stop

    def to(self, device: torch.device | str) -> Points:
        """The same on `device`."""
        device = torch.device(device)
        parts = [Batch(part.index, part.inputs.to(device), part.y.to(device)) for part in self.parts]
        return Points(parts, self.numbers)


class FunctionForward:
    """A run of the network at new inputs, with what is known of the kept points beside it."""

    def __init__(self, forward: Forward, gradients: Gradients) -> None:
        self.forward, self.gradients, self.outputs = forward, gradients, forward.outputs

    def jacobian(self, outputs: Tensor | None = None, centred: bool = False) -> FunctionJacobian:
        """The Jacobian as posteriors over functions ask for it."""
        return FunctionJacobian(self.forward, outputs, self.gradients, centred)

    def copied(self) -> FunctionForward:
        """The same in memory of its own."""
        return FunctionForward(self.forward.copied(), self.gradients)

    def counting(self, kept: Tensor) -> FunctionForward:
        """Of which some rows count."""
        return FunctionForward(self.forward.counting(kept), self.gradients)

    def cut(self) -> Iterator[tuple[FunctionForward, slice]]:
        """All of it."""
        yield self, slice(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.forward, name)


class FunctionJacobian:
    """The Jacobian at new inputs, in float64, that remembers what it was asked: a grid of priors asks for the same."""

    def __init__(self, forward: Forward, chosen: Tensor | None, gradients: Gradients, centred: bool = False) -> None:
        self.forward, self.chosen, self.gradients, self.centred = forward, chosen, gradients, centred
        self._known: dict[Hashable, Any] = {}

    @cached_property
    def asked(self) -> Jacobian:
        """Of the chosen outputs, or of the contrasts of all."""
        return self.forward.jacobian(self.chosen, self.centred)

    @cached_property
    def whole(self) -> Jacobian:
        """Of all outputs."""
        return self.asked if self.chosen is None and not self.centred else self.forward.jacobian()

    @cached_property
    def plain(self) -> FunctionJacobian:
        """That of the outputs themselves, where this is of contrasts."""
        return FunctionJacobian(self.forward, self.chosen, self.gradients) if self.centred else self

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What `make` gives, made the first time."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def cross(self, weights: Sequence[Tensor]) -> Tensor:  # (N, C, R)
        """sum over parameters of weight <J, G> with the gradients G of all points, R = sum of m K."""
        terms = (_summed(_cross, self.asked, uses, weights).flatten(2) for uses in self.gradients())
        return torch.cat([*terms], 2)

    def cross_each(self, weights: Sequence[Tensor]) -> Tensor:  # (C, N, M)
        """The same for each of all outputs by itself."""
        return torch.cat([_summed(_cross_each, self.whole, uses, weights) for uses in self.gradients()], 2)

    def moved(self, steps: Sequence[Tensor]) -> Tensor:  # (r, p) each -> (N, C, r)
        """J U."""
        pairs = zip(self.asked.parameters, steps, strict=True)
        return torch.stack([part.along(step) for part, step in pairs]).sum(0).permute(1, 2, 0)

    def prior(self, asked: Asked, weights: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Return what is asked for of the sum over parameters of weight J J^T."""
        total = None
        for part, weight, shape in zip(self.asked.parameters, weights, shapes, strict=True):
            size = torch.Size(shape).numel()
            term = weight * asked.of(
                part.double(), KroneckerCovariance.independent(weight.new_ones(1).expand(size), shape)
            )
            total = term if total is None else total + term
        assert total is not None
        return total


def _cross(part: JacobianOf, use: Use) -> Tensor:
    return part.cross(use)


def _cross_each(part: JacobianOf, use: Use) -> Tensor:
    return part.cross_each(use)


def _summed(
    product: Callable[[JacobianOf, Use], Tensor], jacobian: Jacobian, uses: list[Use], weights: Sequence[Tensor]
) -> Tensor:
    """Return the sum over parameters of weight times the product of both gradients."""
    total = None
    for part, use, weight in zip(jacobian.parameters, uses, weights, strict=True):
        term = product(part.double(), use.double()).mul_(weight)  # in place: these are large
        total = term if total is None else total.add_(term)
    assert total is not None
    return total
