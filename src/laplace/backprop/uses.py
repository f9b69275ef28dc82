"""Answer what structures and posteriors ask of one parameter's gradients in one batch: the algebra on (a, g).

`Use` answers all questions (`MomentsOf` while fitting; `JacobianOf` while predicting, where the k are the outputs) from
G, the per-example gradients, which are contracted for some examples at a time and never kept. `DenseUse` holds G
itself, and `SumUse` adds uses of different kinds. `Outer`, in outer.py, has G = sum_t g a^T and mostly need not
contract it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from laplace.backprop.covariances import Basis, Covariance, KroneckerCovariance, rotate_left, rotate_right
from laplace.backprop.gradients import Sketchable
from laplace.linalg.symmetric import precise_gram, total

EVERY = slice(None)  # example
Kind = TypeVar("Kind", bound="Use")


class Use(Sketchable, ABC):
    """Holds one parameter's gradients for K vectors and N examples."""

    form: str
    g: Tensor  # (K, N, ...)
    positions: int = 1  # T
    chunk: int = 2**23  # most numbers of G contracted at a time
    first: bool = True
    inputs_left: bool = False
    diagonal_inputs: bool = False
    counts: Tensor | None = None  # (N, T or 1), how often each example counts, or each position of it; None: once
    rows: int = 1  # of the tensor; set by whoever knows its shape

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Return K, N and the number of weights p."""

    @property
    def weights(self) -> int:
        """Return the number of weights p."""
        return self.shape[2]

    @abstractmethod
    def contracted(self, part: slice) -> Tensor:  # (K, n, p)
        """Return G of some examples."""

    def times(self, matrix: Tensor, part: slice) -> Tensor:  # (p, R) -> (K, n, R)
        """Return G times a matrix, for some examples."""
        return self.contracted(part) @ matrix

    def joined(self, others: list[Use]) -> Use:
        """Combine this use of a parameter with others of the same kind."""
        return SumUse([self, *others])

    def counting(self, counts: Tensor | None) -> None:  # (N, positions of the outputs)
        """Set how often each example counts: its largest count, if its positions are not those of the outputs."""
        if counts is not None and counts.shape[1] not in (1, self.positions):
            counts = counts.amax(1, keepdim=True)
        self.counts = counts

    def within(self: Kind, chunk: int) -> Kind:
        """Set how many numbers of G are contracted at a time, and return this use."""
        self.chunk = chunk
        return self

    @property
    def nbytes(self) -> int:
        """Return how many bytes it occupies while it is kept."""
        return self.g.nbytes

    @abstractmethod
    def some(self, vectors: slice) -> Use:
        """Return the use for some of the K vectors only."""

    @property
    def held(self) -> int:
        """Return how many numbers per example are written out to contract G, besides G."""
        return 0

    def parts(self, among: slice = EVERY) -> Iterator[slice]:
        """Yield slices of examples whose G is small enough."""
        k, n, p = self.shape
        first, last, _ = among.indices(n)
        step = max(1, self.chunk // max(1, k * p + self.held))
        for start in range(first, last, step):
            yield slice(start, min(start + step, last))

    def written(self) -> Iterator[slice]:
        """Yield slices of examples whose G may be written out: all at once where it is there already."""
        return self.parts()

    def squares(self) -> Tensor:  # (p,)
        return total(self.contracted(part).square().sum((0, 1)) for part in self.parts())

    def gram(self) -> Tensor:  # (p, p)
        return total(precise_gram(self.contracted(part).flatten(0, 1)) for part in self.parts())

    def row_grams(self) -> Tensor:  # (O, I, I)
        parts = (self.contracted(part).flatten(0, 1).unflatten(1, (self.rows, -1)) for part in self.parts())
        return total(batched_grams(part) for part in parts)

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

    def rotated(self, part: slice, spread: KroneckerCovariance) -> Tensor:  # (K, n, Gr, O, I)
        """Return Q_B^T G Q_A of some examples."""
        g = self.contracted(part).unflatten(2, spread.variances.shape)
        return rotate_left(rotate_right(g, spread.right), spread.left)

    def variance(self, spread: KroneckerCovariance) -> Tensor:  # (N, K)
        r = spread.variances.flatten()
        return torch.cat([_weighed(self.rotated(part, spread).flatten(2).square(), r) for part in self.parts()])

    def covariance(self, spread: KroneckerCovariance) -> Tensor:  # (N, K, K)
        root = spread.variances.sqrt().flatten()
        rows = ((self.rotated(part, spread).flatten(2) * root).transpose(0, 1) for part in self.parts())
        return torch.cat([x @ x.mT for x in rows])

    def product(self, spread: KroneckerCovariance, v: Tensor) -> Tensor:  # v: (N, K) -> (N, K)
        r, out = spread.variances.flatten(), []
        for part in self.parts():
            g = self.rotated(part, spread).flatten(2)
            out.append(torch.einsum("knp,np->nk", g, torch.einsum("knp,nk->np", g, v[part]) * r))
        return torch.cat(out)

    def joint(self, spread: KroneckerCovariance) -> Tensor:  # (N, K, N, K)
        root = spread.variances.sqrt().flatten()

        def rows(part: slice) -> Tensor:  # (K, n, p)
            return self.rotated(part, spread).flatten(2) * root

        return all_pairs(rows, rows, list(self.parts()))

    def along(self, steps: Tensor, part: slice = EVERY) -> Tensor:  # (S, p) -> (S, n, K)
        """Return <G, step> of some examples: the change of the outputs to first order."""
        return torch.cat([torch.einsum("knp,sp->snk", self.contracted(s), steps) for s in self.parts(part)], 1)

    def back(self, coefficients: Tensor) -> Tensor:  # (S, N, K) -> (S, p)
        """Return the sum of coefficient times G over examples and vectors: the transpose of `along`."""
        return total(torch.einsum("snk,knp->sp", coefficients[:, p], self.contracted(p)) for p in self.parts())

    def trace(self) -> Tensor:  # ()
        """Return the sum of G^2 over everything."""
        return self.squares().sum()

    def settled(self, part: slice) -> Use:
        """Return the use of some examples, with G contracted once if every question would contract it again."""
        return DenseUse(self.contracted(part)).within(self.chunk)

    def load(self, steps: int) -> int:
        """Return how many numbers per example `along` and `back` of so many steps need, once settled."""
        k, _, p = self.shape
        return k * (p + steps)

    def alone(self) -> NetworkJacobian:
        """Return the Jacobian in this parameter only."""
        return NetworkJacobian([self], self.parts)

    def cross(self, other: Use) -> Tensor:  # (N, K, M, L)
        """Return <G, G'> for all pairs with the L vectors and M examples of another use of the same parameter."""
        return self._pairs(other, "knp,lmp->nkml", 0, 2)

    def cross_each(self, other: Use) -> Tensor:  # (K, N, M)
        """Return <G, G'> for the pairs with the same vector number k."""
        return self._pairs(other, "knp,kmp->knm", 1, 2)

    def _pairs(self, other: Use, product: str, mine: int, others: int) -> Tensor:
        rows = []
        for part in self.parts():
            g = self.contracted(part)
            terms = [torch.einsum(product, g, other.contracted(theirs)) for theirs in other.written()]
            rows.append(torch.cat(terms, others))
        return torch.cat(rows, mine)

    @abstractmethod
    def double(self) -> Use:
        """Return the use in float64."""


