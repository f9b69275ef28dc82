"""Read a fitted posterior: sizes, terms of the evidence, densities, precision and covariance."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from laplace.checks import flag, shown
from laplace.errors import InputError, UnsupportedError
from laplace.inference.coverage import Coverage, coverage_of
from laplace.inference.source import Fitted
from laplace.keywords import refuse_unknown_keywords
from laplace.linalg.autocast import plain, plainly
from laplace.linalg.symmetric import Clipped
from laplace.structures import Curvature, Gaussian
from laplace.structures.lowrank import Spectrum
from laplace.structures.matrix_free_gaussian import MatrixFreeCurvature
from laplace.structures.solves import Solves
from laplace.weights.layout import Layout


class BlockMatrix:
    """Stands for a block-diagonal matrix, which is built only on request.

    Attributes:
        to_matrix: returns the dense matrix, (P, P), or raises MemoryBudgetError.
        logdet: returns the log-determinant, ().
    """

    def __init__(self, to_matrix: Callable[[], Tensor], logdet: Callable[[], Tensor], layout: Layout) -> None:
        self.to_matrix, self.logdet, self._layout = to_matrix, logdet, layout

    def __repr__(self) -> str:
        return f"BlockMatrix({len(self._layout.names)} blocks, {self._layout.n_params} weights)"


def _require_matrix(la: Fitted, side: int, what: str, instead: str) -> None:
    """Refuse a square matrix that does not fit into memory."""
    mean = la.posterior.fit.mean
    la.runner.spec.budget.require(2 * mean.element_size() * side**2, mean.device, what, f"Use {instead}.")


def mean(la: Fitted) -> Tensor:  # (P,)
    """Return the weights at which the posterior was fitted."""
    return la.posterior.fit.mean.clone()


def n_params(la: Fitted) -> int:
    """Return the number of uncertain weights, P."""
    return la.posterior.fit.layout.n_params


def n_layers(la: Fitted) -> int:
    """Return the number of parameter tensors. Each is a block."""
    return len(la.posterior.fit.layout.names)


def n_data(la: Fitted) -> int:
    """Return the number of training examples."""
    return la.posterior.fit.n_data


def n_outputs(la: Fitted) -> int:
    """Return the number of outputs, C."""
    return la.posterior.fit.n_outputs


def coverage(la: Fitted) -> Coverage:
    """Return a table of all uncertain tensors: the rule that explains each, what is kept of it, and the bytes.

    Raises:
        NotFittedError: `fit` was not called yet.
    """
    return coverage_of(la.posterior.fit, la.runner.plan)


def loss(la: Fitted) -> float:
    """Return the training loss, summed over the data: half the squared error, or the cross-entropy. Has `item()`."""
    return np.float64(la.posterior.fit.data["loss"].item())


@plainly
def H(la: Fitted) -> Tensor | BlockMatrix:
    """Return H at unit noise: (P, P) for full and lowrank, (P,) for diag, else an object with to_matrix()."""
    curvature = la.posterior.fit.curvature
    return _shown(la, curvature, curvature.matrix, None)


def spectrum(la: Fitted) -> Spectrum:
    """Return the eigenvalues of the curvature at unit noise that 'lowrank' kept, and a report on the others."""
    return la.posterior.fit.structure.spectrum(la.posterior.fit.sums)


def solves(la: Fitted) -> Solves:
    """Return what the answers of 'matrix_free' took: residuals reached, products, the evidence's standard error.

    Raises:
        UnsupportedError: the structure keeps its curvature and solves nothing.
    """
    curvature = la.posterior.fit.curvature
    if not isinstance(curvature, MatrixFreeCurvature):
        raise UnsupportedError(
            f"{la.posterior.fit.structure.name} keeps its curvature and solves nothing by iteration. Fit with "
            "hessian_structure='matrix_free' for a report on solves."
        )
    return curvature.solves


@plainly
def clipped(la: Fitted) -> Clipped:
    """Return how many eigenvalues of the curvature were negative and set to zero, and how far below zero they were.

    A few are rounding errors. If they are more, there is a warning. For 'lowrank' see `spectrum`.
    """
    return la.posterior.curvature.clipped


@plainly
def log_likelihood(la: Fitted) -> Tensor:
    """Return (1/T) log p(data given mean)."""
    return la.posterior.log_likelihood


@plainly
def log_prior(la: Fitted) -> Tensor:
    """Return log p(mean), the normalised log-density of the prior at the weights."""
    return la.posterior.log_prior


@plainly
def prior_clipped(la: Fitted) -> Clipped:
    """Return how many eigenvalues of the prior's curvature -d2 log p at the weights were negative and set to zero.

    A prior that is not log-concave has some, such as a Student-t in its tails. `lowest` is relative to the largest.
    """
    return la.posterior.prior_clipped


@plainly
def scatter(la: Fitted) -> Tensor:
    """Return (mean - mu0)^T D (mean - mu0)."""
    return la.posterior.scatter


@plainly
def log_det_prior_precision(la: Fitted) -> Tensor:
    """Return log det of the prior precision."""
    return la.posterior.log_det_prior_precision


@plainly
def log_det_posterior_precision(la: Fitted) -> Tensor:
    """Return log det of the posterior precision."""
    return la.posterior.log_det_posterior_precision


@plainly
def log_det_ratio(la: Fitted) -> Tensor:
    """Return log det of the posterior precision minus log det of the prior precision."""
    return la.posterior.log_det_ratio


def prior_precision_diag(la: Fitted) -> Tensor:  # (P,)
    """Return the prior precision of each weight, the diagonal of -d2 log p at the weights."""
    return la.posterior.prior.diagonal(la.posterior.fit.layout, la.posterior.fit.mean)


@plainly
def posterior_precision(la: Fitted) -> Tensor | BlockMatrix:
    """Return the precision: (P, P) for full and lowrank, (P,) for diag, else a `BlockMatrix`."""
    gaussian = la.posterior.gaussian
    return _shown(la, gaussian, gaussian.precision_matrix, gaussian.logdet)


@plainly
def posterior_covariance(la: Fitted) -> Tensor:  # (P, P)
    """Return the covariance as a dense matrix."""
    _require_matrix(la, n_params(la), "the covariance matrix of all weights", "posterior_variance, or sample()")
    return la.posterior.gaussian.covariance_matrix()


@plainly
def posterior_variance(la: Fitted) -> Tensor:  # (P,)
    """Return the marginal variance of each weight."""
    return la.posterior.gaussian.marginal_variances().clone()


@plainly
def posterior_scale(la: Fitted) -> Tensor:
    """Return a root of the covariance: (P, P) with S S^T = Sigma for full, (P,) standard deviations for diag."""
    root, structure = la.posterior.gaussian.scale(), la.posterior.fit.structure
    if root is None:
        raise UnsupportedError(
            f"{structure.name} has no scale matrix. Use sample(), posterior_variance or posterior_covariance."
        )
    return root


@plainly
def square_norm(la: Fitted, value: Tensor) -> Tensor:  # (P,) or (S, P)
    """Return (value - mean)^T posterior precision (value - mean).

    Args:
        value: weights, (P,) or (S, P).

    Raises:
        InputError: the number of weights is wrong.
    """
    _check_weights(la, value)
    return la.posterior.gaussian.quadratic(value.to(la.posterior.fit.mean) - la.posterior.fit.mean)


@refuse_unknown_keywords
@plainly
def log_prob(la: Fitted, /, value: Tensor, normalized: bool = True) -> Tensor:
    """Return the log-density of the posterior at some weights.

    Args:
        value: weights, (P,) or (S, P).
        normalized: whether to add the constant.

    Raises:
        InputError: the number of weights is wrong.
    """
    out = -0.5 * square_norm(la, value)
    if flag(normalized, "normalized"):
        out = out + 0.5 * (la.posterior.log_det_posterior_precision - n_params(la) * math.log(2 * math.pi))
    return out


@plainly
def functional_variance(la: Fitted, Js: Tensor) -> Tensor:
    """Return J Sigma J^T of each example, for Jacobians that you computed.

    Args:
        Js: (N, C, P).

    Returns:
        (N, C, C).

    Raises:
        InputError: the number of weights is wrong.
    """
    _check_weights(la, Js, "the Jacobian's last dimension")
    return la.posterior.gaussian.dense_variance(Js.to(la.posterior.fit.mean))


@plainly
def functional_covariance(la: Fitted, Js: Tensor) -> Tensor:
    """Return J Sigma J^T over all examples together, for Jacobians that you computed.

    Args:
        Js: (N, C, P).

    Returns:
        (N C, N C).

    Raises:
        InputError: the number of weights is wrong.
    """
    _check_weights(la, Js, "the Jacobian's last dimension")
    rows = Js.to(la.posterior.fit.mean).flatten(0, -2)
    _require_matrix(la, len(rows), f"the covariance of {len(rows):,} outputs", "functional_variance")
    return la.posterior.gaussian.dense_variance(rows)


def _check_weights(la: Fitted, value: Tensor, what: str = "value") -> None:
    if not isinstance(value, Tensor) or value.is_complex():
        raise InputError(f"{what} is {shown(value)}; give a tensor of real numbers with P = {n_params(la)} weights.")
    if value.dim() < 1 or value.shape[-1] != n_params(la):
        raise InputError(f"{what} has shape {tuple(value.shape)}; the last dimension must be P = {n_params(la)}.")


def _block_matrix(la: Fitted, matrix: Callable[[], Tensor], logdet: Callable[[], Tensor] | None) -> BlockMatrix:
    def to_matrix() -> Tensor:
        _require_matrix(
            la, n_params(la), "the dense matrix of all weights", "posterior_variance, or log_det_posterior_precision"
        )
        with plain():
            return matrix()

    return BlockMatrix(to_matrix, logdet or (lambda: torch.logdet(to_matrix())), la.posterior.fit.layout)


def _shown(
    la: Fitted, of: Curvature | Gaussian, matrix: Callable[[], Tensor], logdet: Callable[[], Tensor] | None
) -> Tensor | BlockMatrix:
    """Return a matrix in the form that it is kept in: (P,), (P, P), or blocks with a dense form on request."""
    diagonal = of.as_diagonal()
    if diagonal is not None:
        return diagonal.clone()
    if of.blockwise:
        return _block_matrix(la, matrix, logdet)
    _require_matrix(la, n_params(la), "the dense matrix of all weights", "posterior_variance")
    return matrix().clone()
