"""Gradients that are sums of outer products, G[k, n] = sum_t g[k, n, t] a[n, t]^T, as those of a linear map.

With one position per example, most questions are answered from a and g alone. With several, G is contracted, and
rotated on whichever side is cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeGuard

import torch
from torch import Tensor

from laplace.backprop.activations import Activations, Stored, contract, grams
from laplace.backprop.covariances import Basis, KroneckerCovariance, RowCovariance, rotate_left, rotate_right
from laplace.backprop.uses import EVERY, Use, batched_grams
from laplace.linalg.sketch import sketched_rows
from laplace.linalg.symmetric import NARROW, total

_BLOCK = 2**17  # numbers of G that are made at a time, where they are used up at once
_WIDE = 256  # outputs above which the g of few rows are collected, because their product is much larger than they are


@dataclass
class Outer(Use):
    """Sums g a^T over t, in groups. `reduce` combines positions before the Kronecker factors are formed."""

    a: Activations
    g: Tensor  # (K, N, Gr, O, T)
    reduce: bool = False
    first: bool = True
    twin: Outer | None = None  # for a bias: the weight of the same layer
    summed: bool = False  # for a bias: g of further uses is added, not appended as positions
    _last: tuple[Basis | None, Tensor] | None = field(default=None, init=False, repr=False)
    form = "kron"

    @property
    def shape(self) -> tuple[int, int, int]:
        k, n, groups, o, _ = self.g.shape
        return k, n, groups * o * self.a.shape[2]

    @property
    def factors(self) -> tuple[int, int, int]:
        """Return (Gr, O, I)."""
        return self.g.shape[2], self.g.shape[3], self.a.shape[2]

    @property
    def positions(self) -> int:  # type: ignore[override]
        """Return T."""
        return self.g.shape[4]

    @property
    def held(self) -> int:
        _, groups, i, t = self.a.shape
        return groups * i * t if t > 1 else 0

    def contracted(self, part: slice) -> Tensor:
        return self.a.contracted(part, self.g[:, part]).flatten(2)

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
        """Return `inputs` where examples or positions count differently, some examples at a time.

        `reduce` averages over the positions, weighted by their counts. An example counts as much as its position that
        counts most.
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
        if self.counts is not None or groups > 1 or i == 1 or (self.reduce and t > 1):
            return None
        if t == 1:
            return self._all().reshape(n, i)
        return _as_rows(self._all().squeeze(1)) if isinstance(self.a, Stored) and i > NARROW else None

    def output_rows(self) -> Tensor | None:
        k, n, groups, o, t = self.g.shape
        if groups > 1 or (self.reduce and t > 1) or o <= (NARROW if t > 1 else _WIDE):
            return None
        return self.g.reshape(k * n, o) if t == 1 else _as_rows(self.g.squeeze(2).flatten(0, 1))

    def some(self, vectors: slice) -> Outer:
        return replace(self, g=self.g[vectors], twin=None).within(self.chunk)

    def outputs(self) -> Tensor:
        return self._same_g._output_gram

    def input_sketch(self, rank: int) -> tuple[Tensor, Tensor, float | Tensor]:
        if self.counts is not None:
            return super().input_sketch(rank)
        a = self.a.mean() if self.reduce else self._all()  # (N, Gr, I, T)
        return *sketched_rows(a.permute(1, 0, 3, 2).flatten(1, 2), rank), len(a) * a.shape[3]

    def output_sketch(self, rank: int) -> tuple[Tensor, Tensor]:
        g = self.g.sum(4, keepdim=True) if self.reduce else self.g  # (K, N, Gr, O, T)
        return sketched_rows(g.permute(2, 0, 1, 4, 3).flatten(1, 3), rank)

    def output_squares(self) -> Tensor:
        g = self.g.sum(4, keepdim=True) if self.reduce else self.g
        return g.square().sum((0, 1, 4))

    @cached_property
    def _output_gram(self) -> Tensor:
        g = self.g.sum(4, keepdim=True) if self.reduce else self.g
        return grams(g.flatten(0, 1))

    def squares(self) -> Tensor:
        if self._large:
            return self._squares_in_blocks()
        if self.positions > 1:
            return super().squares()
        a = self._all()[..., 0].square()  # (N, Gr, I)
        return torch.einsum("ngo,ngi->goi", self.g[..., 0].square().sum(0), a).flatten()

    @property
    def _large(self) -> bool:
        """Return whether one example's G, summed over positions, is too large for the processor's cache."""
        k, _, groups, o, t = self.g.shape
        alone = not torch.is_grad_enabled() or not self.g.requires_grad
        return t > 1 and groups == 1 and k * o * self.a.shape[2] > _BLOCK and alone

    def _squares_in_blocks(self) -> Tensor:  # (p,)
        """Return the sum of G^2, for some rows of G at a time that stay in the processor's cache."""
        a, g = self._all()[:, 0].mT, self.g[:, :, 0].flatten(0, 1)  # (N, T, I), (K * N, O, T)
        n, _, i = a.shape
        found = g.new_zeros(g.shape[1], i)
        for rows in torch.arange(g.shape[1]).split(max(1, _BLOCK // (2 * i))):
            some = slice(int(rows[0]), int(rows[-1]) + 1)
            block = found[some]
            for at, one in enumerate(g[:, some]):
                part = one @ a[at % n]
                block.addcmul_(part, part)
        return found.flatten()

    def row_grams(self) -> Tensor:
        """Return the sum of G[o] G[o]^T. With one position G[o] = g[o] a, so that all vectors share one product."""
        if self.positions > 1:
            return super().row_grams()
        size = self.g[..., 0].double().square().sum(0).sqrt()  # (N, Gr, O)
        a = self._all()[..., 0].double().unsqueeze(2)  # (N, Gr, 1, I)
        return total(batched_grams((size[p].unsqueeze(3) * a[p]).flatten(1, 2)) for p in self.parts())

    def squares_in(self, left: Basis | None, right: Basis | None) -> Tensor:  # (Gr, O, I)
        if self.positions > 1:
            bases = KroneckerCovariance(self.g.new_ones(()).expand(self.factors), left, right)
            return total(self.rotated(part, bases).square().sum((0, 1)) for part in self.parts())
        g = self._turned(left).square().sum(0).unflatten(1, self.g.shape[2:4])  # (N, Gr, O)
        return torch.einsum("nvo,nvi->voi", g, self._turned_input_squares(right))

    def rotated(self, part: slice, spread: KroneckerCovariance) -> Tensor:
        """Return Q_B^T G Q_A, rotating before or after the contraction, whichever is cheaper."""
        if not self._own_bases(spread):
            return super().rotated(part, spread)
        k, _, _, o, t = self.g.shape
        early_right, early_left = t <= k * o, t <= self.a.shape[2]
        g = rotate_left(self.g[:, part], spread.left) if early_left else self.g[:, part]
        if early_right:
            out = contract(self.a.turned(part, spread.right, g.dtype), g)
        else:
            out = rotate_right(self.a.contracted(part, g), spread.right)
        return out if early_left else rotate_left(out, spread.left)

    def variance(self, spread: KroneckerCovariance) -> Tensor:
        if self._in_blocks(spread):
            return self._variance_in_blocks(spread)
        if not self._by_output(spread):
            return super().variance(spread)
        return torch.einsum("knv,nv->nk", self._turned(spread.left).square(), self._weights(spread))

    def _in_blocks(self, spread: KroneckerCovariance) -> bool:
        """Return whether both sides are rotated before they are contracted, and G is large."""
        k, _, groups, o, t = self.g.shape
        early = 1 < t <= min(k * o, self.a.shape[2]) and groups == 1
        return early and self._own_bases(spread) and k * o * self.a.shape[2] > _BLOCK and not self._attached(spread)

    def _attached(self, spread: KroneckerCovariance) -> bool:
        """Return whether gradients flow through the result."""
        tensors = (self.g, spread.variances, self.a.read(slice(0, 1)))
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)

    def _variance_in_blocks(self, spread: KroneckerCovariance) -> Tensor:  # (N, K)
        """Return the sum of R (Q_B^T G Q_A)^2, for some rows of G at a time that stay in the processor's cache."""
        k, n, _, o, t = self.g.shape
        i, r = self.a.shape[2], spread.variances[0]  # (O, I)
        found = self.g.new_zeros(n, k)
        for part in self._rotated_parts():
            a = self.a.turned(part, spread.right, self.g.dtype)[:, 0].mT  # (n, T, I)
            g = rotate_left(self.g[:, part], spread.left)[:, :, 0].transpose(0, 1)  # (n, K, O, T)
            for rows in torch.arange(o).split(max(1, _BLOCK // (k * i))):
                some = slice(int(rows[0]), int(rows[-1]) + 1)
                weights = r[some].reshape(-1)
                for at, (one, g_one) in enumerate(zip(a, g[:, :, some], strict=True), part.start):
                    block = (g_one.reshape(-1, t) @ one).square_()  # (K * o, I)
                    found[at] += block.view(k, -1) @ weights
        return found

    def _rotated_parts(self) -> Iterator[slice]:
        """Yield slices of examples whose rotated a and g are small enough."""
        k, n, _, o, t = self.g.shape
        step = max(1, self.chunk * 8 // (t * (k * o + self.a.shape[2])))
        return (slice(start, min(start + step, n)) for start in range(0, n, step))

    def covariance(self, spread: KroneckerCovariance) -> Tensor:
        if not self._by_output(spread):
            return super().covariance(spread)
        g = self._turned(spread.left).transpose(0, 1)  # (N, K, Gr * O)
        return (g * self._weights(spread).unsqueeze(1)) @ g.mT

    def product(self, spread: KroneckerCovariance, v: Tensor) -> Tensor:
        if not self._by_output(spread):
            return super().product(spread, v)
        g = self._turned(spread.left)  # (K, N, Gr * O)
        back = torch.einsum("knv,nk->nv", g, v.to(g)) * self._weights(spread)
        return torch.einsum("knv,nv->nk", g, back)

    def joint(self, spread: KroneckerCovariance) -> Tensor:
        """Return the sum over v of g[k, n, v] g[l, m, v] w[n, m, v], w[n, m] = R (Q_A^T a[n] * Q_A^T a[m])."""
        if self.positions > 1 or not self._own_bases(spread):
            return super().joint(spread)
        g = self._turned(spread.left)  # (K, N, Gr * O)
        k, n, width = g.shape
        a, others, rows = self._turned_inputs(spread.right), g.permute(1, 2, 0), []  # (N, Gr, I), (M, Gr * O, L)
        for part in torch.arange(n).split(max(1, self.chunk // (n * k * width))):
            some = slice(int(part[0]), int(part[-1]) + 1)
            w = torch.einsum("nvi,voi,mvi->nmvo", a[some], spread.variances, a).flatten(2)
            rows.append((g[:, some].transpose(0, 1).unsqueeze(1) * w.unsqueeze(2)) @ others)  # (n, M, K, L)
        return torch.cat(rows).transpose(1, 2)

    def along(self, steps: Tensor, part: slice = EVERY) -> Tensor:
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
        return self._cross(other, self._input_products(other))

    def cross_each(self, other: Use) -> Tensor:
        if not self._single(other):
            return super().cross_each(other)
        return self._cross_each(other, self._input_products(other))

    def is_bias_of(self, weight: Use) -> bool:
        """Return whether this is the bias of a layer with one position, so that its g is that of the weight."""
        return weight is self.twin and weight is self._same_g

    def cross_with_bias(self, other: Outer, weight: Tensor, bias: Tensor, each: bool) -> Tensor:
        """Return the weighted sum of `cross` of a weight and its bias, or of `cross_each`: one product serves both.

        There, <G, G'> is (a . a') (g . g') for the weight, and g . g' for the bias.
        """
        aa = self._input_products(other).mul_(weight).add_(bias)
        return self._cross_each(other, aa) if each else self._cross(other, aa)

    def _cross(self, other: Outer, aa: Tensor) -> Tensor:  # aa: (Gr, N, M)
        g, h = (use.g[..., 0].permute(2, 1, 0, 3) for use in (self, other))  # (Gr, N, K, O)
        total = None
        for x, y, a in zip(g, h, aa, strict=True):
            term = (x.flatten(0, 1) @ y.flatten(0, 1).T).unflatten(1, y.shape[:2]).unflatten(0, x.shape[:2])
            term.mul_(a[:, None, :, None])  # in place: these are large
            total = term if total is None else total.add_(term)
        assert total is not None
        return total

    def _cross_each(self, other: Outer, aa: Tensor) -> Tensor:  # aa: (Gr, N, M)
        g, h = (use.g[..., 0].permute(2, 0, 1, 3) for use in (self, other))  # (Gr, K, N, O)
        return (aa.unsqueeze(1) * (g @ h.mT)).sum(0)

    def double(self) -> Outer:
        return replace(self, g=self.g.double(), twin=None).within(self.chunk)

    def _single(self, other: Use) -> TypeGuard[Outer]:
        """Return whether both have one position per example, so that <G, G'> = (a . a') (g . g')."""
        return isinstance(other, Outer) and self.positions == other.positions == 1

    def _input_products(self, other: Outer) -> Tensor:  # (Gr, N, M)
        a, b = (use._all()[..., 0].transpose(0, 1) for use in (self, other))  # (Gr, N, I)
        return a @ b.mT

    def _all(self) -> Tensor:  # (N, Gr, I, T)
        return self.a.read(slice(None)).to(self.g.dtype)

    @property
    def _same_g(self) -> Outer:
        """Return whose g is the same: with one position, a bias shares that of its weight."""
        twin = self.twin
        return twin if twin is not None and twin.positions == 1 and twin.g.shape == self.g.shape else self

    def _turned(self, basis: Basis | None) -> Tensor:  # (K, N, Gr * O)
        """Return g in a basis, for one position. The last result is kept for the bias, which asks next."""
        same = self._same_g
        if same._last is None or same._last[0] is not basis:
            g = rotate_right(same.g.squeeze(4).unsqueeze(3), basis).squeeze(3).flatten(2)
            same._last = basis, g
        return same._last[1]

    def _own_bases(self, spread: KroneckerCovariance) -> bool:
        return spread.variances.shape == (*self.g.shape[2:4], self.a.shape[2])

    def _by_output(self, spread: KroneckerCovariance) -> bool:
        """Return whether J S J^T of an example is the sum over v of g[k, v] g[l, v] w[v], with `_weights` w."""
        groups, o, i = self.factors
        rowwise = isinstance(spread, RowCovariance) and spread.root.shape[:2] == (groups * o, i)
        return self.positions == 1 and (rowwise or self._own_bases(spread))

    def _weights(self, spread: KroneckerCovariance) -> Tensor:  # (N, Gr * O)
        if isinstance(spread, RowCovariance):
            root, a = spread.root.unflatten(0, self.factors[:2]), self._all()[..., 0]  # (Gr, O, I, I), (N, Gr, I)
            turned = (torch.einsum("nvi,voij->nvoj", a[part], root) for part in self.parts())
            return torch.cat([x.square().sum(3).flatten(1) for x in turned])
        return torch.einsum("nvi,voi->nvo", self._turned_input_squares(spread.right), spread.variances).flatten(1)

    def _turned_input_squares(self, basis: Basis | None) -> Tensor:  # (N, Gr, I)
        """Return (Q_A^T a)^2, for one position."""
        return self._turned_inputs(basis).square()

    def _turned_inputs(self, basis: Basis | None) -> Tensor:  # (N, Gr, I)
        """Return Q_A^T a, for one position."""
        return rotate_right(self._all().mT, basis).squeeze(2)


def _as_rows(x: Tensor) -> Tensor | None:  # (M, D, T) -> (M * T, D)
    """Return all positions as rows, if they lie in memory like that."""
    return x.mT.flatten(0, 1) if x.shape[0] == 0 or x.mT.is_contiguous() else None