class NetworkJacobian:
    """Computes with a Jacobian in some parameters, written out only for a dense covariance, in chunks of examples."""

    def __init__(self, parameters: Sequence[Any], parts: Callable[[], Iterator[slice]]) -> None:
        self.parameters = parameters  # `Use` or `HeadJacobianOf`
        self._parts = parts  # slices of examples

    def variance(self, covariance: Covariance) -> Tensor:
        return torch.cat([x.square().sum(-1).T for x in self._times(covariance.root)])

    def covariance(self, covariance: Covariance) -> Tensor:
        rows = (x.transpose(0, 1) for x in self._times(covariance.root))
        return torch.cat([x @ x.mT for x in rows])

    def joint(self, covariance: Covariance) -> Tensor:
        rows = []
        for x in self._times(covariance.root):
            others = self._times(covariance.root)
            rows.append(torch.cat([torch.einsum("knp,lmp->nkml", x, other) for other in others], 2))
        return torch.cat(rows)

    def variance_in(self, basis: Tensor, variances: Tensor) -> Tensor:
        parts = [x.square() @ variances.T for x in self._times(basis)]  # (C, n, G)
        return torch.cat(parts, 1).permute(2, 1, 0)

    def _times(self, matrix: Tensor) -> Iterator[Tensor]:  # (P, R) -> (K, n, R) each
        """Yield J times a matrix, some examples at a time. Each parameter adds the product with its own columns."""
        factors = matrix.split([use.weights for use in self.parameters])
        for part in self._parts():
            yield total(use.times(rows, part) for use, rows in zip(self.parameters, factors, strict=True))

    def along(self, steps: Tensor) -> Tensor:  # (S, P) -> (S, N, K)
        return along(self.parameters, split(steps, self.parameters))

    @property
    def examples(self) -> int:
        return self.parameters[0].shape[1]

    def written(self, part: slice) -> Tensor:  # (n, K, P)
        return torch.cat([use.contracted(part) for use in self.parameters], 2).transpose(0, 1)


