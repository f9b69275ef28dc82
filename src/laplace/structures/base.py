"""What a structure is: which sums it keeps of the curvature, and the Gaussians that it makes of them.

A structure turns the second moments of a batch into a dict of sums (additive: merged by adding), the sums into a
`Curvature` (factorised once, whatever the prior), and a curvature, a scale s and a prior precision into the
`Gaussian` N(0, (s H + D)^-1). No structure calls the network.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from laplace.algebra import Clipped, Rows
from laplace.backprop.gradients import Engine, Forward, Jacobian, Moments
from laplace.budget import Budget
from laplace.weights.layout import Layout

Sums = dict[str, Tensor]
Contribution = dict[str, Tensor | Rows | float]
Traces = tuple[Tensor, Tensor]


class Gaussian(ABC):
    """N(0, precision^-1) over all uncertain weights, precision = s H + D. Differentiable in s and D."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """log det of the precision."""

    @abstractmethod
    def color(self, eps: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Standard normal noise turned into draws of this Gaussian."""

    @abstractmethod
    def marginal_variances(self) -> Tensor:  # (P,)
        """The diagonal of the covariance."""

    @abstractmethod
    def quadratic(self, vector: Tensor) -> Tensor:  # (..., P) -> (...)
        """vector^T precision vector."""

    @abstractmethod
    def precision_matrix(self) -> Tensor:  # (P, P)
        """The precision, dense."""

    @abstractmethod
    def covariance_matrix(self) -> Tensor:  # (P, P)
        """The covariance, dense."""

    @abstractmethod
    def variance(self, jacobian: Jacobian) -> Tensor:  # (N, C)
        """Variances of the outputs, diag(J Sigma J^T)."""

    @abstractmethod
    def covariance(self, jacobian: Jacobian) -> Tensor:  # (N, C, C)
        """Covariance of each example's outputs, J Sigma J^T."""

    @abstractmethod
    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:  # (N, C)
        """J Sigma J^T v for one v per example, without the C x C matrix where that can be had."""

    @abstractmethod
    def joint(self, jacobian: Jacobian) -> Tensor:  # (N, C, N, C)
        """Covariance of all examples' outputs together."""

    @abstractmethod
    def dense_variance(self, jacobians: Tensor) -> Tensor:  # (..., M, P) -> (..., M, M)
        """J Sigma J^T for rows of a Jacobian that the user brings."""

    @abstractmethod
    def traces(self, groups: str) -> Traces:
        """t[g] = tr(Sigma_gg) and m[g, h] = ||Sigma_gh||_F^2 (its diagonal alone where Sigma is block-diagonal).

        `groups` is 'scalar' (all weights), 'layerwise' (a tensor each) or 'diag' (a weight each). What Newton's method
        on the evidence needs, and all that it needs.
        """


def require_pairs(budget: Budget, like: Tensor) -> None:  # (P,)
    """Newton's method with a precision per weight solves for all of them together: refused where that cannot fit."""
    p = len(like)
    what = f"tuning a prior precision for each of {p:,} weights that depend on each other"
    budget.require(4 * 8 * p**2, like.device, what, "Take prior_structure='layerwise', or hessian_structure='diag'.")


class Curvature(ABC):
    """H, factorised once.

    Attributes:
        commutes: whether the prior enters as s H + D exactly, so that `traces` are the evidence's derivatives.
    """

    commutes: bool = True

    @property
    def clipped(self) -> Clipped:
        """Eigenvalues that were below zero, where they are found."""
        return Clipped()

    @abstractmethod
    def gaussian(self, scale: Tensor, precision: Sequence[Tensor]) -> Gaussian:
        """N(0, (s H + D)^-1); `precision` holds one scalar or one vector per block."""

    @abstractmethod
    def matrix(self) -> Tensor:  # (P, P)
        """H, dense."""

    def sweep(self, jacobian: Jacobian, gaussians: Sequence[Gaussian]) -> Iterator[Tensor]:
        """The output variances under many Gaussians of this curvature, sharing the projections: (N, C) each."""
        for gaussian in gaussians:
            yield gaussian.variance(jacobian)


class Pass(ABC):
    """One run over the data: what each batch adds, and what is made of it at the end."""

    @abstractmethod
    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        """What one batch adds."""

    def finish(self, before: Sums, found: Sums) -> Sums:
        """The sums after this run, from those of the runs before it and those found in it."""
        return before | found


class Structure(Pass):
    """A way of keeping the curvature; itself the first run over the data.

    Attributes:
        name: what `hessian_structure` calls it.
        options: those of `Laplace`'s that are its own, by which it is made.
        passes: runs over the data, at least; sums of more than one cannot be added to later.
        functional: whether it is a posterior over functions, without weights to draw.
        semidefinite: whether H has no negative eigenvalues but for rounding.
        exact_hessian: whether there is a form for curvature='hessian'.
        scattered: whether it can keep some weights of a tensor without the others.
        prior_structures: which priors it can take.
        weight_sharing: whether positions are taken together ('reduce') before their factors are formed, or not.
        keeps_points: whether predictions need some of the data.
        budget: the memory that may be taken, the user's once there is one.
    """

    name: str
    options: tuple[str, ...] = ()
    passes: int = 1
    functional: bool = False
    semidefinite: bool = True
    exact_hessian: bool = True
    scattered: bool = True
    prior_structures: tuple[str, ...] = ("scalar", "layerwise", "diag")
    weight_sharing: str = "expand"
    keeps_points: bool = False
    budget: Budget = Budget()

    @property
    def described(self) -> str:
        """Its name, and its options where they are not the usual ones: sums of equal description are of one kind."""
        usual = inspect.signature(type(self)).parameters
        own = [(key, getattr(self, key)) for key in self.options]
        return ", ".join([self.name, *(f"{key}={value!r}" for key, value in own if value != usual[key].default)])

    def check(self, layout: Layout) -> None:
        """Refuse options that have no meaning for these tensors."""
        return

    @property
    def adds(self) -> bool:
        """Whether further data can be added to the sums."""
        return self.passes == 1

    def scaled(self, sums: Sums, scale: Tensor) -> Sums:
        """The sums of s H; sums that are scaled and added are those of the data together."""
        return {key: value * scale.to(value) for key, value in sums.items()}

    def indefinite(self) -> Structure:
        """The same for an H that may have negative eigenvalues, as one has that data was taken out of."""
        other = copy.copy(self)
        other.semidefinite = False
        return other

    def further(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> Pass | None:
        """The next run over the data, given what those before have left; None once all is there."""
        return None

    def beside(self, forward: Forward, points: Any, engine: Engine, limit: int) -> Forward:
        """A run at new inputs as this posterior sees it: one over functions looks at its own points, too."""
        return forward

    def notes(self, sums: Sums) -> Iterator[str]:
        """What the user is warned of after a fit that left these sums."""
        yield from ()

    @abstractmethod
    def memory(self, moments: Moments, layout: Layout, itemsize: int) -> int:
        """Bytes that a fit needs: for the sums, a batch's share of them, and their decomposition."""

    def runs(self, layout: Layout, n_data: int) -> tuple[float, float]:
        """How often a fit usually runs the network on each example, and how often it sends vectors back."""
        return self.passes, self.passes

    @abstractmethod
    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        """Multiplications of a fit besides running the network: per example, and once for the decomposition."""

    @abstractmethod
    def curvature(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> Curvature:
        """H from the sums, in `dtype`: eigendecompositions happen here, once per fit."""
