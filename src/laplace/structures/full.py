"""Keep the full matrix H = sum over n of J_n^T Lambda_n J_n of all weights together.

If all weights share one prior precision, the eigenbasis of H serves every value of it. Any other prior takes a Cholesky
factorisation of s H + D.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from laplace.backprop.covariances import Covariance
from laplace.backprop.gradients import Jacobian, Moments
from laplace.linalg.kronecker import Kronecker
from laplace.linalg.symmetric import EIGH, SYMMETRIC, Clipped, check_positive, clip, spectrum
from laplace.structures.base import Contribution, Forms, Structure, Sums
from laplace.structures.gaussian import Curvature, Gaussian, Traces
from laplace.weights.layout import Layout


class Full(Structure):
    """Keeps the whole P x P matrix."""

    name = "full"
    scattered = True
    precision_forms = ("dense", "kron", "whole")
    forms = Forms(whole=({"H": "PP"},))

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        return {"H": moments.gram().double()}

    def memory(self, moments: Moments, layout: Layout, itemsize: int) -> int:
        return 5 * 8 * layout.n_params**2  # H and its symmetric part in float64, eigenvectors, their work space

    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        p = layout.n_params
        contracted = sum(m.positions * m.weights for m in moments.parameters)
        return vectors * (SYMMETRIC * p * p + contracted), EIGH * p**3

    def curvature(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> FullCurvature:
        return FullCurvature(sums["H"], layout, dtype, self.semidefinite)


class FullCurvature(Curvature):
    """Holds H, and its eigendecomposition once it is needed."""

    def __init__(self, h: Tensor, layout: Layout, dtype: torch.dtype, semidefinite: bool) -> None:
        self.h, self.layout, self.dtype = (h + h.T) / 2, layout, dtype  # h in float64
        self.semidefinite = semidefinite

    @cached_property
    def eigh(self) -> tuple[Tensor, Tensor, Clipped]:
        """Return eigenvalues and eigenvectors of H. Computed in float64, whose rounding is far below any prior."""
        values, vectors = spectrum(self.h)
        values, clipped = clip(values, self.dtype) if self.semidefinite else (values, Clipped())
        return values.to(self.dtype), vectors.to(self.dtype), clipped

    @property
    def clipped(self) -> Clipped:
        return self.eigh[2]

    def gaussian(self, scale: Tensor, precision: Sequence[Tensor | Kronecker]) -> Gaussian:
        if any(isinstance(d, Kronecker) or d.dim() == 2 for d in precision):
            return CholeskyGaussian(scale.to(self.h) * self.h + self._written(precision), self.layout, self.dtype)
        deltas = [d for d in precision if isinstance(d, Tensor)]
        if all(d is deltas[0] and d.numel() == 1 for d in deltas):
            values, vectors, _ = self.eigh
            total = scale * values + deltas[0].reshape(())
            check_positive(total)
            return SpectralGaussian(total, vectors, self.layout)
        sizes = self.layout.sizes
        diagonal = torch.cat([d.reshape(-1).expand(size) for d, size in zip(deltas, sizes, strict=True)])
        return CholeskyGaussian(scale.to(self.h) * self.h + diagonal.to(self.h).diag(), self.layout, self.dtype)

    def _written(self, precision: Sequence[Tensor | Kronecker]) -> Tensor:  # (P, P)
        """Return the prior precision as a dense matrix, from blocks per tensor or one block for all weights."""
        sizes = self.layout.sizes if len(precision) == len(self.layout.names) else [self.layout.n_params]
        blocks = [d.matrix() if isinstance(d, Kronecker) else d for d in precision]
        pairs = zip(blocks, sizes, strict=True)
        return torch.block_diag(
            *[d.to(self.h) if d.dim() == 2 else d.to(self.h).reshape(-1).expand(size).diag() for d, size in pairs]
        )

    def matrix(self) -> Tensor:
        return self.h.to(self.dtype)

    def sweep(self, jacobian: Jacobian, gaussians: Sequence[Gaussian]) -> Iterator[Tensor]:
        spectral = [g for g in gaussians if isinstance(g, SpectralGaussian) and g.vectors is self.eigh[1]]
        if len(spectral) < len(gaussians) or not spectral:  # after earlier tasks, each s has its own basis
            yield from super().sweep(jacobian, gaussians)
            return
        yield from jacobian.variance_in(self.eigh[1], torch.stack([g.eigenvalues.reciprocal() for g in spectral]))


class _Dense(Gaussian):
    """Computes everything that needs a root of the covariance. The root is computed once."""

    layout: Layout

    @abstractmethod
    def _root(self) -> Tensor:  # (P, P)
        """Return R with R R^T = covariance."""

    @cached_property
    def _sigma(self) -> Covariance:
        """Return the covariance."""
        return Covariance(self._root())

    def marginal_variances(self) -> Tensor:
        return self._sigma.root.square().sum(1)

    def variance(self, jacobian: Jacobian) -> Tensor:
        return jacobian.variance(self._sigma)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        return jacobian.covariance(self._sigma)

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:
        return (self.covariance(jacobian) @ v.unsqueeze(-1)).squeeze(-1)

    def joint(self, jacobian: Jacobian) -> Tensor:
        return jacobian.joint(self._sigma)

    def dense_variance(self, jacobians: Tensor) -> Tensor:
        rows = jacobians @ self._sigma.root
        return rows @ rows.mT

    def scale(self) -> Tensor:
        like = self.marginal_variances()
        return self.color(torch.eye(len(like), dtype=like.dtype, device=like.device)).T

    def traces(self, groups: str) -> Traces:
        return self._grouped(self._sigma.matrix, groups)

    def _grouped(self, sigma: Tensor, groups: str) -> Traces:
        t, m = sigma.diagonal(), sigma.square()
        if groups == "diag":
            return t, m
        sizes = [self.layout.n_params] if groups == "scalar" else self.layout.sizes
        t = torch.stack([part.sum() for part in t.split(sizes)])
        m = torch.stack([part.sum(0) for part in m.split(sizes)])
        return t, torch.stack([part.sum(1) for part in m.split(sizes, dim=1)], 1)


class SpectralGaussian(_Dense):
    """Has the covariance Q diag(1 / eigenvalues) Q^T."""

    def __init__(self, eigenvalues: Tensor, vectors: Tensor, layout: Layout) -> None:
        self.eigenvalues, self.vectors, self.layout = eigenvalues, vectors, layout

    def logdet(self) -> Tensor:
        return self.eigenvalues.double().log().sum()

    def color(self, eps: Tensor) -> Tensor:
        return ((eps @ self.vectors) * self.eigenvalues.rsqrt()) @ self.vectors.T  # the same in any basis of eigh

    def quadratic(self, vector: Tensor) -> Tensor:
        return ((vector @ self.vectors).square() * self.eigenvalues).sum(-1)

    def precision_matrix(self) -> Tensor:
        return (self.vectors * self.eigenvalues) @ self.vectors.T

    def _root(self) -> Tensor:
        return self.vectors * self.eigenvalues.rsqrt()

    def covariance_matrix(self) -> Tensor:
        return self._sigma.matrix.to(self.vectors)

    def traces(self, groups: str) -> Traces:
        if groups != "scalar":
            return super().traces(groups)
        variances = self.eigenvalues.double().reciprocal()
        return variances.sum().reshape(1), variances.square().sum().reshape(1)


class CholeskyGaussian(_Dense):
    """Has a dense precision L L^T over all weights, factorised in float64.

    Args:
        precision: s H + D, (P, P), in float64.
        layout: names, shapes and order of the tensors.
        dtype: the dtype of the answers.
    """

    def __init__(self, precision: Tensor, layout: Layout, dtype: torch.dtype) -> None:
        self.precision, self.layout, self.dtype = precision, layout, dtype
        self.factor, failed = torch.linalg.cholesky_ex(precision)
        if failed:
            check_positive(torch.linalg.eigvalsh(precision.detach()), rounded=True)

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal().log().sum()

    def color(self, eps: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.T, eps.T.to(self.factor), upper=True).T.to(self.dtype)

    def quadratic(self, vector: Tensor) -> Tensor:
        return (vector.to(self.factor) @ self.factor).square().sum(-1).to(self.dtype)

    def precision_matrix(self) -> Tensor:
        return self.precision.to(self.dtype)

    def _root(self) -> Tensor:
        eye = torch.eye(len(self.factor), dtype=self.factor.dtype, device=self.factor.device)
        return torch.linalg.solve_triangular(self.factor.T, eye, upper=True).to(self.dtype)

    def covariance_matrix(self) -> Tensor:
        return torch.cholesky_inverse(self.factor).to(self.dtype)

    def traces(self, groups: str) -> Traces:
        return self._grouped(torch.cholesky_inverse(self.factor), groups)
