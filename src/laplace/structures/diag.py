"""Keep only the diagonal of the curvature: the sum of G^2, one number per weight."""

from __future__ import annotations

import math

from torch import Tensor

from laplace.backprop.asked import Asked
from laplace.backprop.covariances import KroneckerCovariance
from laplace.backprop.gradients import JacobianOf, MomentsOf
from laplace.errors import OptionError, UnsupportedError
from laplace.linalg.kronecker import Kronecker
from laplace.linalg.symmetric import check_positive
from laplace.structures.base import Contribution, Forms, Sums
from laplace.structures.block import Block, BlockGaussian
from laplace.structures.blockdiag import BlockDiagonal, Eigh
from laplace.structures.gaussian import Traces


class Diag(BlockDiagonal):
    """Keeps the diagonal of H."""

    name = "diag"
    scattered = True
    forms = Forms(({"diag": "p"},))

    def block_sums(self, moments: MomentsOf) -> Contribution:
        return {"diag": moments.squares()}

    def block_work(self, moments: MomentsOf, vectors: int) -> tuple[float, float]:
        p, t = moments.weights, moments.positions
        return (p if t == 1 else vectors * (t + 1) * p), 0.0

    def block(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> DiagBlock:
        return DiagBlock((sums["diag"].clamp(min=0) if self.semidefinite else sums["diag"]).to(eigh.dtype), shape)


class DiagBlock(Block):
    """Holds diag(H) of one parameter tensor.

    Args:
        diagonal: diag(H), (p,).
        shape: the shape of the tensor.
    """

    def __init__(self, diagonal: Tensor, shape: tuple[int, ...]) -> None:
        if diagonal.shape != (math.prod(shape),):
            raise OptionError(
                f"DiagBlock got a diagonal of shape {tuple(diagonal.shape)} for a tensor of shape {tuple(shape)}; one "
                f"number per weight, ({math.prod(shape)},), is needed: .flatten()."
            )
        self.diagonal, self.shape = diagonal, shape

    def gaussian(self, scale: Tensor, precision: Tensor | Kronecker) -> DiagGaussian:
        if isinstance(precision, Kronecker) or precision.dim() == 2:
            raise UnsupportedError(
                f"a tensor of shape {self.shape} is kept as its diagonal, and a prior precision that is a matrix "
                "cannot be added to that. Take hessian_structure='full' or 'block', or no matrix for this tensor."
            )
        total = scale * self.diagonal + precision
        check_positive(total)
        return DiagGaussian(total, self.shape)

    def matrix(self) -> Tensor:
        return self.diagonal.diag()

    def as_diagonal(self) -> Tensor:
        return self.diagonal


class DiagGaussian(BlockGaussian):
    """Treats all weights of a tensor as independent."""

    independent = True

    def __init__(self, precision: Tensor, shape: tuple[int, ...]) -> None:
        self.precision, self.shape = precision, shape

    def logdet(self) -> Tensor:
        return self.precision.double().log().sum()

    def color(self, eps: Tensor) -> Tensor:
        return eps * self.precision.rsqrt()

    def marginal_variances(self) -> Tensor:
        return self.precision.reciprocal()

    def quadratic(self, vector: Tensor) -> Tensor:
        return (vector.square() * self.precision).sum(-1)

    def precision_matrix(self) -> Tensor:
        return self.precision.diag()

    def as_diagonal(self) -> Tensor:
        return self.precision

    def covariance_times(self, vectors: Tensor) -> Tensor:
        return vectors / self.precision

    def precision_times(self, vectors: Tensor) -> Tensor:
        return vectors * self.precision

    def outputs(self, jacobian: JacobianOf, asked: Asked) -> Tensor:
        return asked.of(jacobian, KroneckerCovariance.independent(self.precision.reciprocal(), self.shape))

    def traces(self, each: bool) -> Traces:
        variance = self.precision.double().reciprocal()
        return (variance, variance.square()) if each else (variance.sum(), variance.square().sum())
