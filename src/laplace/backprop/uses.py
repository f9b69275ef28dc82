"""The algebra on (a, g): what structures and posteriors ask of one parameter's uses in one batch.

`Outer` is a parameter whose per-example gradient is a sum of outer products, G[k, n] = sum_t g[k, n, t] a[n, t]^T, in
one or more groups; `Dense` holds G itself, and `Sum` adds uses of different kinds. All answer the same questions
(`MomentsOf` while fitting, `JacobianOf` while predicting, where the k are the outputs). G is contracted for some
examples at a time, and never kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor

from laplace.algebra import precise_gram, total
from laplace.backprop.activations import Activations, Stored, grams
from laplace.backprop.gradients import Basis, Covariance, Spread, rotate_left, rotate_right

_ALL = slice(None)
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

    def parts(self, among: slice = _ALL) -> Iterator[slice]:
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

    def along(self, steps: Tensor, part: slice = _ALL) -> Tensor:  # (S, p) -> (S, n, K)
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


@dataclass
class Outer(Use):
    """sum_t g a^T in groups; `reduce` takes positions together before the Kronecker factors are formed."""

    a: Activations
    g: Tensor  # (K, N, Gr, O, T)
    reduce: bool = False
    first: bool = True
    twin: Outer | None = None  # for a bias: the weight that it goes with
    summed: bool = False  # a bias: further uses are added, not further positions
    _last: tuple[Basis | None, Tensor] | None = field(default=None, init=False, repr=False)
    form = "kron"

    @property
    def shape(self) -> tuple[int, int, int]:
        k, n, groups, o, _ = self.g.shape
        return k, n, groups * o * self.a.shape[2]

    @property
    def factors(self) -> tuple[int, int, int]:
        """Gr, O and I."""
        return self.g.shape[2], self.g.shape[3], self.a.shape[2]

    @property
    def positions(self) -> int:  # type: ignore[override]
        """T."""
        return self.g.shape[4]

    @property
    def held(self) -> int:
        _, groups, i, t = self.a.shape
        return groups * i * t if t > 1 else 0

    def contracted(self, part: slice) -> Tensor:
        return contract(self.a.read(part).to(self.g.dtype), self.g[:, part]).flatten(2)

    @property
    def nbytes(self) -> int:
        return self.g.nbytes + self.a.nbytes

    def joined(self, others: list[Use]) -> Outer:
        outers = [self, *(use for use in others if isinstance(use, Outer))]
        if all(use.summed for use in outers):
            return replace(self, g=torch.stack([use.g for use in outers]).sum(0), twin=None)
        a = torch.cat([use._all() for use in outers], 3)
        return Outer(Stored(a), torch.cat([use.g for use in outers], 4), self.reduce, self.first)

    def inputs(self) -> tuple[Tensor, float]:
        n, _, _, t = self.a.shape
        if self.counts is not None:
            return self._counted(self.counts)
        return (grams(self.a.mean()), n) if self.reduce else (self.a.gram(), n * t)

    def _counted(self, counts: Tensor) -> tuple[Tensor, float]:  # (N, T or 1)
        """The same where examples or positions count differently, some examples at a time.

        `reduce` averages over the positions as they count; an example counts as its position that counts most.
        """
        counts = counts.to(self.g.dtype).expand(-1, self.positions)
        scale = counts.sqrt()
        if self.reduce:
            shares = counts / counts.sum(1, keepdim=True).clamp(min=torch.finfo(counts.dtype).tiny)
            counts = counts.amax(1, keepdim=True)
            scale = shares * counts.sqrt()
        rows = (self.a.read(part).to(self.g.dtype) * scale[part, None, None] for part in self.parts())
        found = total(grams(a.sum(3, keepdim=True) if self.reduce else a) for a in rows)
        return found, float(counts.double().sum())

    def input_rows(self) -> Tensor | None:
        n, groups, i, t = self.a.shape
        alike = self.counts is None
        return self._all().reshape(n, i) if alike and groups == 1 and t == 1 and i > 1 else None

    def some(self, vectors: slice) -> Outer:
        return replace(self, g=self.g[vectors], twin=None).within(self.chunk)

    def outputs(self) -> Tensor:
        return self._same_g._output_gram

    def output_squares(self) -> Tensor:
        g = self.g.sum(4, keepdim=True) if self.reduce else self.g
        return g.square().sum((0, 1, 4))

    @cached_property
    def _output_gram(self) -> Tensor:
        g = self.g.sum(4, keepdim=True) if self.reduce else self.g
        return grams(g.flatten(0, 1))

    def squares(self) -> Tensor:
        if self.positions > 1:
            return super().squares()
        a = self._all()[..., 0].square()  # (N, Gr, I)
        return torch.einsum("ngo,ngi->goi", self.g[..., 0].square().sum(0), a).flatten()

    def squares_in(self, left: Basis | None, right: Basis | None) -> Tensor:  # (Gr, O, I)
        if self.positions > 1:
            bases = Spread(self.g.new_ones(()).expand(self.factors), left, right)
            return total(self.rotated(part, bases).square().sum((0, 1)) for part in self.parts())
        g = self._turned(left).square().sum(0).unflatten(1, self.g.shape[2:4])  # (N, Gr, O)
        return torch.einsum("nvo,nvi->voi", g, self._turned_input_squares(right))

    def rotated(self, part: slice, spread: Spread) -> Tensor:
        """Rotates on whichever side of the contraction is cheaper: activations, or what they are contracted to."""
        if not self._own_bases(spread):
            return super().rotated(part, spread)
        a, g = self.a.read(part).to(self.g.dtype), self.g[:, part]
        k, _, _, o, t = g.shape
        early_right, early_left = t <= k * o, t <= a.shape[2]
        out = contract(
            rotate_left(a, spread.right if early_right else None), rotate_left(g, spread.left if early_left else None)
        )
        out = out if early_right else rotate_right(out, spread.right)
        return out if early_left else rotate_left(out, spread.left)

    def variance(self, spread: Spread) -> Tensor:
        if self.positions > 1 or not self._own_bases(spread):
            return super().variance(spread)
        return torch.einsum("knv,nv->nk", self._turned(spread.left).square(), self._weights(spread))

    def covariance(self, spread: Spread) -> Tensor:
        if self.positions > 1 or not self._own_bases(spread):
            return super().covariance(spread)
        g = self._turned(spread.left).transpose(0, 1)  # (N, K, Gr * O)
        return (g * self._weights(spread).unsqueeze(1)) @ g.mT

    def along(self, steps: Tensor, part: slice = _ALL) -> Tensor:
        if self.positions > 1:
            return super().along(steps, part)
        g = self.g[:, part, ..., 0]
        _, n, groups, o = g.shape
        a, found = self.a.read(part).to(g.dtype)[..., 0], []
        for some in steps.unflatten(1, (groups, o, -1)).split(max(1, self.chunk // (n * groups * o))):
            moved = torch.einsum("nvi,svoi->snvo", a, some)
            found.append(torch.einsum("knvo,snvo->snk", g, moved))
        return torch.cat(found)

    def back(self, coefficients: Tensor) -> Tensor:
        if self.positions > 1:
            return super().back(coefficients)
        g, a, found = self.g[..., 0], self._all()[..., 0], []
        for some in coefficients.split(max(1, self.chunk // g[0].numel())):
            sent = torch.einsum("snk,knvo->snvo", some, g)
            found.append(torch.einsum("snvo,nvi->svoi", sent, a).flatten(1))
        return torch.cat(found)

    def trace(self) -> Tensor:
        if self.positions > 1:
            return super().trace()
        return (self.g[..., 0].square().sum((0, 3)) * self._all()[..., 0].square().sum(2)).sum()

    def settled(self, part: slice) -> Use:
        if self.positions > 1:
            return super().settled(part)
        return replace(self, a=Stored(self.a.read(part)), g=self.g[:, part], twin=None).within(self.chunk)

    def load(self, steps: int) -> int:
        if self.positions > 1:
            return super().load(steps)
        k, _, groups, o, _ = self.g.shape
        return groups * ((k + steps) * o + self.a.shape[2]) + k * steps

    def cross(self, other: Use) -> Tensor:
        if not self._single(other):
            return super().cross(other)
        aa = self._input_products(other)  # (Gr, N, M)
        g, h = (use.g[..., 0].permute(2, 1, 0, 3) for use in (self, other))  # (Gr, N, K, O)
        total = None
        for x, y, a in zip(g, h, aa, strict=True):
            term = (x.flatten(0, 1) @ y.flatten(0, 1).T).unflatten(1, y.shape[:2]).unflatten(0, x.shape[:2])
            term.mul_(a[:, None, :, None])  # in place: these are large
            total = term if total is None else total.add_(term)
        assert total is not None
        return total

    def cross_each(self, other: Use) -> Tensor:
        if not self._single(other):
            return super().cross_each(other)
        g, h = (use.g[..., 0].permute(2, 0, 1, 3) for use in (self, other))  # (Gr, K, N, O)
        return (self._input_products(other).unsqueeze(1) * (g @ h.mT)).sum(0)

    def double(self) -> Outer:
        return replace(self, g=self.g.double(), twin=None).within(self.chunk)

    def _single(self, other: Use) -> TypeGuard[Outer]:
        """Whether both are seen once per example, so that <G, G'> = (a . a') (g . g')."""
        return isinstance(other, Outer) and self.positions == other.positions == 1

    def _input_products(self, other: Outer) -> Tensor:  # (Gr, N, M)
        a, b = (use._all()[..., 0].transpose(0, 1) for use in (self, other))  # (Gr, N, I)
        return a @ b.mT

    def _all(self) -> Tensor:  # (N, Gr, I, T)
        return self.a.read(slice(None)).to(self.g.dtype)

    @property
    def _same_g(self) -> Outer:
        """Whose g is the same: a bias shares that of its weight, where there is one position."""
        twin = self.twin
        return twin if twin is not None and twin.positions == 1 and twin.g.shape == self.g.shape else self

    def _turned(self, basis: Basis | None) -> Tensor:  # (K, N, Gr * O)
        """g in a basis, where there is one position; the last one is kept for the bias that asks next."""
        same = self._same_g
        if same._last is None or same._last[0] is not basis:
            g = rotate_right(same.g.squeeze(4).unsqueeze(3), basis).squeeze(3).flatten(2)
            same._last = basis, g
        return same._last[1]

    def _own_bases(self, spread: Spread) -> bool:
        return spread.variances.shape == (*self.g.shape[2:4], self.a.shape[2])

    def _weights(self, spread: Spread) -> Tensor:  # (N, Gr * O)
        return torch.einsum("nvi,voi->nvo", self._turned_input_squares(spread.right), spread.variances).flatten(1)

    def _turned_input_squares(self, basis: Basis | None) -> Tensor:  # (N, Gr, I)
        """(Q_A^T a)^2, where there is one position."""
        return rotate_right(self._all().mT, basis).squeeze(2).square()


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


def contract(a: Tensor, g: Tensor) -> Tensor:  # (n, Gr, I, T), (K, n, Gr, O, T) -> (K, n, Gr, O, I)
    """sum_t g a^T, in groups."""
    k, n, groups, o, t = g.shape
    left = g.permute(1, 2, 0, 3, 4).reshape(n, groups, k * o, t)
    return (left @ a.mT).reshape(n, groups, k, o, -1).permute(2, 0, 1, 3, 4)
