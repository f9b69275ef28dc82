"""Gaussians whose precision is a diagonal plus a low rank: P = diag(d) + U diag(w) U^T, d > 0, w >= 0, U (p, k).

With W = d^-1/2 U w^1/2 and M = W^T W, k x k, everything follows without a p x p matrix (Woodbury):

    log det P  = sum log d + log det(I + M)
    P^-1       = diag(1/d) - Y Y^T,   Y = d^-1/2 W L^-T,   I + M = L L^T
    P^-1/2 eps = d^-1/2 (eps - W (I + M + (I + M)^1/2)^-1 W^T eps) up to a rotation of eps, which depends on no basis

U is read some rows at a time and need not be stored; a prior costs p k^2. The work is in float64: variances are
differences of numbers that are nearly equal where the data says much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from laplace.algebra import cholesky


class Columns(Protocol):
    """U, read in pieces."""

    @property
    def shape(self) -> tuple[int, int]:
        """(p, k)."""
        ...

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows in their order, some at a time: which, and (m, k)."""
        ...


class DiagonalPlusLowRank:
    """N(0, (diag(d) + U diag(w) U^T)^-1), differentiable in d and in w where w > 0."""

    def __init__(self, d: Tensor, u: Columns, w: Tensor) -> None:  # (p,), (p, k), (k,)
        self.dtype, self.u = d.dtype, u
        self.d, self.w = d.double(), w.double()

    @cached_property
    def inner(self) -> Tensor:  # (k, k)
        """I + M."""
        total = torch.eye(len(self.w), dtype=self.d.dtype, device=self.d.device)
        for _, rows in self._white_rows():
            total = total + rows.T @ rows
        return total

    @cached_property
    def root(self) -> Tensor:  # (k, k)
        """L, lower triangular."""
        return cholesky(self.inner)

    @cached_property
    def inverse_root(self) -> Tensor:  # (k, k)
        """L^-1."""
        eye = torch.eye(len(self.w), dtype=self.d.dtype, device=self.d.device)
        return torch.linalg.solve_triangular(self.root, eye, upper=False)

    def logdet(self) -> Tensor:
        """log det of the precision, in float64."""
        return self.d.log().sum() + 2 * self.root.diagonal().log().sum()

    def color(self, eps: Tensor) -> Tensor:  # (S, p) -> (S, p)
        """Standard normal noise turned into draws by a root that depends on no basis of U's columns."""
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
        """The diagonal of the covariance."""
        explained = torch.empty_like(self.d)  # pieces are written to it: kept apart, they would scatter the memory
        for part, y in self._y_rows():
            explained[part] = y.square().sum(1)
        return (self.d.reciprocal() - explained).to(self.dtype)

    def quadratic(self, vector: Tensor) -> Tensor:  # (..., p) -> (...)
        """vector^T precision vector."""
        v = vector.double()
        along = v.new_zeros(*v.shape[:-1], len(self.w))
        for part, rows in self.u.rows():
            along = along + v[..., part] @ rows.double()
        return ((v.square() * self.d).sum(-1) + (along.square() * self.w).sum(-1)).to(self.dtype)

    def covariance_times(self, vectors: Tensor) -> Tensor:  # (..., p) -> (..., p)
        """The covariance times each vector."""
        v = vectors.double()
        along = v.new_zeros(*v.shape[:-1], len(self.w))
        for part, y in self._y_rows():
            along = along + v[..., part] @ y
        moved = torch.empty_like(v)
        for part, y in self._y_rows():
            moved[..., part] = along @ y.T
        return (v / self.d - moved).to(self.dtype)

    def precision_matrix(self) -> Tensor:  # (p, p)
        """The precision, dense."""
        u = torch.cat([rows.double() for _, rows in self.u.rows()])
        return (self.d.diag() + (u * self.w) @ u.T).to(self.dtype)

    def covariance_matrix(self) -> Tensor:  # (p, p)
        """The covariance, dense."""
        y = torch.cat([y for _, y in self._y_rows()])
        return (self.d.reciprocal().diag() - y @ y.T).to(self.dtype)

    def explained(self, along: Tensor) -> Tensor:  # (k, ...) -> (k, ...)
        """Y^T J^T from J d^-1 U, with k first, in float64: `left_of` says what it takes off J diag(1/d) J^T."""
        flat = along.flatten(1).double() * self.w.sqrt().unsqueeze(1)
        return (self.inverse_root @ flat).reshape(along.shape)

    def group_traces(self, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:  # (G,), (G, G)
        """tr(Sigma_gg) and ||Sigma_gh||_F^2 of consecutive groups g, h of weights of these sizes.

        ||Sigma_gh||^2 = [g = h] (sum d^-2 - 2 sum d^-1 |Y_j|^2) + <Y_g^T Y_g, Y_h^T Y_h>, over the rows j of g.
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
        """Rows of W."""
        rsqrt, root = self.d.rsqrt(), self.w.sqrt()
        for part, rows in self.u.rows():
            yield part, rows.double() * root * rsqrt[part].unsqueeze(1)

    def _y_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows of Y."""
        rsqrt = self.d.rsqrt()
        for part, rows in self._white_rows():
            yield part, rows @ self.inverse_root.T * rsqrt[part].unsqueeze(1)


def left_of(prior: Tensor, y: Tensor, what: str, *args: Tensor) -> Tensor:
    """J diag(1/d) J^T without what y = Y^T J^T, (k, N, C), explains of it; in float64: they nearly cancel."""
    left = prior - _TAKEN[what](y, *args)
    return left.clamp(min=0) if what == "variance" else left


_TAKEN = {
    "variance": lambda y: y.square().sum(0),
    "covariance": lambda y: torch.einsum("knc,knd->ncd", y, y),
    "product": lambda y, v: torch.einsum("knc,kn->nc", y, torch.einsum("knd,nd->kn", y, v.to(y))),
    "joint": lambda y: torch.einsum("knc,kmd->ncmd", y, y),
}


def symmetric_root(a: Tensor) -> Tensor:  # (k, k) -> (k, k)
    """A^1/2 of a positive definite A, with derivatives up to the second also where eigenvalues are equal.

    From S0 of an eigendecomposition without a graph, Newton steps S + X, S0 X + X S0 = A - S^2, change no value; each
    makes one more derivative right.
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
