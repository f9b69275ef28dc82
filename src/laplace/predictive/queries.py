"""Queries: what can be asked about the distribution of the outputs f. A posterior computes no more than that."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laplace.linalg.sampling import Draws


@dataclass(frozen=True)
class Variances:
    """Ask for the variance of each output, (N, C).

    Attributes:
        chosen: Indices of the wanted outputs. None means all.
    """

    chosen: Tensor | None = None


@dataclass(frozen=True)
class Products:
    """Ask for the variances, and for S v with vectors v given later, without the C x C matrix S."""


@dataclass(frozen=True)
class Covariances:
    """Ask for the covariance of each input's outputs, (N, C, C).

    Attributes:
        chosen: Indices of the wanted outputs. None means all.
    """

    chosen: Tensor | None = None


@dataclass(frozen=True)
class Joint:
    """Ask for one Gaussian over the outputs at all inputs together, (1, N C).

    Attributes:
        instead: What to write instead, for the error message if the covariance does not fit into memory.
        chosen: Indices of the wanted outputs. None means all.
    """

    instead: str
    chosen: Tensor | None = None


@dataclass(frozen=True)
class Functions:
    """Ask for draws of whole functions: one draw of the weights is used for all inputs, (S, N, C).

    Attributes:
        draws: How many draws, and the random generator.
        exact: Whether the network itself is run with the drawn weights (True), or its linearisation (False).
    """

    draws: Draws
    exact: bool


Query = Variances | Products | Covariances | Joint | Functions
