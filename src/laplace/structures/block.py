"""One block: what is kept of one parameter tensor's curvature, and the Gaussian of that tensor's weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from laplace.backprop.asked import EACH_OUTPUT, Asked
from laplace.backprop.gradients import JacobianOf
from laplace.linalg.symmetric import Clipped
from laplace.structures.base import Traces


class BlockGaussian(ABC):
    """N(0, precision^-1) over the p weights of one tensor.

    Attributes:
        independent: whether its weights are.
    """

    independent: bool = False

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

    def as_diagonal(self) -> Tensor | None:  # (p,)
        """Return the precision of each weight where the precision is diagonal; None where it is not."""
        return None

    @abstractmethod
    def covariance_times(self, vectors: Tensor) -> Tensor:  # (M, p) -> (M, p)
        """The covariance times each vector."""

    @abstractmethod
    def outputs(self, jacobian: JacobianOf, asked: Asked) -> Tensor:
        """Return what is asked for of J Sigma J^T with this block's Sigma: `asked.of(jacobian, spread)`."""

    @abstractmethod
    def traces(self, each: bool) -> Traces:
        """tr(Sigma) and ||Sigma||_F^2 of the block in float64.

        Of `each` weight on request: Sigma_jj, and all Sigma_jl^2, or Sigma_jj^2 alone where Sigma is diagonal.
        """


class Block(ABC):
    """The factorised curvature of one parameter tensor.

    Attributes:
        shape: of the tensor.
        commutes: whether the prior enters as s H + D exactly.
    """

    shape: tuple[int, ...]
    commutes: bool = True

    @property
    def clipped(self) -> Clipped:
        """What its own decomposition, if it has one, set to zero."""
        return Clipped()

    @property
    def blur(self) -> float:
        """How large rounding of its sums may make an eigenvalue at s = 1 that is zero."""
        return 0.0

    @abstractmethod
    def gaussian(self, scale: Tensor, precision: Any) -> BlockGaussian:
        """N(0, (s H + D)^-1) for a scalar or per-weight precision, or a matrix where the structure takes one."""

    @abstractmethod
    def matrix(self) -> Tensor:  # (p, p)
        """H, dense."""

    def as_diagonal(self) -> Tensor | None:  # (p,)
        """Return the diagonal of H where H is diagonal; None where it is not."""
        return None

    def sweep(self, jacobian: JacobianOf, gaussians: Sequence[BlockGaussian]) -> Iterator[Tensor]:
        """The output variances under many Gaussians of this block, (N, C) each."""
        for gaussian in gaussians:
            yield gaussian.outputs(jacobian, EACH_OUTPUT)
