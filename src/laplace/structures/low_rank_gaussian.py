"""Diagonal plus low rank: the precision s U diag(l) U^T + D of all weights, by Woodbury's identity.

With V = U sqrt(s l), M = V^T D^-1 V and I + M = L L^T (all of size R), the covariance is D^-1 - A A^T with
A = D^-1 V L^-T: that of the prior alone minus what the data took away. Nothing of size P x P is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from laplace.backprop.gradients import Jacobian
from laplace.structures.base import Curvature, Gaussian, Traces
from laplace.structures.blockdiag import BlockDiagonalGaussian
from laplace.structures.diag import DiagGaussian
from laplace.weights.layout import Layout


class LowRankCurvature(Curvature):
    """H = U diag(l) U^T."""

    def __init__(self, vectors: Tensor, values: Tensor, layout: Layout) -> None:
        self.vectors, self.values, self.layout = vectors, values, layout  # U^T: (R, P), l: (R,), not below zero

    @cached_property
    def grams(self) -> Tensor:  # (B, R, R), float64
        """U_b^T U_b of each tensor's rows, from which M follows for any prior with one precision per tensor."""
        return torch.stack([part.double() @ part.double().T for part in self.layout.split(self.vectors)])

    def gaussian(self, scale: Tensor, precision: Sequence[Tensor]) -> LowRankGaussian:
        return LowRankGaussian(self, scale, precision)

    def matrix(self) -> Tensor:
        return (self.vectors.T * self.values) @ self.vectors

    def sweep(self, jacobian: Jacobian, gaussians: Sequence[Gaussian]) -> Iterator[Tensor]:
        low = [g for g in gaussians if isinstance(g, LowRankGaussian) and g.shared is not None]
        if len(low) < len(gaussians) or not low:
            yield from super().sweep(jacobian, gaussians)
            return
        ones = self.gaussian(self.values.new_ones(()), [self.values.new_ones(())] * len(self.layout.names))
        squares, along = ones.prior.variance(jacobian), jacobian.along(self.vectors)
        for g in low:
            yield squares / g.shared - torch.einsum("qr,rnc->qnc", g.small / g.shared, along).square().sum(0)


class LowRankGaussian(Gaussian):
    """N(0, (s U diag(l) U^T + D)^-1)."""

    def __init__(self, curvature: LowRankCurvature, scale: Tensor, precision: Sequence[Tensor]) -> None:
        self.curvature, self.layout = curvature, curvature.layout
        shapes = zip(precision, self.layout.shapes, self.layout.sizes, strict=True)
        blocks = [DiagGaussian(d.reshape(-1).expand(size), shape) for d, shape, size in shapes]
        self.prior = BlockDiagonalGaussian(blocks, self.layout)  # N(0, D^-1)
        self.diagonal = torch.cat([block.precision for block in blocks])  # (P,)
        same = all(d is precision[0] and d.numel() == 1 for d in precision)
        self.shared = precision[0].reshape(()) if same else None  # the one precision of all weights
        self.roots = (scale * curvature.values).sqrt()  # (R,)
        self.inner = self._inner(precision)  # M
        eye = torch.eye(len(self.inner), dtype=self.inner.dtype, device=self.inner.device)
        self.root = torch.linalg.cholesky(eye + self.inner)  # L

    def _inner(self, precision: Sequence[Tensor]) -> Tensor:  # (R, R), float64
        if all(d.numel() == 1 for d in precision):
            inverse = torch.stack([d.reshape(()) for d in precision]).double().reciprocal()
            gram = torch.einsum("b,bqr->qr", inverse, self.curvature.grams)
        else:
            scaled = self.curvature.vectors.double() * self.diagonal.double().rsqrt()
            gram = scaled @ scaled.T
        roots = self.roots.double()
        return roots.unsqueeze(1) * gram * roots

    @cached_property
    def small(self) -> Tensor:  # (R, R)
        """L^-1 diag(sqrt(s l)), so that A^T is this times U^T D^-1."""
        return torch.linalg.solve_triangular(self.root, self.roots.double().diag(), upper=False).to(self.roots)

    @cached_property
    def taken(self) -> Tensor:  # (R, P)
        """A^T: what the data takes from the prior's covariance is A A^T."""
        return (self.small @ self.curvature.vectors) / self.diagonal

    def logdet(self) -> Tensor:
        return self.prior.logdet() + 2 * self.root.diagonal().log().sum()

    def color(self, eps: Tensor) -> Tensor:
        """By D^-1/2 (I + W W^T)^-1/2 with W = D^-1/2 V, whose root is symmetric: whatever basis U is in."""
        values, turn = torch.linalg.eigh(self.inner)
        root = (values.clamp(min=0) + 1).sqrt()
        shrink = ((turn / (root * (root + 1))) @ turn.T).to(eps)
        w = self.roots.unsqueeze(1) * self.curvature.vectors * self.diagonal.rsqrt()  # (R, P)
        return (eps - (eps @ w.T) @ shrink @ w) * self.diagonal.rsqrt()

    def marginal_variances(self) -> Tensor:
        return self.diagonal.reciprocal() - self.taken.square().sum(0)

    def quadratic(self, vector: Tensor) -> Tensor:
        return self.prior.quadratic(vector) + ((vector @ self.curvature.vectors.T) * self.roots).square().sum(-1)

    def precision_matrix(self) -> Tensor:
        v = self.roots.unsqueeze(1) * self.curvature.vectors
        return self.diagonal.diag() + v.T @ v

    def covariance_matrix(self) -> Tensor:
        return self.diagonal.reciprocal().diag() - self.taken.T @ self.taken

    def variance(self, jacobian: Jacobian) -> Tensor:
        return self.prior.variance(jacobian) - jacobian.along(self.taken).square().sum(0)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        along = jacobian.along(self.taken)  # (R, N, C)
        return self.prior.covariance(jacobian) - torch.einsum("rnc,rnd->ncd", along, along)

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:
        along = jacobian.along(self.taken)
        return self.prior.product(jacobian, v) - torch.einsum("rnc,rn->nc", along, (along * v).sum(-1))

    def joint(self, jacobian: Jacobian) -> Tensor:
        along = jacobian.along(self.taken)
        return self.prior.joint(jacobian) - torch.einsum("rnc,rmd->ncmd", along, along)

    def dense_variance(self, jacobians: Tensor) -> Tensor:
        along = jacobians @ self.taken.T
        return self.prior.dense_variance(jacobians) - along @ along.mT

    def traces(self, groups: str) -> Traces:
        variances, taken = self.diagonal.double().reciprocal(), self.taken.double()
        norms = taken.square().sum(0)
        own = variances * (variances - 2 * norms)  # of |Sigma_gg|^2, what does not come from A_g^T A_g
        if groups == "diag":
            return variances - norms, (taken.T @ taken).square() + own.diag()
        sizes = [self.layout.n_params] if groups == "scalar" else self.layout.sizes
        grams = torch.stack([part @ part.T for part in taken.split(sizes, 1)]).flatten(1)  # (G, R * R)
        t = torch.stack([part.sum() for part in (variances - norms).split(sizes)])
        return t, grams @ grams.T + torch.stack([part.sum() for part in own.split(sizes)]).diag()
