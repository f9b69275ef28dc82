"""Solve A x = b from products with a symmetric positive definite A: conjugate gradients with a preconditioner P.

Vectors are rows, and many right-hand sides are solved together, so that one reading of the data multiplies all of them.
The size of a residual r = b - A x is measured by the preconditioner, sqrt(r^T P^-1 r), relative to that of b. If P is
near A, it is the error of x in the norm of A, and its square is the relative error of b^T x = b^T A^-1 b.

The coefficients of the iteration are those of Lanczos' method on B = C^T A C with P^-1 = C C^T: the eigenvalues of a
small tridiagonal matrix T give the quadrature z^T f(B) z ~ |z|^2 e_1^T f(T) e_1 for b = C^-T z.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]  # (S, P) -> (S, P)

_DEPENDENT: Final = 1e3  # directions that are smaller than so many rounding errors are dropped


@dataclass(frozen=True)
class Solved:
    """Holds what conjugate gradients have found.

    Attributes:
        x: the solutions, (S, P).
        left: the residuals b - A x, (S, P).
        sizes: the relative size of each residual, (S,), float64.
        iterations: how many blocks were multiplied by A.
        products: how many vectors were.
    """

    x: Tensor
    left: Tensor
    sizes: Tensor
    iterations: int
    products: int


def solve(times: Map, precondition: Map, b: Tensor, tolerance: float, most: int) -> Solved:
    """Solve for all rows of b together, in one Krylov space (block conjugate gradients).

    A direction that lies in the span of the others is dropped (Ji and Li, 2017), so that the block shrinks while rows
    converge. The residuals that are returned are computed from x at the end; where rounding made them larger than
    those of the recursion, the iteration begins again from x.

    Args:
        times: A.
        precondition: P^-1.
        b: the right-hand sides, (S, P).
        tolerance: the relative size of a residual to stop at.
        most: how many blocks to multiply at most.
    """
    x, left = torch.zeros_like(b), b.clone()
    start = _sizes(left, precondition(left))
    found = Solved(x, left, (start > 0).double(), 0, 0)
    while found.iterations < most and bool((found.sizes > tolerance).any()):
        before = found
        found = _iterated(times, precondition, b, start, found, tolerance, most)
        if not float(found.sizes.max()) < 0.5 * float(before.sizes.max()):  # rounding allows no more
            break
    return found


def _iterated(
    times: Map, precondition: Map, b: Tensor, start: Tensor, found: Solved, tolerance: float, most: int
) -> Solved:
    """Iterate until the recursion's residuals are small, and compute those of x itself."""
    x, r, iterations, products = found.x.clone(), found.left.clone(), found.iterations, found.products
    z = precondition(r)
    sizes = found.sizes
    p = _independent(z[sizes > tolerance])
    while len(p) and iterations < most - 1 and bool((sizes > tolerance).any()):
        q = times(p)
        iterations, products = iterations + 1, products + len(p)
        inner = _gram(p, q)
        root, failed = torch.linalg.cholesky_ex((inner + inner.T) / 2)
        if failed:
            break
        step = torch.cholesky_solve(_gram(p, r), root).to(p)  # (K, S)
        x += step.T @ p
        r -= step.T @ q
        z = precondition(r)
        sizes = _relative(_sizes(r, z), start)
        open_ = z[sizes > tolerance]
        p = _independent(open_ - torch.cholesky_solve(_gram(q, open_), root).to(p).T @ p)
    left = b - times(x)
    sizes = _relative(_sizes(left, precondition(left)), start)
    return Solved(x, left, sizes, iterations + 1, products + len(x))


@dataclass(frozen=True)
class Probed:
    """Holds what conjugate gradients on each row by itself have found, with the coefficients of Lanczos' method.

    Attributes:
        x: the solutions, (S, P).
        sizes: the relative size of each residual by the recursion, (S,), float64.
        tridiagonal: T of each row, its eigenvalues (S, M) and squared first components of eigenvectors (S, M).
        first: b^T P^-1 b, (S,), float64.
        products: how many vectors were multiplied.
        roots: P^-1/2-weighted solutions C B^-1/2 z, (S, P), if asked for.
    """

    x: Tensor
    sizes: Tensor
    nodes: Tensor
    weights: Tensor
    first: Tensor
    iterations: int
    products: int
    roots: Tensor | None

    def quadrature(self, f: Map) -> Tensor:  # (S,)
        """Return z^T f(B) z for each row, where b = C^-T z."""
        return self.first * (self.weights * f(self.nodes)).sum(-1)


