"""What can be read off a fitted posterior: sizes, the terms of the evidence, densities, the precision itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from laplace.algebra import Clipped
from laplace.budget import Budget
from laplace.checks import shown
from laplace.errors import InputError, UnsupportedError
from laplace.posterior import Fit, Posterior
from laplace.precision import plain, plainly
from laplace.structures import Gaussian
from laplace.structures.blockdiag import BlockCurvature, BlockDiagonalGaussian
from laplace.structures.diag import DiagBlock, DiagGaussian
from laplace.structures.lowrank import Spectrum
from laplace.weights.layout import Layout


class BlockMatrix:
    """A block-diagonal matrix that is written out on request.

    Attributes:
        to_matrix: makes the matrix, (P, P), or raises a MemoryBudgetError.
        logdet: its log-determinant, ().
    """

    def __init__(self, to_matrix: Callable[[], Tensor], logdet: Callable[[], Tensor], layout: Layout) -> None:
        self.to_matrix, self.logdet, self._layout = to_matrix, logdet, layout

    def __repr__(self) -> str:
        return f"BlockMatrix({len(self._layout.names)} blocks, {self._layout.n_params} weights)"


class Readable(ABC):
    """The read-only side of `Laplace`."""

    @property
    @abstractmethod
    def posterior(self) -> Posterior:
        """The posterior at the current prior, noise and temperature; an error before fit."""

    _budget: Budget

    def _require_matrix(self, side: int, what: str, instead: str) -> None:
        """Refuse a square matrix that cannot fit."""
        mean = self._fit.mean
        self._budget.require(2 * mean.element_size() * side**2, mean.device, what, f"There is: {instead}.")

    @property
    def _fit(self) -> Fit:
        return self.posterior.fit

    @property
    def mean(self) -> Tensor:  # (P,)
        """The weights at which the posterior was fitted."""
        return self._fit.mean.clone()

    @property
    def n_params(self) -> int:
        """Number of uncertain weights, P."""
        return self._fit.layout.n_params

    @property
    def n_layers(self) -> int:
        """Number of parameter tensors, each a block."""
        return len(self._fit.layout.names)

    @property
    def n_data(self) -> int:
        """Number of examples seen."""
        return self._fit.n_data

    @property
    def n_outputs(self) -> int:
        """Number of outputs, C."""
        return self._fit.n_outputs

    @property
    def loss(self) -> float:
        """The training loss: half the squared error, or the cross-entropy, summed over the data."""
        return float(self._fit.data["loss"])

    @property
    @plainly
    def H(self) -> Tensor | BlockMatrix:
        """The curvature at unit noise: (P, P) for full and lowrank, (P,) for diag, else an object with to_matrix()."""
        curvature = self._fit.curvature
        if not isinstance(curvature, BlockCurvature):
            self._require_matrix(self.n_params, "the dense matrix of all weights", "posterior_variance")
            return curvature.matrix().clone()
        diagonals = [block.diagonal for block in curvature.blocks if isinstance(block, DiagBlock)]
        if len(diagonals) == len(curvature.blocks):
            return torch.cat(diagonals)
        return self._block_matrix(curvature.matrix, None)

    @property
    def spectrum(self) -> Spectrum:
        """The eigenvalues that hessian_structure='lowrank' kept of the curvature at unit noise, and what it left."""
        if self._fit.structure.name != "lowrank":
            raise UnsupportedError(
                f"{self._fit.structure.name} keeps no eigenvalues of all weights together; hessian_structure='lowrank' "
                "does."
            )
        return Spectrum.of(self._fit.sums)

    @property
    @plainly
    def clipped(self) -> Clipped:
        """How many eigenvalues of the curvature were below zero and set to it, and how far below they were.

        A few are rounding; there is a warning where they are more. Of 'lowrank' see `spectrum`.
        """
        return self.posterior.curvature.clipped

    @property
    @plainly
    def log_likelihood(self) -> Tensor:
        """(1/T) log p(D given mean)."""
        return self.posterior.log_likelihood

    @property
    @plainly
    def scatter(self) -> Tensor:
        """(mean - mu0)^T D (mean - mu0)."""
        return self.posterior.scatter

    @property
    @plainly
    def log_det_prior_precision(self) -> Tensor:
        """log det of the prior precision."""
        return self.posterior.log_det_prior_precision

    @property
    @plainly
    def log_det_posterior_precision(self) -> Tensor:
        """log det of the posterior precision."""
        return self.posterior.log_det_posterior_precision

    @property
    @plainly
    def log_det_ratio(self) -> Tensor:
        """log det of the posterior precision minus that of the prior precision."""
        return self.posterior.log_det_ratio

    @property
    def prior_precision_diag(self) -> Tensor:  # (P,)
        """The prior precision of each weight."""
        return self.posterior.prior.diagonal(self._fit.layout, self.mean)

    @property
    @plainly
    def posterior_precision(self) -> Tensor | BlockMatrix:
        """(P, P) for full and lowrank, (P,) for diag, else an object with to_matrix() and logdet()."""
        return self._shown(self.posterior.gaussian)

    @property
    @plainly
    def posterior_covariance(self) -> Tensor:  # (P, P)
        """The covariance, dense."""
        self._require_matrix(self.n_params, "the covariance matrix of all weights", "posterior_variance, or sample()")
        return self.posterior.gaussian.covariance_matrix()

    @property
    @plainly
    def posterior_variance(self) -> Tensor:  # (P,)
        """The marginal variance of each weight."""
        return self.posterior.gaussian.marginal_variances().clone()

    @property
    @plainly
    def posterior_scale(self) -> Tensor:
        """A root of the covariance: (P, P) with S S^T = Sigma for full, (P,) standard deviations for diag."""
        if self._fit.structure.name == "diag" or self._fit.structure.functional:  # which says what there is instead
            return self.posterior_variance.sqrt()
        if self._fit.structure.name == "full":
            eye = torch.eye(self.n_params, dtype=self.mean.dtype, device=self.mean.device)
            return self.posterior.gaussian.color(eye).T
        raise UnsupportedError(
            f"{self._fit.structure.name} keeps no scale matrix. There is: sample(), posterior_variance, "
            "posterior_covariance."
        )

    @plainly
    def square_norm(self, value: Tensor) -> Tensor:  # (P,) or (S, P)
        """(value - mean)^T posterior precision (value - mean).

        Args:
            value: weights, (P,) or (S, P).

        Raises:
            InputError: another number of weights.
        """
        self._check_weights(value)
        return self.posterior.gaussian.quadratic(value.to(self.mean) - self.mean)

    @plainly
    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Log-density of the posterior at some weights.

        Args:
            value: weights, (P,) or (S, P).
            normalized: whether its constant is added.

        Raises:
            InputError: another number of weights.
        """
        out = -0.5 * self.square_norm(value)
        if normalized:
            out = out + 0.5 * (self.log_det_posterior_precision - self.n_params * math.log(2 * math.pi))
        return out

    @plainly
    def functional_variance(self, Js: Tensor) -> Tensor:
        """J Sigma J^T of each example, for Jacobians that you bring.

        Args:
            Js: (N, C, P).

        Returns:
            (N, C, C).

        Raises:
            InputError: another number of weights.
        """
        self._check_weights(Js, "the Jacobian's last dimension")
        return self.posterior.gaussian.dense_variance(Js.to(self.mean))

    @plainly
    def functional_covariance(self, Js: Tensor) -> Tensor:
        """J Sigma J^T over all examples together, for Jacobians that you bring.

        Args:
            Js: (N, C, P).

        Returns:
            (N C, N C).

        Raises:
            InputError: another number of weights.
        """
        self._check_weights(Js, "the Jacobian's last dimension")
        rows = Js.to(self.mean).flatten(0, -2)
        self._require_matrix(len(rows), f"the covariance of {len(rows):,} outputs", "functional_variance")
        return self.posterior.gaussian.dense_variance(rows)

    def _check_weights(self, value: Tensor, what: str = "value") -> None:
        if not isinstance(value, Tensor) or value.is_complex():
            raise InputError(f"{what}: {shown(value)} came; a tensor of real numbers is needed, P = {self.n_params}.")
        if value.dim() < 1 or value.shape[-1] != self.n_params:
            raise InputError(
                f"{what}: shape {tuple(value.shape)} came; the last dimension must be P = {self.n_params}."
            )

    def _block_matrix(self, matrix: Callable[[], Tensor], logdet: Callable[[], Tensor] | None) -> BlockMatrix:
        def to_matrix() -> Tensor:
            self._require_matrix(
                self.n_params, "the dense matrix of all weights", "posterior_variance, or log_det_posterior_precision"
            )
            with plain():
                return matrix()

        return BlockMatrix(to_matrix, logdet or (lambda: torch.logdet(to_matrix())), self._fit.layout)

    def _shown(self, gaussian: Gaussian) -> Tensor | BlockMatrix:
        if not isinstance(gaussian, BlockDiagonalGaussian):
            self._require_matrix(self.n_params, "the dense matrix of all weights", "posterior_variance")
            return gaussian.precision_matrix().clone()
        diagonals = [block.precision for block in gaussian.blocks if isinstance(block, DiagGaussian)]
        if len(diagonals) == len(gaussian.blocks):
            return torch.cat(diagonals)
        return self._block_matrix(gaussian.precision_matrix, gaussian.logdet)
