"""The Gaussian of all weights with precision s U diag(l) U^T + D, by the algebra of a diagonal plus a low rank.

Its covariance is that of the prior alone minus what the data took away, D^-1 - Y Y^T, and so are those of outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from laplace.backprop.gradients import Jacobian
from laplace.errors import UnsupportedError
from laplace.structures.base import Curvature, Gaussian, Traces
from laplace.structures.blockdiag import BlockDiagonalGaussian
from laplace.structures.diag import DiagGaussian
from laplace.structures.lowrank_algebra import DiagonalPlusLowRank
from laplace.weights.layout import Layout

LIMIT = 10_000  # weights up to which each one's own precision is tuned
_PIECE = 2**22  # numbers of U that are in float64 at a time


class LowRankCurvature(Curvature):
    """H = U diag(l) U^T."""

    def __init__(self, vectors: Tensor, values: Tensor, layout: Layout) -> None:
        self.vectors, self.values, self.layout = vectors, values, layout  # U^T: (R, P), l: (R,), above zero

    @cached_property
    def grams(self) -> Tensor:  # (B, R, R), float64
        """U_b^T U_b of each tensor's rows: from these M follows for every prior with one precision per tensor."""
        return torch.stack([part.double() @ part.double().T for part in self.layout.split(self.vectors)])

    def gaussian(self, scale: Tensor, precision: Sequence[Tensor]) -> LowRankGaussian:
        return LowRankGaussian(self, scale, precision)

    def matrix(self) -> Tensor:
        return (self.vectors.T * self.values) @ self.vectors

    def sweep(self, jacobian: Jacobian, gaussians: Sequence[Gaussian]) -> Iterator[Tensor]:
        squares = along = None
        for gaussian in gaussians:
            if not isinstance(gaussian, LowRankGaussian) or gaussian.shared is None:
                yield gaussian.variance(jacobian)
                continue
            if squares is None or along is None:  # the same for every precision that all weights share
                squares, along = gaussian.prior.variance(jacobian) * gaussian.shared, jacobian.along(self.vectors)
            explained = gaussian.algebra.explained(along / gaussian.shared)
            yield (squares / gaussian.shared - explained.square().sum(0).to(squares)).clamp(min=0)

    @property
    def shape(self) -> tuple[int, int]:
        """(P, R)."""
        return self.vectors.shape[1], self.vectors.shape[0]

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """U, some rows at a time."""
        size, rank = self.shape
        step = max(1, _PIECE // max(1, rank))
        for start in range(0, size, step):
            part = slice(start, min(start + step, size))
            yield part, self.vectors[:, part].T

    def columns(self) -> Iterator[tuple[slice, Tensor]]:
        """U^T, in one piece."""
        yield slice(0, self.shape[1]), self.vectors


class _ByTensor(DiagonalPlusLowRank):
    """With one diagonal entry per tensor: M is a sum of few small matrices."""

    def __init__(self, d: Tensor, u: LowRankCurvature, w: Tensor, precision: Sequence[Tensor]) -> None:
        super().__init__(d, u, w)
        inverse = torch.stack([p.reshape(()) for p in precision]).double().reciprocal()
        m = torch.einsum("b,bqr->qr", inverse, u.grams) * self.w.sqrt() * self.w.sqrt().unsqueeze(1)
        self.inner = torch.eye(len(m), dtype=m.dtype, device=m.device) + m


class LowRankGaussian(Gaussian):
    """N(0, (s U diag(l) U^T + D)^-1)."""

    def __init__(self, curvature: LowRankCurvature, scale: Tensor, precision: Sequence[Tensor]) -> None:
        self.layout = curvature.layout
        shapes = zip(precision, self.layout.shapes, self.layout.sizes, strict=True)
        blocks = [DiagGaussian(d.reshape(-1).expand(size), shape) for d, shape, size in shapes]
        self.prior = BlockDiagonalGaussian(blocks, self.layout)  # N(0, D^-1)
        diagonal, weights = torch.cat([block.precision for block in blocks]), scale * curvature.values
        same = all(d is precision[0] and d.numel() == 1 for d in precision)
        self.shared = precision[0].reshape(()) if same else None  # the one precision of all weights
        if all(d.numel() == 1 for d in precision):
            self.algebra = _ByTensor(diagonal, curvature, weights, precision)
        else:
            self.algebra = DiagonalPlusLowRank(diagonal, curvature, weights)

    def logdet(self) -> Tensor:
        return self.algebra.logdet()

    def color(self, eps: Tensor) -> Tensor:
        return self.algebra.color(eps)

    def marginal_variances(self) -> Tensor:
        return self.algebra.marginal_variances()

    def quadratic(self, vector: Tensor) -> Tensor:
        return self.algebra.quadratic(vector)

    def precision_matrix(self) -> Tensor:
        return self.algebra.precision_matrix()

    def covariance_matrix(self) -> Tensor:
        return self.algebra.covariance_matrix()

    def variance(self, jacobian: Jacobian) -> Tensor:
        prior = self.prior.variance(jacobian)
        return (prior - self._explained(jacobian).square().sum(0).to(prior)).clamp(min=0)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        prior, along = self.prior.covariance(jacobian), self._explained(jacobian)
        return prior - torch.einsum("rnc,rnd->ncd", along, along).to(prior)

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:
        prior, along = self.prior.product(jacobian, v), self._explained(jacobian)
        return prior - torch.einsum("rnc,rn->nc", along, (along * v).sum(-1)).to(prior)

    def joint(self, jacobian: Jacobian) -> Tensor:
        prior, along = self.prior.joint(jacobian), self._explained(jacobian)
        return prior - torch.einsum("rnc,rmd->ncmd", along, along).to(prior)

    def dense_variance(self, jacobians: Tensor) -> Tensor:
        return self.algebra.covariance_times(jacobians) @ jacobians.mT

    def traces(self, groups: str) -> Traces:
        if groups == "diag":
            if self.layout.n_params > LIMIT:
                raise UnsupportedError(
                    f"{self.layout.n_params:,} precisions, one per weight, need a matrix of as many rows to be tuned; "
                    f"the limit is {LIMIT:,}. Take prior_structure='layerwise', or set prior_precision yourself."
                )
            sigma = self.algebra.covariance_matrix().double()
            return sigma.diagonal(), sigma.square()
        return self.algebra.traces([self.layout.n_params] if groups == "scalar" else self.layout.sizes)

    def _explained(self, jacobian: Jacobian) -> Tensor:  # (R, N, C), float64
        """Y^T J^T, whose squares are what the data took from the outputs' variances."""
        ((_, steps),) = self.algebra.steps()
        return self.algebra.explained(jacobian.along(steps))