def probe(times: Map, precondition: Map, b: Tensor, tolerance: float, most: int, with_roots: bool = False) -> Probed:
    """Solve for each row of b in its own Krylov space, and keep the coefficients.

    Args:
        times: A.
        precondition: P^-1.
        b: the right-hand sides, (S, P), none of them zero.
        tolerance: the relative size of a residual to stop at.
        most: how many blocks to multiply at most.
        with_roots: whether to return C B^-1/2 z for b = C^-T z. Keeps a block for each iteration.
    """
    x, r = torch.zeros_like(b), b.clone()
    z = precondition(r)
    first = rho = (r * z).sum(-1, dtype=torch.float64)
    p, open_ = z.clone(), first > 0
    sizes = open_.double()
    alphas, betas, blocks, products = [], [], [], 0
    while len(alphas) < most and bool(open_.any()):
        if with_roots:
            blocks.append(z / rho.sqrt().clamp(min=1e-300).unsqueeze(-1).to(z))
        index = open_.nonzero().flatten()
        q = torch.zeros_like(p)
        q[index] = times(p[index])
        products += len(index)
        bend = (p * q).sum(-1, dtype=torch.float64)
        open_ = open_ & (bend > 0)
        alpha = torch.where(open_, rho / bend, 0.0)
        x += alpha.unsqueeze(-1).to(x) * p
        r -= alpha.unsqueeze(-1).to(r) * q
        z = precondition(r)
        new = (r * z).sum(-1, dtype=torch.float64).clamp(min=0)
        beta = torch.where(open_, new / rho, 0.0)
        rho = torch.where(open_, new, rho)
        sizes = torch.where(open_, _relative(rho.sqrt(), first.sqrt()), sizes)
        p = z + beta.unsqueeze(-1).to(z) * p
        alphas.append(alpha)
        betas.append(beta)
        open_ = open_ & (sizes > tolerance)
    nodes, vectors = _tridiagonal(torch.stack(alphas, 1), torch.stack(betas, 1))
    weights = vectors[:, 0].square()
    roots = _roots(blocks, nodes, vectors, first) if with_roots else None
    return Probed(x, sizes, nodes, weights, first, len(alphas), products, roots)


def _tridiagonal(alphas: Tensor, betas: Tensor) -> tuple[Tensor, Tensor]:  # (S, M) -> (S, M), (S, M, M)
    """Return eigenvalues and eigenvectors of Lanczos' T. Steps after a row has converged (alpha = 0) have weight 0."""
    done = alphas <= 0
    inverse = torch.where(done, 1.0, alphas.reciprocal())
    diagonal = inverse.clone()
    diagonal[:, 1:] += torch.where(done[:, 1:], 0.0, (betas * inverse)[:, :-1])
    beside = torch.where(done[:, 1:], 0.0, (betas.sqrt() * inverse)[:, :-1])
    values, vectors = torch.linalg.eigh(diagonal.diag_embed() + beside.diag_embed(1) + beside.diag_embed(-1))
    return values.clamp(min=torch.finfo(values.dtype).tiny), vectors


def _roots(blocks: list[Tensor], nodes: Tensor, vectors: Tensor, first: Tensor) -> Tensor:  # (S, P)
    """Return |z| U T^-1/2 e_1, with Lanczos' vectors U = C Q up to their alternating signs."""
    weights = (vectors * (vectors[:, :1] / nodes.sqrt().unsqueeze(1))).sum(-1) * first.sqrt().unsqueeze(1)  # (S, M)
    total = torch.zeros_like(blocks[0])
    for j, block in enumerate(blocks):
        total += (-1) ** j * weights[:, j].unsqueeze(1).to(block) * block
    return total


def _gram(a: Tensor, b: Tensor) -> Tensor:  # (K, P), (L, P) -> (K, L), float64
    """Return a b^T. Sums are long, but rounding of a few digits only slows the iteration down."""
    return (a @ b.T).double()


def _sizes(r: Tensor, z: Tensor) -> Tensor:  # (S,), float64
    return (r * z).sum(-1, dtype=torch.float64).clamp(min=0).sqrt()


def _relative(sizes: Tensor, start: Tensor) -> Tensor:
    return torch.where(start > 0, sizes / start, 0.0)


def _independent(rows: Tensor) -> Tensor:  # (S, P) -> (K, P)
    """Return orthonormal vectors that span the rows. Those that only rounding tells from zero are left out."""
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    if not len(rows):
        return rows
    q, r = torch.linalg.qr(rows.T)  # (P, S), (S, S)
    left, values, _ = torch.linalg.svd(r)
    kept = values > _DEPENDENT * torch.finfo(rows.dtype).eps * values[0]
    return (q @ left[:, kept]).T.contiguous()
