"""The algebra on (a, g): what structures and posteriors ask of one parameter's uses in one batch.

`Use` answers all questions (`MomentsOf` while fitting, `JacobianOf` while predicting, where the k are the outputs) from
G, the per-example gradients, which are contracted for some examples at a time and never kept. `Dense` holds G itself,
`Sum` adds uses of different kinds; `Outer`, in outer.py, has G = sum_t g a^T and mostly need not contract it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from laplace.algebra import precise_gram, total
from laplace.backprop.gradients import Basis, Covariance, Spread, rotate_left, rotate_right

EVERY = slice(None)  # example
Kind = TypeVar("Kind", bound="Use")


class Use(ABC):
    """One parameter's gradients for K vectors and N examples."""

    form: str
    g: Tensor  # (K, N, ...)
    positions: int = 1  # T
    chunk: int = 2**23  # numbers of G contracted at a time
    first: bool = True
    inputs_left: bool = False
    diagonal_inputs: bool = False
    counts: Tensor | None = None  # (N, T or 1), how often each example counts, or each position of it; None: once

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """K, N and the number of weights p."""

    @property
    def weights(self) -> int:
        """p."""
        return self.shape[2]

    @abstractmethod
    def contracted(self, part: slice) -> Tensor:  # (K, n, p)
        """G of some examples."""

    def joined(self, others: list[Use]) -> Use:
        """This use of a parameter and others of the same kind as one."""
        return Sum([self, *others])

    def counting(self, counts: Tensor | None) -> None:  # (N, positions of the outputs)
        """Take note of how often each example counts: as its most, where its positions are not those of the outputs."""
        if counts is not None and counts.shape[1] not in (1, self.positions):
            counts = counts.amax(1, keepdim=True)
        self.counts = counts

    def within(self: Kind, chunk: int) -> Kind:
        """This one, contracted at most so many numbers at a time."""
        self.chunk = chunk
        return self

    @property
    def nbytes(self) -> int:
        """What it takes while it is kept."""
        return self.g.nbytes

    @abstractmethod
    def some(self, vectors: slice) -> Use:
        """For some of the K vectors alone."""

    @property
    def held(self) -> int:
        """Numbers per example that are written out to contract G, besides G."""
        return 0

    def parts(self, among: slice = EVERY) -> Iterator[slice]:
        """Slices of examples whose G is small enough."""
        k, n, p = self.shape
        first, last, _ = among.indices(n)
        step = max(1, self.chunk // max(1, k * p + self.held))
        for start in range(first, last, step):
            yield slice(start, min(start + step, last))

    def squares(self) -> Tensor:  # (p,)
        return total(self.contracted(part).square().sum((0, 1)) for part in self.parts())

    def gram(self) -> Tensor:  # (p, p)
        return total(precise_gram(self.contracted(part).flatten(0, 1)) for part in self.parts())

    @property
    def factors(self) -> tuple[int, int, int]:
        raise NotImplementedError(f"{type(self).__name__} has no Kronecker form")

    def inputs(self) -> tuple[Tensor, float | Tensor]:
        raise NotImplementedError(f"{type(self).__name__} has no Kronecker form")

    def input_rows(self) -> Tensor | None:
        return None

    def outputs(self) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no Kronecker form")

    def output_squares(self) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no Kronecker form")

    def squares_in(self, left: Basis | None, right: Basis | None) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no Kronecker form")

    def rotated(self, part: slice, spread: Spread) -> Tensor:  # (K, n, Gr, O, I)
        """Q_B^T G Q_A of some examples."""
        g = self.contracted(part).unflatten(2, spread.variances.shape)
        return rotate_left(rotate_right(g, spread.right), spread.left)

    def variance(self, spread: Spread) -> Tensor:  # (N, K)
        r = spread.variances.flatten()
        return torch.cat([_weighed(self.rotated(part, spread).flatten(2).square(), r) for part in self.parts()])

    def covariance(self, spread: Spread) -> Tensor:  # (N, K, K)
        root = spread.variances.sqrt().flatten()
        rows = ((self.rotated(part, spread).flatten(2) * root).transpose(0, 1) for part in self.parts())
        return torch.cat([x @ x.mT for x in rows])

    def product(self, spread: Spread, v: Tensor) -> Tensor:  # v: (N, K) -> (N, K)
        r, out = spread.variances.flatten(), []
        for part in self.parts():
            g = self.rotated(part, spread).flatten(2)
            out.append(torch.einsum("knp,np->nk", g, torch.einsum("knp,nk->np", g, v[part]) * r))
        return torch.cat(out)

    def joint(self, spread: Spread) -> Tensor:  # (N, K, N, K)
        root = spread.variances.sqrt().flatten()

        def rows(part: slice) -> Tensor:  # (K, n, p)
            return self.rotated(part, spread).flatten(2) * root

        return all_pairs(rows, rows, list(self.parts()))

    def along(self, steps: Tensor, part: slice = EVERY) -> Tensor:  # (S, p) -> (S, n, K)
        """<G, step> of some examples: the change of the outputs to first order."""
        return torch.cat([torch.einsum("knp,sp->snk", self.contracted(s), steps) for s in self.parts(part)], 1)

    def back(self, coefficients: Tensor) -> Tensor:  # (S, N, K) -> (S, p)
        """sum of coefficient times G over examples and vectors: the transpose of `along`."""
        return total(torch.einsum("snk,knp->sp", coefficients[:, p], self.contracted(p)) for p in self.parts())

    def trace(self) -> Tensor:  # ()
        """sum of G^2 over everything."""
        return self.squares().sum()

    def settled(self, part: slice) -> Use:
        """That of some examples, with G contracted once and for all where it would be contracted at each question."""
        return Dense(self.contracted(part)).within(self.chunk)

    def load(self, steps: int) -> int:
        """Numbers per example that `along` and `back` of so many steps take, once settled."""
        k, _, p = self.shape
        return k * (p + steps)

    def alone(self) -> Written:
        """The Jacobian in this parameter only."""
        return Written([self], lambda: (self.contracted(part) for part in self.parts()))

    def cross(self, other: Use) -> Tensor:  # (N, K, M, L)
        """<G, G'> for all pairs with the L vectors and M examples of another use of the same parameter."""
        return self._pairs(other, "knp,lmp->nkml", 0, 2)

    def cross_each(self, other: Use) -> Tensor:  # (K, N, M)
        """<G, G'> for the pairs with the same vector number k."""
        return self._pairs(other, "knp,kmp->knm", 1, 2)

    def _pairs(self, other: Use, product: str, mine: int, others: int) -> Tensor:
        rows = []
        for part in self.parts():
            g = self.contracted(part)
            terms = [torch.einsum(product, g, other.contracted(theirs)) for theirs in other.parts()]
            rows.append(torch.cat(terms, others))
        return torch.cat(rows, mine)

    @abstractmethod
    def double(self) -> Use:
        """The same in float64."""


class Written:
    """The Jacobian in some parameters; written out for a dense covariance only, in chunks of examples."""

    def __init__(self, parameters: list[Use], rows: Callable[[], Iterator[Tensor]]) -> None:  # (K, n, P) each
        self.parameters, self._rows = parameters, rows

    def variance(self, covariance: Covariance) -> Tensor:
        return torch.cat([(j @ covariance.root).square().sum(-1).T for j in self._rows()])

    def covariance(self, covariance: Covariance) -> Tensor:
        rows = ((j @ covariance.root).transpose(0, 1) for j in self._rows())
        return torch.cat([x @ x.mT for x in rows])

    def joint(self, covariance: Covariance) -> Tensor:
        rows = []
        for j in self._rows():
            x = j @ covariance.root
            others = (other @ covariance.root for other in self._rows())
            rows.append(torch.cat([torch.einsum("knp,lmp->nkml", x, other) for other in others], 2))
        return torch.cat(rows)

    def variance_in(self, basis: Tensor, variances: Tensor) -> Tensor:
        parts = [(j @ basis).square() @ variances.T for j in self._rows()]  # (C, n, G)
        return torch.cat(parts, 1).permute(2, 1, 0)

    def along(self, steps: Tensor) -> Tensor:  # (S, P) -> (S, N, K)
        return along(self.parameters, split(steps, self.parameters))


@dataclass
class Dense(Use):
    """Gradients without a Kronecker form."""

    g: Tensor  # (K, N, p)
    form = "dense"

    @property
    def shape(self) -> tuple[int, int, int]:
        k, n, p = self.g.shape
        return k, n, p

    def contracted(self, part: slice) -> Tensor:
        return self.g[:, part]

    def some(self, vectors: slice) -> Dense:
        return Dense(self.g[vectors]).within(self.chunk)

    def double(self) -> Dense:
        return Dense(self.g.double()).within(self.chunk)


@dataclass
class Sum(Use):
    """Several uses of one parameter, whose gradients add."""

    uses: list[Use]
    form = "dense"

    @property
    def g(self) -> Tensor:  # type: ignore[override]
        return self.uses[0].g

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.uses[0].shape

    def contracted(self, part: slice) -> Tensor:
        return total(use.contracted(part) for use in self.uses)

    def within(self, chunk: int) -> Sum:
        self.chunk, self.uses = chunk, [use.within(chunk) for use in self.uses]
        return self

    @property
    def nbytes(self) -> int:
        return sum(use.nbytes for use in self.uses)

    def some(self, vectors: slice) -> Sum:
        return Sum([use.some(vectors) for use in self.uses]).within(self.chunk)

    def double(self) -> Sum:
        return Sum([use.double() for use in self.uses]).within(self.chunk)


def along(uses: Sequence[Use], steps: Sequence[Tensor]) -> Tensor:  # (S, p) each -> (S, N, K)
    """<G, step> of several parameters together."""
    return total(use.along(step) for use, step in zip(uses, steps, strict=True))


def split(steps: Tensor, uses: Sequence[Use]) -> Sequence[Tensor]:  # (S, P) -> (S, p) each
    """Steps of several parameters together cut into those of each."""
    return steps.split([use.weights for use in uses], 1)


def _weighed(x: Tensor, weights: Tensor) -> Tensor:  # (K, n, p), (p,) -> (n, K)
    """Sums with weights, in the order in which x lies in memory: rows apart from each other cost several times more."""
    return x.transpose(0, 1) @ weights if x.stride(0) < x.stride(1) else (x @ weights).T


def combined(uses: list[Use]) -> Use:
    """Several uses of one parameter as one: further positions where all are outer products, else their sum."""
    if len(uses) == 1:
        return uses[0]
    first, *others = uses
    return first.joined(others) if all(type(use) is type(first) for use in others) else Sum(uses)


def all_pairs(left: Callable[[slice], Tensor], right: Callable[[slice], Tensor], parts: list[slice]) -> Tensor:
    """left . right for all pairs of examples and vectors, (N, K, N, K), from (K, n, p) for some examples at a time."""
    rows = []
    for one in parts:
        x = left(one)
        rows.append(torch.cat([torch.einsum("knp,lmp->nkml", x, right(other)) for other in parts], 2))
    return torch.cat(rows)
