"""Keep the training points that a posterior over functions needs, and compute the network's gradients there.

A point is kept as its inputs and the vectors that are sent back from its outputs. The gradients are computed by running
the network again. They are kept, too, if they are small: in float64, and those at many positions contracted, if that
fits; else as the network gave them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from laplace.backprop.activations import Ones
from laplace.backprop.asked import Asked
from laplace.backprop.covariances import KroneckerCovariance
from laplace.backprop.gradients import Engine, Forward, Jacobian
from laplace.backprop.outer import Outer
from laplace.backprop.uses import DenseUse, Use
from laplace.linalg.symmetric import total
from laplace.network.batches import Batch

Value = TypeVar("Value")
Gradients = Callable[[], Iterable[list[Use]]]  # of some points at a time, one Use per parameter


@dataclass
class Points:
    """Holds inputs and vectors (m, K, C) of the kept points. Points of equal shapes share a batch."""

    parts: Sequence[Batch]
    numbers: Tensor  # (M,), each point's place in the order of reading, ascending
    _held: list[list[Use]] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return sum(len(part.y) for part in self.parts)

    def gradients(self, engine: Engine, limit: int) -> Iterable[list[Use]]:
        """Return the gradients of each parameter, some points at a time. Keep them if they fit in `limit` bytes."""
        if self._held:
            return self._held
        runs = self._runs(engine)
        first = next(runs)
        share = limit * first[0].shape[1] / len(self)  # bytes for these points
        if sum(map(_bytes_ready, first)) <= share:
            self._held = [_all_ready(uses) for uses in chain([first], runs)]
        elif sum(use.nbytes for use in first) <= share:
            self._held = [first, *runs]
        else:
            return chain([first], runs)
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
        """Return a copy on `device`."""
        device = torch.device(device)
        parts = [Batch(part.index, part.inputs.to(device), part.y.to(device)) for part in self.parts]
        return Points(parts, self.numbers)


class FunctionForward:
    """Pairs a run of the network at new inputs with the gradients of the kept points."""

    def __init__(self, forward: Forward, gradients: Gradients) -> None:
        self.forward, self.gradients, self.outputs = forward, gradients, forward.outputs

    def jacobian(self, outputs: Tensor | None = None, centred: bool = False) -> FunctionJacobian:
        """Return the Jacobian with the products that posteriors over functions need."""
        return FunctionJacobian(self.forward, outputs, self.gradients, centred)

    def copied(self) -> FunctionForward:
        """Return a copy in its own memory."""
        return FunctionForward(self.forward.copied(), self.gradients)

    def counting(self, kept: Tensor) -> FunctionForward:
        """Return the same run, in which only the rows `kept` count."""
        return FunctionForward(self.forward.counting(kept), self.gradients)

    def cut(self) -> Iterator[tuple[FunctionForward, slice]]:
        """Yield the whole run as a single part."""
        yield self, slice(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.forward, name)


class FunctionJacobian:
    """Computes products with the Jacobian at new inputs, in float64. Keeps results: a grid of priors needs the same."""

    def __init__(self, forward: Forward, chosen: Tensor | None, gradients: Gradients, centred: bool = False) -> None:
        self.forward, self.chosen, self.gradients, self.centred = forward, chosen, gradients, centred
        self._known: dict[Hashable, Any] = {}

    @cached_property
    def asked(self) -> Jacobian:
        """Return the Jacobian of the chosen outputs, or of the contrasts of all."""
        return self.forward.jacobian(self.chosen, self.centred)

    @cached_property
    def whole(self) -> Jacobian:
        """Return the Jacobian of all outputs."""
        return self.asked if self.chosen is None and not self.centred else self.forward.jacobian()

    @cached_property
    def plain(self) -> FunctionJacobian:
        """Return the Jacobian of the outputs themselves, where this one is of contrasts."""
        return FunctionJacobian(self.forward, self.chosen, self.gradients) if self.centred else self

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the result of `make()`, which is called only the first time for a key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def cross(self, weights: Sequence[Tensor]) -> Tensor:  # (N, C, R)
        """Return the sum over parameters of weight <J, G> with the gradients G of all points, R = sum of m K."""
        terms = (_summed(False, self.asked, uses, weights).flatten(2) for uses in self.gradients())
        return torch.cat([*terms], 2)

    def cross_each(self, weights: Sequence[Tensor]) -> Tensor:  # (C, N, M)
        """Return the same for each output by itself."""
        return torch.cat([_summed(True, self.whole, uses, weights) for uses in self.gradients()], 2)

    def moved(self, steps: Iterable[Tensor]) -> Tensor:  # (r, p) each -> (N, C, r)
        """Return J U, in float64 if the steps are."""
        pairs = zip(self.asked.parameters, steps, strict=True)
        terms = ((part.double() if step.dtype == torch.float64 else part).along(step) for part, step in pairs)
        return total(terms).permute(1, 2, 0)

    def prior(self, asked: Asked, weights: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the asked part of the sum over parameters of weight J J^T."""
        total = None
        for part, weight, shape in zip(self.asked.parameters, weights, shapes, strict=True):
            size = torch.Size(shape).numel()
            term = weight * asked.of(
                part.double(), KroneckerCovariance.independent(weight.new_ones(1).expand(size), shape)
            )
            total = term if total is None else total + term
        assert total is not None
        return total


