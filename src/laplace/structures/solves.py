"""Report on solves without a matrix, and say what they need: their options, and the training data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class TrainingData(Protocol):
    """Multiplies vectors by the curvature H of the training data. Each call reads the data once."""

    def products(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Return H times each vector."""
        ...

    def noise(self, n: int, seed: int) -> Tensor:  # (n, P)
        """Return draws of N(0, H): the gradients of random vectors with the covariance Lambda, summed over the data."""
        ...


@dataclass(frozen=True)
class Solver:
    """Holds the options of the solves."""

    residual: float
    most_iterations: int
    probes: int
    seed: int


@dataclass(frozen=True)
class Solves:
    """Reports what the answers of hessian_structure='matrix_free' took, and how exact they are.

    Attributes:
        wanted: the residual that was asked for, relative to the right-hand side.
        residual: the largest residual of the last answer. Measured by the preconditioner, as the iteration does.
        iterations: how many blocks of vectors the last answer multiplied by the curvature.
        products: how many vectors the last answer multiplied.
        all_products: how many vectors all answers since the fit have multiplied.
        evidence_error: the standard error of the last log evidence. None before the first, 0 if it is exact.
    """

    wanted: float
    residual: float | None = None
    iterations: int = 0
    products: int = 0
    all_products: int = 0
    evidence_error: float | None = None

    def __repr__(self) -> str:
        rows = [("wanted", f"residuals of {self.wanted:.1e}")]
        if self.residual is not None:
            rows.append(("reached", f"{self.residual:.1e} in the last answer"))
            rows.append(("products", f"{self.products:,} vectors in {self.iterations} blocks"))
        rows.append(("in all", f"{self.all_products:,} vectors since the fit"))
        if self.evidence_error is not None:
            rows.append(("evidence", f"standard error {self.evidence_error:.3g}"))
        return "Solves(\n" + "".join(f"  {key:<10}{value}\n" for key, value in rows) + ")"
