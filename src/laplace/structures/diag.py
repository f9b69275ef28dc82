"""Diagonal: of the whole curvature only sum of G^2, one number per weight."""

from __future__ import annotations

from torch import Tensor

from laplace.algebra import check_positive
from laplace.backprop.gradients import JacobianOf, MomentsOf, Spread
from laplace.structures.base import Contribution, Sums, Traces
from laplace.structures.block import Block, BlockGaussian
from laplace.structures.blockdiag import BlockDiagonal, Eigh


class Diag(BlockDiagonal):
    """A diagonal block per tensor."""

    name = "diag"

    def block_sums(self, moments: MomentsOf) -> Contribution:
        return {"diag": moments.squares()}

    def block_bytes(self, moments: MomentsOf, itemsize: int) -> int:
        return 3 * itemsize * moments.weights

    def block_work(self, moments: MomentsOf, vectors: int) -> tuple[float, float]:
        p, t = moments.weights, moments.positions
        return (p if t == 1 else vectors * (t + 1) * p), 0.0

    def block(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> DiagBlock:
        return DiagBlock((sums["diag"].clamp(min=0) if self.semidefinite else sums["diag"]).to(eigh.dtype), shape)


class DiagBlock(Block):
    """diag(H) of one parameter tensor."""

    def __init__(self, diagonal: Tensor, shape: tuple[int, ...]) -> None:
        self.diagonal, self.shape = diagonal, shape

    def gaussian(self, scale: Tensor, precision: Tensor) -> DiagGaussian:
        total = scale * self.diagonal + precision
        check_positive(total)
        return DiagGaussian(total, self.shape)

    def matrix(self) -> Tensor:
        return self.diagonal.diag()


class DiagGaussian(BlockGaussian):
    """Independent weights."""

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

    def covariance_times(self, vectors: Tensor) -> Tensor:
        return vectors / self.precision

    def outputs(self, jacobian: JacobianOf, what: str, *args: Tensor) -> Tensor:
        return getattr(jacobian, what)(
            Spread(self.precision.reciprocal().reshape(1, self.shape[0] if self.shape else 1, -1)), *args
        )

    def traces(self, each: bool) -> Traces:
        variance = self.precision.double().reciprocal()
        return (variance, variance.square()) if each else (variance.sum(), variance.square().sum())
