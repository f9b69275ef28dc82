"""Define what a structure's sums turn into: the factorised curvature H, and the Gaussian N(0, (s H + D)^-1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from laplace.backprop.gradients import Jacobian
from laplace.budget import Budget
from laplace.linalg.sampling import normals
from laplace.linalg.symmetric import Clipped

Traces = tuple[Tensor, Tensor]


class Gaussian(ABC):
    """Defines N(0, precision^-1) over all uncertain weights, precision = s H + D. Differentiable in s and D.

    Attributes:
        blockwise: whether weights of different tensors are independent. If so, `la.posterior_precision` builds the
            dense matrix only on request.
    """

    blockwise: bool = False

    @abstractmethod
    def logdet(self) -> Tensor:
        """Return log det of the precision."""

    @abstractmethod
    def color(self, eps: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Turn standard normal noise into draws of this Gaussian."""

    def drawn(self, n: int, like: Tensor, generator: torch.Generator | None) -> Tensor:  # like: (P,) -> (n, P)
        """Draw from this Gaussian. The generator is the only source of randomness."""
        return self.color(normals(n, len(like), like, generator))

    @property
    def logdet_known(self) -> bool:
        """Return whether `logdet` takes no time worth mentioning, so that summaries may show it."""
        return True

    @property
    def logdet_error(self) -> float:
        """Return the standard error of `logdet`, where it is estimated. 0 where it is computed."""
        return 0.0

    @abstractmethod
    def marginal_variances(self) -> Tensor:  # (P,)
        """Return the diagonal of the covariance."""

    @abstractmethod
    def quadratic(self, vector: Tensor) -> Tensor:  # (..., P) -> (...)
        """Return vector^T precision vector."""

    @abstractmethod
    def precision_matrix(self) -> Tensor:  # (P, P)
        """Return the precision as a dense matrix."""

    @abstractmethod
    def covariance_matrix(self) -> Tensor:  # (P, P)
        """Return the covariance as a dense matrix."""

    @abstractmethod
    def variance(self, jacobian: Jacobian) -> Tensor:  # (N, C)
        """Return the variance of each output, diag(J Sigma J^T)."""

    @abstractmethod
    def covariance(self, jacobian: Jacobian) -> Tensor:  # (N, C, C)
        """Return the covariance of each example's outputs, J Sigma J^T."""

    @abstractmethod
    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:  # (N, C)
        """Return J Sigma J^T v for one v per example. Does not form the C x C matrix if that can be avoided."""

    @abstractmethod
    def joint(self, jacobian: Jacobian) -> Tensor:  # (N, C, N, C)
        """Return the covariance between the outputs of all examples."""

    @abstractmethod
    def dense_variance(self, jacobians: Tensor) -> Tensor:  # (..., M, P) -> (..., M, M)
        """Return J Sigma J^T for Jacobian rows that the user computed."""

    def as_diagonal(self) -> Tensor | None:  # (P,)
        """Return the diagonal of the precision if the precision is diagonal, else None."""
        return None

    def scale(self) -> Tensor | None:
        """Return S with S S^T = covariance, (P, P), or its diagonal, (P,). None if no such S is at hand."""
        diagonal = self.as_diagonal()
        return None if diagonal is None else diagonal.rsqrt()

    @abstractmethod
    def traces(self, groups: str) -> Traces:
        """Return t[g] = tr(Sigma_gg) and m[g, h] = ||Sigma_gh||_F^2. If Sigma is block-diagonal, m is its diagonal.

        `groups` is 'scalar' (one group with all weights), 'layerwise' (one group per tensor) or 'diag' (one group per
        weight). Newton's method on the evidence needs nothing else.
        """


class Curvature(ABC):
    """Holds H, factorised once for all priors.

    Attributes:
        commutes: whether the precision is exactly s H + D. If so, `traces` give the derivatives of the evidence.
        blockwise: whether weights of different tensors are independent. If so, `la.H` builds the dense matrix only on
            request.
    """

    commutes: bool = True
    blockwise: bool = False

    @property
    def clipped(self) -> Clipped:
        """Return which eigenvalues were negative and set to zero, if the structure computes eigenvalues."""
        return Clipped()

    @abstractmethod
    def gaussian(self, scale: Tensor, precision: Sequence[Any]) -> Gaussian:
        """Return N(0, (s H + D)^-1). `precision` has one entry per block: a scalar, a vector, or a form that
        `Structure.takes` lists.
        """

    @abstractmethod
    def matrix(self) -> Tensor:  # (P, P)
        """Return H as a dense matrix."""

    def as_diagonal(self) -> Tensor | None:  # (P,)
        """Return the diagonal of H if H is diagonal, else None."""
        return None

    def sweep(self, jacobian: Jacobian, gaussians: Sequence[Gaussian]) -> Iterator[Tensor]:
        """Yield the output variances (N, C) under each of many Gaussians of this curvature, sharing the projections."""
        for gaussian in gaussians:
            yield gaussian.variance(jacobian)


def require_pairs(budget: Budget, like: Tensor) -> None:  # (P,)
    """Refuse to tune one precision per weight if the P x P system of Newton's method does not fit into memory."""
    p = len(like)
    what = f"tuning a prior precision for each of {p:,} weights that depend on each other"
    budget.require(4 * 8 * p**2, like.device, what, "Take prior_structure='layerwise', or hessian_structure='diag'.")
