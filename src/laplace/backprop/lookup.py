"""Gradients of tables whose rows are looked up: a[n, t] has few nonzero entries, and only these are ever touched.

G[k, n] = sum over positions t of a[n, t] g[k, n, t]^T, (V, D), has only as many nonzero rows as example n looks up.
These are summed once per row of the table. Nothing has size N x V x D, except for a dense covariance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from laplace.backprop.activations import grams
from laplace.backprop.covariances import Basis, KroneckerCovariance, rotate_right
from laplace.backprop.uses import EVERY, Use, all_pairs
from laplace.linalg.symmetric import NARROW


@dataclass
class Lookup(Use):
    """Adds, at each position f, some rows of the table, each with a share. The share of padding is zero."""

    ids: Tensor  # (N, F, T)
    share: Tensor  # (N, F, T)
    g: Tensor  # (K, N, F, D)
    rows: int  # V
    reduce: bool = False
    first: bool = True
    form, inputs_left, diagonal_inputs = "kron", True, True

    @property
    def shape(self) -> tuple[int, int, int]:
        k, n, _, d = self.g.shape
        return k, n, self.rows * d

    @property
    def factors(self) -> tuple[int, int, int]:
        """Return (1, V, D)."""
        return 1, self.rows, self.g.shape[3]

    @property
    def positions(self) -> int:  # type: ignore[override]
        """Return F."""
        return self.g.shape[2]

    @property
    def nbytes(self) -> int:
        return self.g.nbytes + self.ids.nbytes + self.share.nbytes

    def contracted(self, part: slice) -> Tensor:
        found, h = self._found
        return _placed(found[part], h[:, part], self.rows).flatten(2)

    def joined(self, others: list[Use]) -> Lookup:
        uses = [self, *(use for use in others if isinstance(use, Lookup))]
        wide = max(use.ids.shape[2] for use in uses)
        ids, share = (
            torch.cat([torch.nn.functional.pad(t, (0, wide - t.shape[2])) for t in tensors], 1)
            for tensors in ([use.ids for use in uses], [use.share for use in uses])
        )
        return replace(self, ids=ids, share=share, g=torch.cat([use.g for use in uses], 2))

    def inputs(self) -> tuple[Tensor, float]:
        """Return the diagonal of the sum of a a^T, and the number of a. Positions with only padding do not count."""
        ids, share, counts = self.ids, self.share.to(self.g.dtype), self._used.double()  # (N, F)
        if self.counts is not None:
            counts = counts * self.counts
        if self.reduce:  # a averaged over an example's positions
            mean = counts / counts.sum(1, keepdim=True).clamp(min=torch.finfo(counts.dtype).tiny)
            share = (share * mean.to(share).unsqueeze(2)).flatten(1).unsqueeze(1)
            ids, counts = ids.flatten(1).unsqueeze(1), counts.amax(1, keepdim=True)
        found, summed = _brought_together(ids.flatten(0, 1), share.flatten(0, 1)[None, ..., None])
        squares = summed[0, ..., 0].double().square() * counts.flatten().unsqueeze(1)
        return squares.new_zeros(self.rows).index_add(0, found.flatten(), squares.flatten())[None], float(counts.sum())

    def outputs(self) -> Tensor:
        return grams(self._sent.flatten(0, 1).mT.unsqueeze(1))

    def output_rows(self) -> Tensor | None:
        return self._sent.flatten(0, 2) if self.g.shape[3] > NARROW else None

    def output_squares(self) -> Tensor:
        return self._sent.square().sum((0, 1, 2)).unsqueeze(0)

    @property
    def _sent(self) -> Tensor:  # (K, N, F or 1, D)
        """Return g, with zeros where nothing is looked up."""
        g = self.g * self._used.unsqueeze(2)
        return g.sum(2, keepdim=True) if self.reduce else g

    def squares(self) -> Tensor:
        return self._by_row(self._found[1].square().sum(0).unsqueeze(0)).flatten()

    def squares_in(self, left: Basis | None, right: Basis | None) -> Tensor:  # (1, V, D)
        assert left is None
        return self._by_row(rotate_right(self._found[1], right).square().sum(0).unsqueeze(0))

    def variance(self, spread: KroneckerCovariance) -> Tensor:
        if not self._own(spread):
            return super().variance(spread)
        found, h = self._found
        weights = spread.variances[0]
        parts = [
            torch.einsum("knud,nud->nk", rotate_right(h[:, part], spread.right).square(), weights[found[part]])
            for part in self._pieces()
        ]
        return torch.cat(parts)

    def covariance(self, spread: KroneckerCovariance) -> Tensor:
        if not self._own(spread):
            return super().covariance(spread)
        rows = (self._scaled(spread, part).flatten(2).transpose(0, 1) for part in self._pieces())
        return torch.cat([x @ x.mT for x in rows])

    def product(self, spread: KroneckerCovariance, v: Tensor) -> Tensor:
        if not self._own(spread):
            return super().product(spread, v)
        out = []
        for part in self._pieces():
            x = self._scaled(spread, part).flatten(2)
            out.append(torch.einsum("knp,np->nk", x, torch.einsum("knp,nk->np", x, v[part])))
        return torch.cat(out)

    def joint(self, spread: KroneckerCovariance) -> Tensor:
        if not self._own(spread):
            return super().joint(spread)
        found, here = self._found[0], self._found[0].unique()

        def rows(part: slice) -> Tensor:  # (K, n, V' * D), only rows of the table that are looked up
            at = torch.searchsorted(here, found[part])
            return _placed(at, self._scaled(spread, part), len(here)).flatten(2)

        return all_pairs(rows, rows, list(self._pieces(len(here))))

    def along(self, steps: Tensor, part: slice = EVERY) -> Tensor:
        found, h = self._found
        tables = steps.unflatten(1, (self.rows, -1))
        each = [
            torch.cat([torch.einsum("knud,snud->snk", h[:, p], some[:, found[p]]) for p in self._pieces(among=part)], 1)
            for some in tables.split(max(1, self.chunk // max(1, h[0, 0].numel())))
        ]
        return torch.cat(each)

    def back(self, coefficients: Tensor) -> Tensor:
        rows = [self._by_row(torch.einsum("nk,knud->nud", c, self._found[1]).unsqueeze(0)) for c in coefficients]
        return torch.cat(rows).flatten(1)

    def trace(self) -> Tensor:
        return self._found[1].square().sum()

    def settled(self, part: slice) -> Use:
        return replace(self, ids=self.ids[part], share=self.share[part], g=self.g[:, part]).within(self.chunk)

    def load(self, steps: int) -> int:
        k, _, _, d = self.g.shape
        return (2 * k + steps) * d * self.ids[0].numel() + k * steps

    def cross(self, other: Use) -> Tensor:
        return self._matched(other, "knp,lmp->nkml") if isinstance(other, Lookup) else super().cross(other)

    def cross_each(self, other: Use) -> Tensor:
        return self._matched(other, "knp,kmp->knm") if isinstance(other, Lookup) else super().cross_each(other)

    def _matched(self, other: Lookup, product: str) -> Tensor:
        """Return products over the rows of the table that both look up."""
        mine, theirs = self._found[0], other._found[0]
        both = torch.cat([mine.flatten(), theirs.flatten()]).unique()
        first = replace(self, ids=torch.searchsorted(both, self.ids), rows=len(both))
        second = replace(other, ids=torch.searchsorted(both, other.ids), rows=len(both))
        first.chunk, second.chunk = self.chunk, other.chunk
        return first._pairs(second, product, *{"knp,lmp->nkml": (0, 2), "knp,kmp->knm": (1, 2)}[product])

    def some(self, vectors: slice) -> Lookup:
        return replace(self, g=self.g[vectors]).within(self.chunk)

    def double(self) -> Lookup:
        same = replace(self, g=self.g.double())
        same.chunk = self.chunk
        return same

    @cached_property
    def _found(self) -> tuple[Tensor, Tensor]:  # (N, U), (K, N, U, D)
        """Return the rows of the table that each example looks up, each once, and the gradients there."""
        share = self.share.to(self.g.dtype).unsqueeze(3)
        spread = (self.g.unsqueeze(3) * share).flatten(2, 3)  # (K, N, F * T, D)
        return _brought_together(self.ids.flatten(1), spread)

    @property
    def _used(self) -> Tensor:  # (N, F)
        return self.share.ne(0).any(2)

    def _own(self, spread: KroneckerCovariance) -> bool:
        return spread.left is None and spread.variances.shape == self.factors

    def _scaled(self, spread: KroneckerCovariance, part: slice) -> Tensor:  # (K, n, U, D)
        found, h = self._found
        return rotate_right(h[:, part], spread.right) * spread.variances[0][found[part]].sqrt()

    def _by_row(self, values: Tensor) -> Tensor:  # (S, N, U, D) -> (S, V, D)
        """Sum over the examples that look up a row."""
        flat = values.flatten(1, 2)
        return flat.new_zeros(len(flat), self.rows, flat.shape[2]).index_add(1, self._found[0].flatten(), flat)

    def _pieces(self, rows: int = 0, among: slice = EVERY) -> Iterator[slice]:
        """Yield slices of examples whose gradients, written out on `rows` rows, are small enough."""
        k, n, u, d = self._found[1].shape
        first, last, _ = among.indices(n)
        step = max(1, self.chunk // max(1, k * d * (u + rows)))
        for start in range(first, last, step):
            yield slice(start, min(start + step, last))


def _brought_together(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:  # (M, T), (K, M, T, D)
    """Return the distinct ids of each m, (M, U), and the sums of their values, (K, M, U, D), padded with zeros."""
    m, t = ids.shape
    if t == 1:
        return ids, values
    ordered, order = ids.sort(1)
    new = torch.ones_like(ids)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    slot = new.cumsum(1) - 1
    u = int(slot[:, -1].max()) + 1
    found = ids.new_zeros(m, u).scatter_(1, slot, ordered)
    place = torch.empty_like(ids).scatter_(1, order, slot) + u * torch.arange(m, device=ids.device).unsqueeze(1)
    k, d = values.shape[0], values.shape[3]
    summed = values.new_zeros(k, m * u, d).index_add(1, place.flatten(), values.flatten(1, 2))
    return found, summed.unflatten(1, (m, u))


def _placed(found: Tensor, h: Tensor, rows: int) -> Tensor:  # (n, U), (K, n, U, D) -> (K, n, rows, D)
    k, n, _, d = h.shape
    place = found + rows * torch.arange(n, device=found.device).unsqueeze(1)
    return h.new_zeros(k, n * rows, d).index_add(1, place.flatten(), h.flatten(1, 2)).unflatten(1, (n, rows))
