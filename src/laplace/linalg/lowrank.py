"""Compute with Gaussians whose precision is diagonal plus low rank: P = diag(d) + U diag(w) U^T.

Here d > 0, w >= 0 and U is (p, k). With W = d^-1/2 U w^1/2 and M = W^T W, k x k, everything follows without a p x p
matrix (Woodbury):

    log det P  = sum log d + log det(I + M)
    P^-1       = diag(1/d) - Y Y^T,   Y = d^-1/2 W L^-T,   I + M = L L^T
    P^-1/2 eps = d^-1/2 (eps - W (I + M + (I + M)^1/2)^-1 W^T eps)

The last line holds up to a rotation of eps, and does not depend on the basis of U's columns.

U is read some rows at a time and need not be stored. A new prior costs p k^2. The work is in float64, because a
variance is the difference of two nearly equal numbers wherever the data determines a weight well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from laplace.linalg.symmetric import cholesky


class Columns(Protocol):
    """Defines a matrix U, (p, k), that is read in pieces."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return (p, k)."""
        ...

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows in order, some at a time: their slice, and the rows, (m, k)."""
        ...


class DiagonalPlusLowRank:
    """Computes with N(0, (diag(d) + U diag(w) U^T)^-1), differentiable in d, and in w where w > 0."""

    def __init__(self, d: Tensor, u: Columns, w: Tensor) -> None:  # (p,), (p, k), (k,)
        self.dtype, self.u = d.dtype, u
        self.d, self.w = d.double(), w.double()

    @cached_property
    def inner(self) -> Tensor:  # (k, k)
        """Return I + M."""
        total = torch.eye(len(self.w), dtype=self.d.dtype, device=self.d.device)
        for _, rows in self._white_rows():
            total = total + rows.T @ rows
        return total

    @cached_property
    def root(self) -> Tensor:  # (k, k)
        """Return L, lower triangular."""
        return cholesky(self.inner)

    @cached_property
    def inverse_root(self) -> Tensor:  # (k, k)
        """Return L^-1."""
        eye = torch.eye(len(self.w), dtype=self.d.dtype, device=self.d.device)
        return torch.linalg.solve_triangular(self.root, eye, upper=False)

    def logdet(self) -> Tensor:
        """Return log det of the precision, in float64."""
        return self.d.log().sum() + 2 * self.root.diagonal().log().sum()

    def color(self, eps: Tensor) -> Tensor:  # (S, p) -> (S, p)
        """Turn standard normal noise into draws, by a root that does not depend on the basis of U's columns."""
        solve = cholesky(self.inner + symmetric_root(self.inner))
        inside = eps.new_zeros(len(eps), len(self.w), dtype=self.d.dtype)
        for part, rows in self._white_rows():
            inside = inside + eps[:, part].double() @ rows
        inside = torch.cholesky_solve(inside.T, solve).T
        drawn = torch.empty_like(eps, dtype=self.d.dtype)
        for part, rows in self._white_rows():
            drawn[:, part] = eps[:, part].double() - inside @ rows.T
        return (drawn * self.d.rsqrt()).to(self.dtype)

    def marginal_variances(self) -> Tensor:  # (p,)
        """Return the diagonal of the covariance."""
        explained = torch.empty_like(self.d)  # filled piece by piece: a list of pieces would fragment memory
        for part, y in self._y_rows():
            explained[part] = y.square().sum(1)
        return (self.d.reciprocal() - explained).to(self.dtype)

    def quadratic(self, vector: Tensor) -> Tensor:  # (..., p) -> (...)
        """Return vector^T precision vector."""
        v = vector.double()
        along = v.new_zeros(*v.shape[:-1], len(self.w))
        for part, rows in self.u.rows():
            along = along + v[..., part] @ rows.double()
        return ((v.square() * self.d).sum(-1) + (along.square() * self.w).sum(-1)).to(self.dtype)

    def covariance_times(self, vectors: Tensor) -> Tensor:  # (..., p) -> (..., p)
        """Return the covariance times each vector."""
        v = vectors.double()
        along = v.new_zeros(*v.shape[:-1], len(self.w))
        for part, y in self._y_rows():
            along = along + v[..., part] @ y
        moved = torch.empty_like(v)
        for part, y in self._y_rows():
            moved[..., part] = along @ y.T
        return (v / self.d - moved).to(self.dtype)

    def precision_matrix(self) -> Tensor:  # (p, p)
        """Return the dense precision."""
        u = torch.cat([rows.double() for _, rows in self.u.rows()])
        return (self.d.diag() + (u * self.w) @ u.T).to(self.dtype)

    def covariance_matrix(self) -> Tensor:  # (p, p)
        """Return the dense covariance."""
        y = torch.cat([y for _, y in self._y_rows()])
        return (self.d.reciprocal().diag() - y @ y.T).to(self.dtype)

    def explained(self, along: Tensor) -> Tensor:  # (k, ...) -> (k, ...)
        """Return Y^T J^T, given J d^-1 U with k as its first dimension, in float64.

        `Asked.left` subtracts its contribution from J diag(1/d) J^T.
        """
        flat = along.flatten(1).double() * self.w.sqrt().unsqueeze(1)
        return (self.inverse_root @ flat).reshape(along.shape)

    def group_traces(self, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:  # (G,), (G, G)
        """Return tr(Sigma_gg) and ||Sigma_gh||_F^2 for consecutive groups g, h of weights of these sizes.

        ||Sigma_gh||^2 = [g = h] (sum d^-2 - 2 sum d^-1 |Y_j|^2) + <Y_g^T Y_g, Y_h^T Y_h>, sums over the rows j of g.
        """
        grams = [self.d.new_zeros(len(self.w), len(self.w)) for _ in sizes]
        explained, bounds = torch.empty_like(self.d), torch.tensor([0, *sizes]).cumsum(0).tolist()
        for part, y in self._y_rows():
            explained[part] = y.square().sum(1)
            for g, (start, stop) in enumerate(pairwise(bounds)):
                own = y[max(start - part.start, 0) : max(stop - part.start, 0)]
                if len(own):
                    grams[g] = grams[g] + own.T @ own
        prior = self.d.reciprocal()
        t = torch.stack([x.sum() for x in (prior - explained).split(list(sizes))])
        alone = torch.stack([x.sum() for x in (prior.square() - 2 * prior * explained).split(list(sizes))])
        flat = torch.stack(grams).flatten(1)
        return t, flat @ flat.T + alone.diag()

    def _white_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of W, some at a time."""
        rsqrt, root = self.d.rsqrt(), self.w.sqrt()
        for part, rows in self.u.rows():
            yield part, rows.double() * root * rsqrt[part].unsqueeze(1)

    def _y_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of Y, some at a time."""
        rsqrt = self.d.rsqrt()
        for part, rows in self._white_rows():
            yield part, rows @ self.inverse_root.T * rsqrt[part].unsqueeze(1)


def symmetric_root(a: Tensor) -> Tensor:  # (k, k) -> (k, k)
    """Return A^1/2 of a positive definite A, twice differentiable even where eigenvalues are equal.

    S0 comes from an eigendecomposition without a graph. Each Newton step S + X with S0 X + X S0 = A - S^2 changes no
    value, and makes one more derivative right.
    """
    values, q = torch.linalg.eigh(a.detach())
    sigma = values.sqrt()
    root = (q * sigma) @ q.T
    if not a.requires_grad:
        return root
    for _ in range(2):
        left = q.T @ (a - root @ root) @ q / (sigma.unsqueeze(1) + sigma)
        root = root + q @ left @ q.T
    return root
