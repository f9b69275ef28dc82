"""Compute with N(0, A^-1), A = s H + D, where H is known by its products with vectors alone.

Output covariances J A^-1 J^T are solved for: with X the solutions for the rows of J and R their residuals,

    J X^T + X J^T - X A X^T = J X^T + X R^T

is off by R A^-1 R^T, so that the relative error of a variance is about the square of the residual.

A draw is the solution for b = D^1/2 e + s^1/2 sum_n J_n^T L_n e_n with standard normal e and e_n, and Lambda = L L^T:
the covariance of b is A, and that of A^-1 b is A^-1 (sample-then-optimise; Antoran et al., 2022; Lin et al., 2023).

The log-determinant is that of the preconditioner P, which is exact, plus tr log(P^-1 A), estimated by stochastic
Lanczos quadrature. The same run gives the traces of the covariance (`estimates.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from laplace.backprop.gradients import Jacobian
from laplace.budget import Budget
from laplace.errors import UnsupportedError, warn
from laplace.linalg.conjugate_gradients import Probed, Solved, probe, solve
from laplace.linalg.sampling import normals, seed_from
from laplace.linalg.symmetric import Clipped, total
from laplace.structures.blockdiag import BlockCurvature, BlockDiagonalGaussian
from laplace.structures.estimates import Estimates
from laplace.structures.gaussian import Curvature, Gaussian, Traces
from laplace.structures.leading import LowRankPreconditioner
from laplace.structures.lowrank_gaussian import LowRankCurvature
from laplace.structures.solves import Solver, Solves, TrainingData
from laplace.weights.layout import Layout

_HELD: Final = 10  # blocks of a solve that are in memory at a time
_BIAS: Final = 0.02  # in log det: quadratures that stop at a residual r are too large by about P r^2 / 2
_ALL_VARIANCES: Final = 8192  # most weights whose variances are solved for, one by one


class MatrixFreeCurvature(Curvature):
    """Holds the preconditioner's curvature, and the data that H is read from."""

    def __init__(self, inner: Curvature, layout: Layout, dtype: torch.dtype, solver: Solver, budget: Budget) -> None:
        assert isinstance(inner, (BlockCurvature, LowRankCurvature))
        self.inner, self.layout, self.dtype, self.solver, self.budget = inner, layout, dtype, solver, budget
        self.solves = Solves(solver.residual)
        self._data: TrainingData | None = None

    def reading(self, data: TrainingData | None) -> MatrixFreeCurvature:
        """Return the same curvature with its training data."""
        other = copy.copy(self)
        other._data = data
        return other

    @property
    def data(self) -> TrainingData:
        """Return the training data. Refuse if it is not there."""
        if self._data is None:
            raise UnsupportedError(
                "hessian_structure='matrix_free' reads the training data again for every answer, and this posterior "
                "does not have it: it came from a file, a state, a pickle or a copy, which hold no data. Write "
                "la.attach_data(train_loader), or Laplace.load(..., data=train_loader)."
            )
        return self._data

    @property
    def clipped(self) -> Clipped:
        return self.inner.clipped

    def gaussian(self, scale: Tensor, precision: Sequence[Tensor]) -> MatrixFreeGaussian:
        return MatrixFreeGaussian(self, scale, precision)

    def times(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Return H times each vector."""
        return self.data.products(vectors).to(vectors)

    def matrix(self) -> Tensor:
        h = self.times(torch.eye(self.layout.n_params, dtype=self.dtype))
        return (h + h.T) / 2

    def note(self, found: Solved | Probed) -> None:
        """Take down what a solve took. Warn if it did not reach its residual."""
        worst, before = float(found.sizes.max()), self.solves
        counts = {"iterations": found.iterations, "products": found.products}
        everything = before.all_products + found.products
        self.solves = replace(before, residual=worst, all_products=everything, **counts)
        if worst > self.solver.residual:
            warn(
                f"conjugate gradients stopped at a residual of {worst:.1e} after {found.iterations} blocks of "
                f"products, and MatrixFree(residual={self.solver.residual:.1e}) was asked for. Variances are too small "
                f"by a share of up to about {min(1.0, worst**2):.1e}. Give a larger most_iterations=, a residual= that "
                "this dtype can reach, or a larger rank=; or raise the prior precision."
            )


class MatrixFreeGaussian(Gaussian):
    """Is N(0, (s H + D)^-1), known by solves."""

    def __init__(self, curvature: MatrixFreeCurvature, scale: Tensor, precision: Sequence[Tensor]) -> None:
        self.curvature, self.layout, self.given = curvature, curvature.layout, (scale, list(precision))
        self.scale_, self.deltas = scale.detach(), [d.detach().reshape(()) for d in precision]
        sizes = zip(self.deltas, self.layout.sizes, strict=True)
        self.d = torch.cat([d.expand(size) for d, size in sizes]).to(curvature.dtype)  # (P,)

    @cached_property
    def inner(self) -> BlockDiagonalGaussian | LowRankPreconditioner:
        """Return the Gaussian of the preconditioner, with the same scale and prior."""
        inner = self.curvature.inner
        with torch.no_grad():
            if isinstance(inner, LowRankCurvature):
                return LowRankPreconditioner(inner, self.scale_, self.deltas)
            blocks = [block.gaussian(self.scale_, d) for block, d in zip(inner.blocks, self.deltas, strict=True)]
        return BlockDiagonalGaussian(blocks, self.layout, self.curvature.budget)

    # ---- products and solves -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def times(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Return the precision times each vector."""
        return self.scale_.to(vectors) * self.curvature.times(vectors) + self.d.to(vectors) * vectors

    @torch.no_grad()
    def solved(self, rows: Tensor) -> tuple[Tensor, Tensor]:  # (S, P) -> (S, P), (S, P)
        """Return the covariance times each row, and the residuals. Solves for as many rows at a time as fit."""
        solver, found = self.curvature.solver, []
        for part in rows.to(self.curvature.dtype).split(self._together):
            found.append(solve(self.times, self.inner.covariance_times, part, solver.residual, solver.most_iterations))
        self.curvature.note(_joined(found))
        return torch.cat([one.x for one in found]), torch.cat([one.left for one in found])

    @property
    def _together(self) -> int:
        """Return for how many right-hand sides to solve at a time."""
        return self.curvature.budget.count(_HELD * self.d.element_size() * len(self.d))

    # ---- weights -----------------------------------------------------------------------------------------------------

    def quadratic(self, vector: Tensor) -> Tensor:
        rows = vector.reshape(-1, vector.shape[-1])
        return (rows * self.times(rows)).sum(-1).reshape(vector.shape[:-1])

    def precision_matrix(self) -> Tensor:
        a = self.times(self._units)
        return (a + a.T) / 2

    def covariance_matrix(self) -> Tensor:
        x, left = self.solved(self._units)
        sigma = x + x @ left.T
        return (sigma + sigma.T) / 2

    def marginal_variances(self) -> Tensor:
        if len(self.d) > _ALL_VARIANCES:
            raise UnsupportedError(
                f"the variance of each of {len(self.d):,} weights takes a solve each with hessian_structure="
                f"'matrix_free', which does that for up to {_ALL_VARIANCES:,}. Take la.sample(n).var(0), or "
                "hessian_structure='kron' or 'diag'."
            )
        parts = []
        for units in self._units.split(self._together):
            x, left = self.solved(units)
            parts.append((units * x).sum(-1) + (x * left).sum(-1))
        return torch.cat(parts)

    @property
    def _units(self) -> Tensor:
        return torch.eye(len(self.d), dtype=self.d.dtype, device=self.d.device)

    @torch.no_grad()
    def color(self, eps: Tensor) -> Tensor:
        """Return C B^-1/2 eps with P^-1 = C C^T and B = C^T A C, by Lanczos' method: linear in eps."""
        parts = []
        for part in eps.split(self._together):
            parts.append(self._probed_with(part, with_roots=True).roots)
        return torch.cat([part for part in parts if part is not None])

    @torch.no_grad()
    def drawn(self, n: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
        parts = []
        for start in range(0, n, self._together):
            count = min(self._together, n - start)
            noise = self.curvature.data.noise(count, seed_from(generator, 2**62)).to(self.d)
            eps = normals(count, len(self.d), like, generator)
            parts.append(self.solved(self.d.sqrt() * eps + self.scale_.sqrt().to(noise) * noise)[0])
        return torch.cat(parts)

    # ---- outputs -----------------------------------------------------------------------------------------------------

    def variance(self, jacobian: Jacobian) -> Tensor:
        parts = []
        for j, x, left in self._rows(jacobian):
            explained = self._between(lambda a, b: (a * b).sum(-1), x, j.detach() - left)
            parts.append(2 * (j * x).sum(-1) - explained)
        return torch.cat(parts)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        return torch.cat([self._covariance(*found) for found in self._rows(jacobian)])

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:
        parts, start = [], 0
        for j in self._written(jacobian):
            own = v[start : start + len(j)].to(j)
            start += len(j)
            x, _ = self.solved(torch.einsum("ncp,nc->np", j.detach(), own))
            parts.append(torch.einsum("ncp,np->nc", j, x))
        return torch.cat(parts)

    def joint(self, jacobian: Jacobian) -> Tensor:
        j = torch.cat([*self._written(jacobian)])
        rows = j.flatten(0, 1)
        self.curvature.budget.require(
            3 * rows.nbytes,
            rows.device,
            f"solving for {len(rows):,} outputs together with hessian_structure='matrix_free'",
            "Take fewer inputs or outputs at a time.",
        )
        x, left = self.solved(rows.detach())
        return self._covariance(rows, x, left).reshape(*j.shape[:2], *j.shape[:2])

    def dense_variance(self, jacobians: Tensor) -> Tensor:
        rows = jacobians.reshape(-1, jacobians.shape[-1])
        x, left = (t.reshape(jacobians.shape) for t in self.solved(rows.detach()))
        return self._covariance(jacobians.to(x), x, left)

    def _covariance(self, j: Tensor, x: Tensor, left: Tensor) -> Tensor:  # (..., M, P) each -> (..., M, M)
        """Return J X^T + X J^T - X A X^T. X may count as constant: what it moves by changes this in second order."""
        half = j @ x.mT
        found = half + half.mT - self._between(lambda a, b: a @ b.mT, x, j.detach() - left)
        return (found + found.mT) / 2

    def _between(self, inner: Callable[[Tensor, Tensor], Tensor], x: Tensor, ax: Tensor) -> Tensor:
        """Return X A X^T from A X^T, differentiable in s and D."""
        value, (scale, precision) = inner(x, ax), self.given
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in (scale, *precision)):
            return value
        parts = [inner(part, part) for part in self.layout.split(x)]
        of_data = (value - total(d.to(x) * part for d, part in zip(self.deltas, parts, strict=True))) / self.scale_
        moved = (d.reshape(()).to(x) * part for d, part in zip(precision, parts, strict=True))
        return scale.to(x) * of_data + total(moved)

    def _rows(self, jacobian: Jacobian) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield J, the solutions for its rows and their residuals, (n, C, P) each, some examples at a time."""
        for j in self._written(jacobian):
            x, left = self.solved(j.detach().flatten(0, 1))
            yield j, x.reshape(j.shape), left.reshape(j.shape)

    def _written(self, jacobian: Jacobian) -> Iterator[Tensor]:
        """Yield J, (n, C, P), for as many examples at a time as are solved for together."""
        n = jacobian.examples
        first = jacobian.written(slice(0, 1)).to(self.d.dtype)
        step = max(1, self._together // max(1, first.shape[1]))
        for start in range(0, n, step):
            yield jacobian.written(slice(start, min(start + step, n))).to(self.d.dtype)

    # ---- evidence ----------------------------------------------------------------------------------------------------

    @cached_property
    def _estimates(self) -> Estimates:
        solver, found = self.curvature.solver, []
        exact = solver.probes >= len(self.d)
        if exact:
            z = self._units * len(self.d) ** 0.5
        else:
            generator = torch.Generator().manual_seed(solver.seed)
            z = 2 * torch.randint(2, (solver.probes, len(self.d)), generator=generator).to(self.d) - 1
        with torch.no_grad():
            for part in z.split(self._together):
                found.append((self.inner.color(part), self._probed_with(part)))
            return Estimates.of(found, self.inner, self.layout, exact)

    def _probed_with(self, z: Tensor, with_roots: bool = False) -> Probed:
        """Run conjugate gradients for the right-hand sides C^-T z."""
        inner, solver = self.inner, self.curvature.solver
        b = inner.precision_times(inner.color(z))
        finest = 30 * torch.finfo(b.dtype).eps
        enough = solver.residual if with_roots else min(solver.residual, max(finest, (_BIAS / len(self.d)) ** 0.5))
        limits = enough, solver.most_iterations
        some = (b != 0).any(1)  # zero vectors have no direction to begin with
        found = probe(self.times, inner.covariance_times, torch.where(some.unsqueeze(1), b, 1.0), *limits, with_roots)
        if found.roots is not None and not some.all():
            found = replace(found, roots=found.roots * some.unsqueeze(1))
        self.curvature.note(found)
        return found

    @property
    def logdet_known(self) -> bool:
        return "_estimates" in self.__dict__

    @property
    def logdet_error(self) -> float:
        return self._estimates.error

    def logdet(self) -> Tensor:
        """Return the log-determinant, with the gradient in s and D that the traces give."""
        found, (scale, precision) = self._estimates, self.given
        self.curvature.solves = replace(self.curvature.solves, evidence_error=0.5 * found.error)
        value = self.inner.logdet().detach() + found.log_ratio
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in (scale, *precision)):
            return value
        deltas = torch.stack(self.deltas).double()
        slope = (len(self.d) - (deltas * found.t).sum()) / self.scale_.double()  # tr(Sigma H), since tr(Sigma A) = P
        moves = [
            (d.reshape(()).double() - d.detach().reshape(()).double()) * t
            for d, t in zip(precision, found.t, strict=True)
        ]
        return value + (scale.double() - scale.detach().double()) * slope + torch.stack(moves).sum()

    def traces(self, groups: str) -> Traces:
        return self._estimates.traces(groups, self.layout)


def _joined(found: Sequence[Solved]) -> Solved:
    """Return several solves as one, for the report."""
    sizes = torch.cat([one.sizes for one in found])
    iterations, products = (sum(getattr(one, key) for one in found) for key in ("iterations", "products"))
    return Solved(found[0].x, found[0].left, sizes, iterations, products)
