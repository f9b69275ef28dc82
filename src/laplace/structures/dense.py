"""Keep a dense block per tensor: the exact H of its weights, and nothing between tensors.

A block reuses the algebra of `full` on one tensor: one eigendecomposition serves all scalar priors, any other prior
takes one factorisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from laplace.backprop.asked import Asked
from laplace.backprop.gradients import JacobianOf, MomentsOf
from laplace.errors import OptionError
from laplace.linalg.kronecker import Kronecker
from laplace.linalg.symmetric import EIGH, SYMMETRIC, Clipped
from laplace.structures.base import Contribution, Forms, Sums
from laplace.structures.block import Block, BlockGaussian
from laplace.structures.blockdiag import BlockDiagonal, Eigh
from laplace.structures.full import FullCurvature
from laplace.structures.gaussian import Gaussian, Traces
from laplace.weights.layout import Layout

DENSE = ({"diag": "p"}, {"H": "pp"})  # a tensor is kept densely, or as its diagonal if it is large


class Dense(BlockDiagonal):
    """Keeps the p x p block of every tensor."""

    name = "block"
    scattered = True
    precision_forms = ("dense", "kron")
    forms = Forms(DENSE)

    def form(self, own: Sums, whole: Sums) -> str:
        return dense_form(own)

    def block_sums(self, moments: MomentsOf) -> Contribution:
        return {"H": moments.gram().double()}

    def block_bytes(self, moments: MomentsOf, itemsize: int) -> int:
        return dense_bytes(moments.weights)

    def block_work(self, moments: MomentsOf, vectors: int) -> tuple[float, float]:
        return dense_work(moments, vectors)

    def block(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> DenseBlock:
        return DenseBlock(sums["H"], shape, eigh.dtype, self.semidefinite)


def dense_work(moments: MomentsOf, vectors: int) -> tuple[float, float]:
    """Return the multiplications for a dense block: per example, and once for its decomposition."""
    p, t = moments.weights, moments.positions
    return vectors * p * (SYMMETRIC * p + (t if t > 1 else 1)), EIGH * p**3


def dense_bytes(weights: int) -> int:
    """Return the bytes of a dense block in float64, with a batch's contribution and the decomposition."""
    return 3 * 8 * weights**2


def dense_form(own: Sums) -> str:
    """Describe a dense block by its size."""
    return f"dense {own['H'].shape[-1]}"


class DenseBlock(Block):
    """Holds the dense H of one tensor.

    Args:
        h: H, (p, p).
        shape: the shape of the tensor.
        dtype: the dtype of the posterior. Decompositions are in float64.
        semidefinite: whether negative eigenvalues are rounding errors.
    """

    def __init__(self, h: Tensor, shape: tuple[int, ...], dtype: torch.dtype, semidefinite: bool = True) -> None:
        p = math.prod(shape)
        if h.shape != (p, p):
            raise OptionError(
                f"DenseBlock got a matrix of shape {tuple(h.shape)} for a tensor of shape {tuple(shape)}; ({p}, {p}), "
                "one row per weight, is needed."
            )
        self.shape = shape
        self.whole = FullCurvature(h.double(), Layout(("block",), (shape,)), dtype, semidefinite)

    @property
    def clipped(self) -> Clipped:
        return self.whole.clipped

    def gaussian(self, scale: Tensor, precision: Tensor | Kronecker) -> DenseGaussian:
        return DenseGaussian(self.whole.gaussian(scale, [precision]))

    def matrix(self) -> Tensor:
        return self.whole.matrix()

    def sweep(self, jacobian: JacobianOf, gaussians: Sequence[BlockGaussian]) -> Iterator[Tensor]:
        yield from self.whole.sweep(jacobian.alone(), [g.whole for g in gaussians if isinstance(g, DenseGaussian)])


class DenseGaussian(BlockGaussian):
    """Uses a Gaussian over all weights for the weights of one tensor."""

    def __init__(self, whole: Gaussian) -> None:
        self.whole = whole

    def logdet(self) -> Tensor:
        return self.whole.logdet()

    def color(self, eps: Tensor) -> Tensor:
        return self.whole.color(eps)

    def marginal_variances(self) -> Tensor:
        return self.whole.marginal_variances()

    def quadratic(self, vector: Tensor) -> Tensor:
        return self.whole.quadratic(vector)

    def precision_matrix(self) -> Tensor:
        return self.whole.precision_matrix()

    def covariance_times(self, vectors: Tensor) -> Tensor:
        return vectors @ self.whole.covariance_matrix()

    def outputs(self, jacobian: JacobianOf, asked: Asked) -> Tensor:
        return asked.of_weights(self.whole, jacobian.alone())

    def traces(self, each: bool) -> Traces:
        if each:
            return self.whole.traces("diag")
        t, m = self.whole.traces("scalar")
        return t.reshape(()), m.reshape(())
