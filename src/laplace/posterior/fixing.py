"""Turn the posterior of a last layer into matrices that act on its features: one form for each kind of Gaussian.

`weight_spread` and `whole_spread` choose by the kind of Gaussian. One that they do not know, as of a structure from
outside, is written out as a root of its covariance, which every Gaussian can give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from laplace.backprop.asked import EACH_EXAMPLE, EACH_OUTPUT
from laplace.backprop.head_jacobian import HeadJacobian, HeadJacobianOf
from laplace.budget import Budget
from laplace.linalg.contrasts import centred, variances_if_independent
from laplace.linalg.lowrank import DiagonalPlusLowRank
from laplace.posterior.spread import Constant, Factored, LessLowRank, Rooted, Spread
from laplace.predictive.outputs import root
from laplace.structures.block import BlockGaussian
from laplace.structures.blockdiag import BlockDiagonalGaussian
from laplace.structures.dense import DenseGaussian
from laplace.structures.diag import DiagGaussian
from laplace.structures.gaussian import Gaussian
from laplace.structures.kron_block import KronGaussian
from laplace.weights.layout import Layout

BiasTerms = tuple[Tensor | None, Tensor | None]  # what an independent bias adds: variances (C,), covariances (C, C)


@dataclass(frozen=True)
class Seen:
    """Says what is asked about the outputs of a last layer.

    Attributes:
        c: Number of outputs.
        scale: A factor of the outputs: 1 / softmax temperature.
        contrasts: Whether f_c - mean of f is asked about instead of f_c.
        covariances: Whether covariances are needed, besides variances.
    """

    c: int
    scale: float = 1.0
    contrasts: bool = False
    covariances: bool = False

    def rows(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the wanted combinations of rows that belong to the outputs."""
        return self.scale * (centred(x, dim) if self.contrasts else x)

    def independent(self, variances: Tensor) -> Tensor:  # (..., C) -> (..., C)
        """Return the wanted variances for independent outputs with these variances."""
        return self.scale**2 * (variances_if_independent(variances) if self.contrasts else variances)

    def left(self, basis: Tensor | None, like: Tensor) -> Tensor | None:  # (C, O)
        """Return the wanted combinations in a basis of output space; None where all is diagonal."""
        if basis is None and not self.contrasts and self.scale == 1:
            return None
        return self.rows(torch.eye(self.c, dtype=like.dtype, device=like.device) if basis is None else basis)


def spread_of(gaussian: Gaussian, layout: Layout, seen: Seen, budget: Budget) -> Spread:
    """Return the variances of a last layer's outputs as a function of its features."""
    if len(layout.shapes[0]) == 1:
        return Constant(*_constant(gaussian, seen))
    if not isinstance(gaussian, BlockDiagonalGaussian):
        return whole_spread(gaussian, layout, seen, budget)
    weight, *further = gaussian.blocks
    bias = _bias(further[0], seen) if further else (None, None)
    return weight_spread(weight, layout.shapes[0][1], bias, seen, budget)


@singledispatch
def weight_spread(block: BlockGaussian, width: int, bias: BiasTerms, seen: Seen, budget: Budget) -> Spread:
    """Return the spread of a weight matrix that is independent of its bias."""
    p = seen.c * width
    root_of = _root(block, p, budget)
    return _rooted(root_of.unflatten(0, (seen.c, width)), None, bias, seen)


@weight_spread.register
def _(block: DenseGaussian, width: int, bias: BiasTerms, seen: Seen, budget: Budget) -> Spread:
    root_of = _root(block.whole, seen.c * width, budget)
    return _rooted(root_of.unflatten(0, (seen.c, width)), None, bias, seen)


@weight_spread.register
def _(block: KronGaussian, width: int, bias: BiasTerms, seen: Seen, budget: Budget) -> Spread:
    spread = block.spread
    right = None if spread.right is None else spread.right.vectors[0]
    left = None if spread.left is None else spread.left.vectors[0]
    return _factored(right, spread.variances[0].T, left, bias, seen)


@weight_spread.register
def _(block: DiagGaussian, width: int, bias: BiasTerms, seen: Seen, budget: Budget) -> Spread:
    return _factored(None, block.marginal_variances().unflatten(0, (seen.c, width)).T, None, bias, seen)


@weight_spread.register
def _(block: DiagonalPlusLowRank, width: int, bias: BiasTerms, seen: Seen, budget: Budget) -> Spread:
    prior, explained = _difference(block, budget)
    parts = prior.unflatten(0, (seen.c, width)), explained.unflatten(1, (seen.c, width))
    return _less(parts[0].T, None, parts[1], None, bias, seen)


@singledispatch
def whole_spread(gaussian: Gaussian, layout: Layout, seen: Seen, budget: Budget) -> Spread:
    """Return the spread of a weight matrix and a bias that depend on each other."""
    rows = _by_tensor(_root(gaussian, layout.n_params, budget), layout, seen.c)
    return _rooted(rows[0], rows[1][:, 0] if len(rows) > 1 else None, (None, None), seen)


