"""Define a block: the curvature of one parameter tensor, and the Gaussian over its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from laplace.backprop.asked import EACH_OUTPUT, Asked
from laplace.backprop.gradients import JacobianOf
from laplace.linalg.symmetric import Clipped
from laplace.structures.gaussian import Traces


class BlockGaussian(ABC):
    """Defines N(0, precision^-1) over the p weights of one tensor.

    Attributes:
        independent: whether the weights are independent of each other.
    """

    independent: bool = False

    @abstractmethod
    def logdet(self) -> Tensor:
        """Return log det of the precision, in float64."""

    @abstractmethod
    def color(self, eps: Tensor) -> Tensor:  # (S, p) -> (S, p)
        """Turn standard normal noise into draws of this Gaussian."""

    @abstractmethod
    def marginal_variances(self) -> Tensor:  # (p,)
        """Return the diagonal of the covariance."""

    @abstractmethod
    def quadratic(self, vector: Tensor) -> Tensor:  # (..., p) -> (...)
        """Return vector^T precision vector."""

    @abstractmethod
    def precision_matrix(self) -> Tensor:  # (p, p)
        """Return the precision as a dense matrix."""

    def as_diagonal(self) -> Tensor | None:  # (p,)
        """Return the diagonal of the precision if the precision is diagonal, else None."""
        return None

    @abstractmethod
    def covariance_times(self, vectors: Tensor) -> Tensor:  # (..., p) -> (..., p)
        """Return the covariance times each vector."""

    def precision_times(self, vectors: Tensor) -> Tensor:  # (..., p) -> (..., p)
        """Return the precision times each vector. The default writes the precision out."""
        return vectors @ self.precision_matrix()

    @abstractmethod
    def outputs(self, jacobian: JacobianOf, asked: Asked) -> Tensor:
        """Return the `asked` part of J Sigma J^T with this block's Sigma: `asked.of(jacobian, spread)`."""

    @abstractmethod
    def traces(self, each: bool) -> Traces:
        """Return tr(Sigma) and ||Sigma||_F^2 of the block in float64.

        With `each`, return Sigma_jj and Sigma_jl^2 for all weights instead (Sigma_jj^2 if Sigma is diagonal).
        """


class Block(ABC):
    """Holds the factorised curvature of one parameter tensor.

    Attributes:
        shape: the shape of the tensor.
        commutes: whether the precision is exactly s H + D.
    """

    shape: tuple[int, ...]
    commutes: bool = True

    @property
    def clipped(self) -> Clipped:
        """Return which eigenvalues the block's own decomposition set to zero."""
        return Clipped()

    @property
    def blur(self) -> float:
        """Return the value that rounding of the sums may give to a zero eigenvalue of H."""
        return 0.0

    @property
    def blur_bound(self) -> float:
        """Return a number that `blur` does not exceed, for blocks that know one before they know `blur`."""
        return self.blur

    @abstractmethod
    def gaussian(self, scale: Tensor, precision: Any) -> BlockGaussian:
        """Return N(0, (s H + D)^-1). D is a scalar, a vector, or a matrix if the structure accepts one."""

    @abstractmethod
    def matrix(self) -> Tensor:  # (p, p)
        """Return H as a dense matrix."""

    def as_diagonal(self) -> Tensor | None:  # (p,)
        """Return the diagonal of H if H is diagonal, else None."""
        return None

    def sweep(self, jacobian: JacobianOf, gaussians: Sequence[BlockGaussian]) -> Iterator[Tensor]:
        """Yield the output variances (N, C) under each of many Gaussians of this block."""
        for gaussian in gaussians:
            yield gaussian.outputs(jacobian, EACH_OUTPUT)
