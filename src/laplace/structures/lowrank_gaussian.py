"""Compute with the Gaussian over all weights whose precision is s U diag(l) U^T + D: a low rank plus a diagonal.

Its covariance is the prior covariance minus a low rank that the data explains, D^-1 - Y Y^T. The covariance of outputs
has the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from laplace.backprop.asked import ALL_EXAMPLES, EACH_EXAMPLE, EACH_OUTPUT, Asked, Times
from laplace.backprop.covariances import KroneckerCovariance
from laplace.backprop.gradients import Jacobian
from laplace.budget import Budget
from laplace.linalg.lowrank import DiagonalPlusLowRank
from laplace.linalg.symmetric import check_positive
from laplace.structures.gaussian import Curvature, Gaussian, Traces, require_pairs
from laplace.weights.layout import Layout

_PIECE = 2**22  # numbers of U that are converted to float64 at a time


class LowRankCurvature(Curvature):
    """Holds H = U diag(l) U^T."""

    def __init__(self, vectors: Tensor, values: Tensor, layout: Layout, budget: Budget) -> None:
        self.vectors, self.values = vectors, values  # U^T: (R, P), l: (R,), above zero
        self.layout, self.budget = layout, budget

    @cached_property
    def grams(self) -> Tensor:  # (B, R, R), float64
        """Return U_b^T U_b for the rows of each tensor. They give M for every prior with one precision per tensor."""
        return torch.stack([part.double() @ part.double().T for part in self.layout.split(self.vectors)])

    def gaussian(self, scale: Tensor, precision: Sequence[Tensor]) -> LowRankGaussian:
        return LowRankGaussian(self, scale, precision)

    def matrix(self) -> Tensor:
        return (self.vectors.T * self.values) @ self.vectors

    def sweep(self, jacobian: Jacobian, gaussians: Sequence[Gaussian]) -> Iterator[Tensor]:
        seen = None
        for gaussian in gaussians:
            if not isinstance(gaussian, LowRankGaussian) or gaussian.shared is None:
                yield gaussian.variance(jacobian)
                continue
            if seen is None:  # does not depend on the precision if all weights share it
                seen = self.seen(jacobian, torch.ones_like(gaussian.d), EACH_OUTPUT)
            prior, along = (part / gaussian.shared for part in seen)
            yield EACH_OUTPUT.left(prior, gaussian.explained(along)).to(gaussian.dtype)

    def seen(self, jacobian: Jacobian, variances: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
        """Return the asked part of J diag(variances) J^T, and J diag(variances) U, (R, N, C), both in float64."""
        prior = along = None
        layout = self.layout
        tensors = zip(layout.shapes, layout.split(variances), layout.split(self.vectors), strict=True)
        for part, (shape, variance, columns) in zip(jacobian.parameters, tensors, strict=True):
            j = part.double()
            terms = asked.of(j, KroneckerCovariance.independent(variance, shape)), j.along(columns * variance)
            prior, along = terms if prior is None or along is None else (prior + terms[0], along + terms[1])
        assert prior is not None
        assert along is not None
        return prior, along

    @property
    def shape(self) -> tuple[int, int]:
        """Return (P, R)."""
        return self.vectors.shape[1], self.vectors.shape[0]

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield U, some rows at a time."""
        size, rank = self.shape
        step = max(1, _PIECE // max(1, rank))
        for start in range(0, size, step):
            part = slice(start, min(start + step, size))
            yield part, self.vectors[:, part].T


class LowRankGaussian(DiagonalPlusLowRank, Gaussian):
    """Is N(0, (s U diag(l) U^T + D)^-1)."""

    u: LowRankCurvature

    def __init__(self, curvature: LowRankCurvature, scale: Tensor, precision: Sequence[Tensor]) -> None:
        self.layout = curvature.layout
        sizes = zip(precision, self.layout.sizes, strict=True)
        diagonal = torch.cat([d.reshape(-1).expand(size) for d, size in sizes])
        check_positive(diagonal)
        super().__init__(diagonal, curvature, scale * curvature.values)
        self.by_tensor = precision if all(d.numel() == 1 for d in precision) else None
        same = all(d is precision[0] and d.numel() == 1 for d in precision)
        self.shared = precision[0].reshape(()) if same else None  # the precision that all weights share

    @cached_property
    def inner(self) -> Tensor:
        if self.by_tensor is None:
            return super().inner
        inverse = torch.stack([p.reshape(()) for p in self.by_tensor]).double().reciprocal()
        m = torch.einsum("b,bqr->qr", inverse, self.u.grams) * self.w.sqrt() * self.w.sqrt().unsqueeze(1)
        return torch.eye(len(m), dtype=m.dtype, device=m.device) + m

    def variance(self, jacobian: Jacobian) -> Tensor:
        return self._outputs(jacobian, EACH_OUTPUT)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        return self._outputs(jacobian, EACH_EXAMPLE)

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:
        return self._outputs(jacobian, Times(v.double()))

    def joint(self, jacobian: Jacobian) -> Tensor:
        return self._outputs(jacobian, ALL_EXAMPLES)

    def dense_variance(self, jacobians: Tensor) -> Tensor:
        return self.covariance_times(jacobians) @ jacobians.mT

    def traces(self, groups: str) -> Traces:
        if groups == "diag":
            require_pairs(self.u.budget, self.d)
            sigma = self.covariance_matrix().double()
            return sigma.diagonal(), sigma.square()
        return self.group_traces([self.layout.n_params] if groups == "scalar" else self.layout.sizes)

    def _outputs(self, jacobian: Jacobian, asked: Asked) -> Tensor:
        prior, along = self.u.seen(jacobian, self.d.reciprocal(), asked)
        return asked.left(prior, self.explained(along)).to(self.dtype)
