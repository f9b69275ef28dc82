"""Keep the leading eigenpairs of H from one reading of the data, as a preconditioner for solves with H.

H times R random orthonormal vectors gives the Nystroem approximation of H (Frangella, Tropp and Udell, 2021): its large
eigenvalues are nearly right, and conjugate gradients need not find them any more. Unlike `lowrank`, nothing is repeated
until the pairs have converged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from laplace.backprop.gradients import Moments
from laplace.checks import whole_number
from laplace.linalg.krylov import start
from laplace.structures.base import Contribution, Forms, Structure, Sums
from laplace.structures.lowrank_gaussian import LowRankCurvature, LowRankGaussian
from laplace.weights.layout import Layout

RANK = 100  # the default


class Leading(Structure):
    """Keeps the leading eigenpairs of all weights together, from one block of products.

    Args:
        rank: how many vectors to multiply by H, and the most pairs to keep.
    """

    name = "leading"
    scattered = True
    options = ("rank",)
    exact_hessian = False
    prior_structures = ("scalar", "layerwise")
    forms = Forms(whole=({"vectors": "rP", "values": "r"},))

    def __init__(self, rank: int = RANK) -> None:
        self.rank = whole_number(rank, "rank")
        self._start: Tensor | None = None  # one start for all batches

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        size = layout.n_params
        if self._start is None or self._start.shape[1] != size:
            self._start = start(min(self.rank, size), size)
        return {"product": moments.products(self._start)}

    def finish(self, before: Sums, found: Sums) -> Sums:
        product = found["product"]
        first, self._start = self._start, None
        if first is None:  # the fit was interrupted after its last batch
            first = start(*product.shape)
        values, vectors = _nystroem(product.double(), first.to(product.device), torch.finfo(product.dtype).eps)
        return {"vectors": vectors.to(product), "values": values.to(product)}

    def memory(self, moments: Moments, layout: Layout, itemsize: int) -> int:
        return 5 * 8 * min(self.rank, layout.n_params) * layout.n_params

    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        size = layout.n_params
        rank = min(self.rank, size)
        used = sum(m.positions * m.weights for m in moments.parameters)
        return 2.0 * rank * used, 6.0 * size * rank**2

    def form(self, own: Sums, whole: Sums) -> str:
        return f"rank {len(whole['values'])}"

    def curvature(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> LowRankCurvature:
        return LowRankCurvature(sums["vectors"].to(dtype), sums["values"].to(dtype), layout, self.budget)


class LowRankPreconditioner(LowRankGaussian):
    """Multiplies by the covariance in 2 P R operations, with rows that are prepared once for a prior."""

    def __init__(self, curvature: LowRankCurvature, scale: Tensor, precision: Sequence[Tensor]) -> None:
        super().__init__(curvature, scale, precision)
        self.rows = curvature.vectors

    @cached_property
    def white(self) -> Tensor:  # (R, P), float64: what is left of a direction is a difference of nearly equal numbers
        """Return W = w^1/2 U^T d^-1/2."""
        return self.rows.double() * self.w.sqrt().unsqueeze(1) * self.d.rsqrt()

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:  # (R,), (R, R)
        """Return the eigenvalues and eigenvectors of W W^T."""
        values, vectors = torch.linalg.eigh(self.white @ self.white.T)
        return values.clamp(min=0), vectors

    def logdet(self) -> Tensor:
        return self.d.log().sum() + self.spectrum[0].log1p().sum()

    def covariance_times(self, vectors: Tensor) -> Tensor:
        values, _ = self.spectrum
        return (self._without(vectors * self.d.rsqrt(), 1 / (1 + values)) * self.d.rsqrt()).to(vectors)

    def color(self, eps: Tensor) -> Tensor:
        values, _ = self.spectrum
        root = (1 + values).sqrt()
        return (self._without(eps.double(), 1 / (root * (1 + root))) * self.d.rsqrt()).to(eps)

    def precision_times(self, vectors: Tensor) -> Tensor:
        """Return the precision times each vector."""
        v = vectors.double()
        white = self.d.sqrt() * v
        return (self.d.sqrt() * (white + (white @ self.white.T) @ self.white)).to(vectors)

    def _without(self, v: Tensor, shares: Tensor) -> Tensor:  # (S, P), (R,)
        """Return v - W^T E diag(shares) E^T W v, with E of `spectrum`."""
        _, basis = self.spectrum
        return v - (((v @ self.white.T) @ basis) * shares) @ basis.T @ self.white


def _nystroem(product: Tensor, first: Tensor, rounding: float) -> tuple[Tensor, Tensor]:  # (R, P) -> (R,), (R, P)
    """Return the eigenpairs of H S (S^T H S)^-1 S^T H from H S, for orthonormal columns S; rows here."""
    shift = rounding * float(product.norm())  # of H, so that S^T H S has a root
    if shift == 0:
        return product.new_zeros(0), product[:0]
    moved = product + shift * first
    core = moved @ first.T
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    rows = (vectors * values.clamp(min=shift).rsqrt()).T @ moved  # (R, P)
    squares, basis = torch.linalg.eigh(rows @ rows.T)
    kept = squares > 10 * shift
    vectors = torch.linalg.qr(((basis[:, kept] * squares[kept].rsqrt()).T @ rows).T)[0].T  # orthonormal to rounding
    values = squares[kept] - shift
    return values.flip(0), vectors.flip(0).contiguous()