@dataclass
class DenseUse(Use):
    """Holds gradients without a Kronecker form."""

    g: Tensor  # (K, N, p)
    form = "dense"
    absent = False

    @property
    def shape(self) -> tuple[int, int, int]:
        k, n, p = self.g.shape
        return k, n, p

    def contracted(self, part: slice) -> Tensor:
        return self.g[:, part]

    def written(self) -> Iterator[slice]:
        yield EVERY

    def some(self, vectors: slice) -> DenseUse:
        return DenseUse(self.g[vectors]).within(self.chunk)

    def double(self) -> DenseUse:
        return DenseUse(self.g.double()).within(self.chunk)


class NoUse(DenseUse):
    """Stands for a tensor that a batch does not use: its gradients are zeros, which go with those of any form."""

    absent = True


@dataclass
class SumUse(Use):
    """Adds several uses of one parameter."""

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

    def within(self, chunk: int) -> SumUse:
        self.chunk, self.uses = chunk, [use.within(chunk) for use in self.uses]
        return self

    @property
    def nbytes(self) -> int:
        return sum(use.nbytes for use in self.uses)

    def some(self, vectors: slice) -> SumUse:
        return SumUse([use.some(vectors) for use in self.uses]).within(self.chunk)

    def double(self) -> SumUse:
        return SumUse([use.double() for use in self.uses]).within(self.chunk)


def along(uses: Sequence[Any], steps: Sequence[Tensor]) -> Tensor:  # (S, p) each -> (S, N, K)
    """Return <G, step> summed over several parameters."""
    return total(use.along(step) for use, step in zip(uses, steps, strict=True))


def split(steps: Tensor, uses: Sequence[Any]) -> Sequence[Tensor]:  # (S, P) -> (S, p) each
    """Cut steps of several parameters together into the steps of each."""
    return steps.split([use.weights for use in uses], 1)


def batched_grams(x: Tensor) -> Tensor:  # (M, O, I) -> (O, I, I)
    """Return the sum of x x^T for each o, in float64."""
    by_row = x.double().transpose(0, 1)
    return by_row.mT @ by_row


def _weighed(x: Tensor, weights: Tensor) -> Tensor:  # (K, n, p), (p,) -> (n, K)
    """Return weighted sums in the order in which x lies in memory. The other order costs several times more."""
    return x.transpose(0, 1) @ weights if x.stride(0) < x.stride(1) else (x @ weights).T


def combined(uses: list[Use]) -> Use:
    """Combine several uses of one parameter: by joining them if all are of one kind, else by their sum."""
    if len(uses) == 1:
        return uses[0]
    first, *others = uses
    return first.joined(others) if all(type(use) is type(first) for use in others) else SumUse(uses)


def all_pairs(left: Callable[[slice], Tensor], right: Callable[[slice], Tensor], parts: list[slice]) -> Tensor:
    """Return left . right for all pairs of examples and vectors, (N, K, N, K).

    `left` and `right` give (K, n, p) for some examples at a time.
    """
    rows = []
    for one in parts:
        x = left(one)
        rows.append(torch.cat([torch.einsum("knp,lmp->nkml", x, right(other)) for other in parts], 2))
    return torch.cat(rows)
