"""One block: what is kept of one parameter tensor's curvature, and the Gaussian of that tensor's weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

from laplace.algebra import Clipped
from laplace.backprop.gradients import JacobianOf
from laplace.structures.base import Traces


class BlockGaussian(ABC):
    """N(0, precision^-1) over the p weights of one tensor."""

    independent: bool = False  # whether its weights are

    @abstractmethod
    def logdet(self) -> Tensor:
        """log det of the precision, in float64."""

    @abstractmethod
    def color(self, eps: Tensor) -> Tensor:  # (S, p) -> (S, p)
        """Standard normal noise turned into draws."""

    @abstractmethod
    def marginal_variances(self) -> Tensor:  # (p,)
        """The diagonal of the covariance."""

    @abstractmethod
    def quadratic(self, vector: Tensor) -> Tensor:  # (..., p) -> (...)
        """vector^T precision vector."""

    @abstractmethod
    def precision_matrix(self) -> Tensor:  # (p, p)
        """The precision, dense."""

    @abstractmethod
    def covariance_times(self, vectors: Tensor) -> Tensor:  # (M, p) -> (M, p)
        """The covariance times each vector."""

    @abstractmethod
    def outputs(self, jacobian: JacobianOf, what: str, *args: Tensor) -> Tensor:
        """This block's part of J Sigma J^T: `what` is 'variance', 'covariance', 'product' or 'joint' of JacobianOf."""

    @abstractmethod
    def traces(self, each: bool) -> Traces:
        """tr(Sigma) and ||Sigma||_F^2 of the block in float64.

        Of `each` weight on request: Sigma_jj, and all Sigma_jl^2, or Sigma_jj^2 alone where Sigma is diagonal.
        """


class Block(ABC):
    """The factorised curvature of one parameter tensor."""

    shape: tuple[int, ...]
    commutes: bool = True

    @property
    def clipped(self) -> Clipped:
        """What its own decomposition, if it has one, set to zero."""
        return Clipped()

    @abstractmethod
    def gaussian(self, scale: Tensor, precision: Tensor) -> BlockGaussian:
        """N(0, (s H + D)^-1) for a scalar or per-weight precision."""

    @abstractmethod
    def matrix(self) -> Tensor:  # (p, p)
        """H, dense."""

    def sweep(self, jacobian: JacobianOf, gaussians: Sequence[BlockGaussian]) -> Iterator[Tensor]:
        """The output variances under many Gaussians of this block, (N, C) each."""
        for gaussian in gaussians:
            yield gaussian.outputs(jacobian, "variance")