@whole_spread.register
def _(gaussian: DiagonalPlusLowRank, layout: Layout, seen: Seen, budget: Budget) -> Spread:
    prior, explained = _difference(gaussian, budget)
    priors = _by_tensor(prior.unsqueeze(1), layout, seen.c)
    parts = _by_tensor(explained.T, layout, seen.c)  # (C, H, K), (C, 1, K)
    own = parts[0].permute(2, 0, 1)
    if len(parts) == 1:
        return _less(priors[0].squeeze(2).T, None, own, None, (None, None), seen)
    return _less(priors[0].squeeze(2).T, priors[1].flatten(), own, parts[1].squeeze(1).T, (None, None), seen)


def _factored(right: Tensor | None, variances: Tensor, left: Tensor | None, bias: BiasTerms, seen: Seen) -> Factored:
    by_output = seen.independent(variances) if left is None else variances @ seen.rows(left).square().T
    if not seen.covariances:
        return Factored(right, by_output, None, None, *bias)
    return Factored(right, by_output, variances, seen.left(left, variances), *bias)


def _rooted(rows: Tensor, row_of_bias: Tensor | None, bias: BiasTerms, seen: Seen) -> Rooted:
    """Return the form of a root with the rows (C, H, P) of the weight, and (C, P) of a dependent bias."""
    rows = seen.rows(rows)
    of_bias = None if row_of_bias is None else seen.rows(row_of_bias)
    if not seen.covariances:  # of each output alone, a square root of its own block is enough
        both = rows if of_bias is None else torch.cat([rows, of_bias.unsqueeze(1)], 1)
        blocks = torch.stack([own.double() @ own.double().T for own in both])
        both = root(blocks).to(rows)
        rows, of_bias = (both, None) if of_bias is None else (both[:, :-1], both[:, -1])
    return Rooted(rows, of_bias, *bias)


def _less(
    prior: Tensor,  # (H, C)
    prior_bias: Tensor | None,  # (C,)
    explained: Tensor,  # (K, C, H)
    explained_bias: Tensor | None,  # (K, C)
    bias: BiasTerms,
    seen: Seen,
) -> LessLowRank:
    variance, covariance = bias
    if prior_bias is not None:
        variance = seen.independent(prior_bias)
    of_bias = None if explained_bias is None else seen.rows(explained_bias, 1)
    left = seen.left(None, prior) if seen.covariances else None
    kept = (prior, left, prior_bias) if seen.covariances else (None, None, None)
    return LessLowRank(seen.independent(prior), *kept, seen.rows(explained, 1), of_bias, variance, covariance)


def _bias(block: BlockGaussian, seen: Seen) -> BiasTerms:
    """Return what a bias that is independent of the weights adds, for every input the same."""
    one = block.marginal_variances().new_ones(1, 1)
    jacobian = HeadJacobianOf(one, 1, seen.c, centred=seen.contrasts)
    variance = seen.scale**2 * block.outputs(jacobian, EACH_OUTPUT)[0]
    if not seen.covariances:
        return variance, None
    return variance, seen.scale**2 * block.outputs(jacobian, EACH_EXAMPLE)[0]


def _constant(gaussian: Gaussian, seen: Seen) -> BiasTerms:
    """Return the spread of outputs whose bias alone is uncertain."""
    jacobian = HeadJacobian([gaussian.marginal_variances().new_ones(1, 1)], 1, seen.c, centred=seen.contrasts)
    covariance = seen.scale**2 * gaussian.covariance(jacobian)[0] if seen.covariances else None
    return seen.scale**2 * gaussian.variance(jacobian)[0], covariance


def _root(gaussian: Gaussian | BlockGaussian, p: int, budget: Budget) -> Tensor:  # (P, P)
    """Return R with R R^T = covariance: draws are R times noise, so R is what unit noise becomes."""
    like = gaussian.marginal_variances()
    budget.require(
        4 * like.element_size() * p**2,
        like.device,
        f"a root of the covariance of {p:,} weights",
        "Take hessian_structure='kron', 'ekfac' or 'diag', which need no such matrix.",
    )
    return gaussian.color(torch.eye(p, dtype=like.dtype, device=like.device)).T


def _difference(gaussian: DiagonalPlusLowRank, budget: Budget) -> tuple[Tensor, Tensor]:  # (P,), (K, P)
    """Return 1/d and Y^T with covariance = diag(1/d) - Y Y^T, in float64."""
    p, k = gaussian.u.shape
    budget.require(
        4 * 8 * p * k,
        gaussian.d.device,
        f"{k:,} directions of {p:,} weights",
        "Fit with a smaller rank=, or take hessian_structure='kron', 'ekfac' or 'diag'.",
    )
    columns = torch.cat([rows.double() for _, rows in gaussian.u.rows()])
    return gaussian.d.reciprocal(), gaussian.explained((columns / gaussian.d.unsqueeze(1)).T)


def _by_tensor(rows: Tensor, layout: Layout, c: int) -> Sequence[Tensor]:  # (P, K) -> (C, I, K) for each tensor
    return [part.unflatten(0, (c, -1)) for part in rows.split(layout.sizes)]
