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
class Contrasts:
    """Ask for the Gaussian of the contrasts f_c - mean of f, which a shift of all outputs does not change.

    They are computed from contrasts of gradients, so that the variance of a common shift, which may be a million times
    larger if only the prior bounds it, is never there to cancel.

    Attributes:
        covariances: Whether to ask for their covariances, (N, C, C), besides their variances.
        beside: Whether to ask for the same of the outputs themselves, too.
    """

    covariances: bool = False
    beside: bool = False


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


Query = Variances | Products | Covariances | Contrasts | Joint | Functions


def with_covariances(need: Query) -> bool:
    """Return whether a query asks for the covariances of each input's outputs, or of their contrasts."""
    return isinstance(need, Covariances) or (isinstance(need, Contrasts) and need.covariances)