def _bytes_ready(use: Use) -> int:
    """Return how many bytes `_ready` keeps."""
    return 8 * math.prod(use.shape) if _at_many_positions(use) else use.nbytes * 8 // use.g.element_size()


def _all_ready(uses: list[Use]) -> list[Use]:
    """Return all gradients ready. A bias still shares the g of its weight."""
    ready = [_ready(use) for use in uses]
    for bias, weight in _biases(uses).items():
        one, g = ready[bias], ready[weight].g
        assert isinstance(one, Outer)
        ready[bias] = replace(one, a=Ones(g), g=g, twin=ready[weight]).within(one.chunk)
    return ready


def _ready(use: Use) -> Use:
    """Return the gradients in float64, and as every product reads them: point by point, or contracted."""
    use = use.double()
    if not isinstance(use, Outer):
        return use
    if not _at_many_positions(use):
        return replace(use, g=use.g.transpose(0, 1).contiguous().transpose(0, 1)).within(use.chunk)
    rows = torch.cat([use.contracted(part).transpose(0, 1) for part in use.parts()])  # (M, K, p): einsum copies nothing
    return DenseUse(rows.transpose(0, 1)).within(use.chunk)


def _at_many_positions(use: Use) -> bool:
    return isinstance(use, Outer) and use.positions > 1


def _biases(uses: Sequence[Any]) -> dict[int, int]:
    """Return the place of the weight for each bias that shares its g."""
    found = dict[int, int]()
    for i, use in enumerate(uses):
        twin = use.twin if isinstance(use, Outer) else None
        place = next((j for j, other in enumerate(uses) if other is twin), None)
        if place is not None and use.is_bias_of(uses[place]):
            found[i] = place
    return found


def _summed(each: bool, jacobian: Jacobian, uses: list[Use], weights: Sequence[Tensor]) -> Tensor:
    """Return the sum over parameters of weight times `cross` of both gradients, or times `cross_each`.

    The gradients of a bias are multiplied with those of its weight, if all its g are the same.
    """
    total, parts = None, jacobian.parameters
    ours, theirs = _biases(parts), _biases(uses)
    biases = {place: i for i, place in ours.items() if theirs.get(i) == place}
    for i, (part, use, weight) in enumerate(zip(parts, uses, weights, strict=True)):
        if i in biases.values():
            continue  # it comes with its weight
        part, use = part.double(), use.double()
        if i in biases:
            assert isinstance(part, Outer)
            assert isinstance(use, Outer)
            term = part.cross_with_bias(use, weight, weights[biases[i]], each)
        else:
            term = (part.cross_each(use) if each else part.cross(use)).mul_(weight)  # in place: these are large
        total = term if total is None else total.add_(term)
    assert total is not None
    return total
