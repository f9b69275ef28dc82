"""What a structure is: which sums it keeps of the curvature, and the Gaussians that it makes of them.

A structure turns the second moments of a batch into a dict of sums (additive: merged by adding), the sums into a
`Curvature` (factorised once, whatever the prior), and a curvature, a scale s and a prior precision into the
`Gaussian` N(0, (s H + D)^-1). No structure calls the network.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.backprop.gradients import Engine, Forward, Jacobian, Moments
from laplace.budget import Budget
from laplace.checks import written
from laplace.errors import UnsupportedError
from laplace.linalg.symmetric import Clipped, GramRows
from laplace.weights.layout import Layout

if TYPE_CHECKING:
    from laplace.structures.lowrank import Spectrum

Sums = dict[str, Tensor]
Contribution = dict[str, Tensor | GramRows | float]
Traces = tuple[Tensor, Tensor]


class Gaussian(ABC):
    """N(0, precision^-1) over all uncertain weights, precision = s H + D. Differentiable in s and D.

    Attributes:
        blockwise: whether tensors are independent, so that `la.posterior_precision` writes the matrix out on request.
    """

    blockwise: bool = False

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

    def as_diagonal(self) -> Tensor | None:  # (P,)
        """Return the precision of each weight where the precision is diagonal; None where it is not."""
        return None

    def scale(self) -> Tensor | None:
        """Return S with S S^T the covariance, (P, P), or its diagonal (P,); None where that would have to be made."""
        diagonal = self.as_diagonal()
        return None if diagonal is None else diagonal.rsqrt()

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
        blockwise: whether tensors are independent, so that `la.H` writes the matrix out on request.
    """

    commutes: bool = True
    blockwise: bool = False

    @property
    def clipped(self) -> Clipped:
        """Eigenvalues that were below zero, where they are found."""
        return Clipped()

    @abstractmethod
    def gaussian(self, scale: Tensor, precision: Sequence[Any]) -> Gaussian:
        """N(0, (s H + D)^-1); `precision` holds a scalar, a vector, or a form of `Structure.takes` per block."""

    @abstractmethod
    def matrix(self) -> Tensor:  # (P, P)
        """H, dense."""

    def as_diagonal(self) -> Tensor | None:  # (P,)
        """Return the diagonal of H where H is diagonal; None where it is not."""
        return None

    def sweep(self, jacobian: Jacobian, gaussians: Sequence[Gaussian]) -> Iterator[Tensor]:
        """The output variances under many Gaussians of this curvature, sharing the projections: (N, C) each."""
        for gaussian in gaussians:
            yield gaussian.variance(jacobian)


@dataclass(frozen=True)
class Kept:
    """What a structure keeps of one tensor's curvature.

    Attributes:
        form: in a few words, such as 'kron 20 x 50'.
        bytes: what it takes.
        own: whether it is the structure's own form, or another that it falls back to.
    """

    form: str
    bytes: int
    own: bool = True


@dataclass(frozen=True)
class Forms:
    """Which sums a structure leaves: their keys and shapes, against which files are checked.

    A shape is a word with a letter for each dimension, '' for a single number. Equal letters are equal sizes within
    one form. p is the number of a tensor's weights, P that of all, and g x o x i is p.

    Attributes:
        tensor: what may be kept of each tensor, by the key behind 'name/'; one of these forms holds.
        whole: what may be kept of all weights together; one of these forms holds.
        shared: letters that are equal sizes for all tensors and for the whole.
        counts: keys whose values are whole numbers.
    """

    tensor: tuple[Mapping[str, str], ...] = ({},)
    whole: tuple[Mapping[str, str], ...] = ({},)
    shared: str = ""
    counts: tuple[str, ...] = ()


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
        name: what it is called in summaries, messages and files; the name of its class unless it says so.
        options: its constructor's arguments, each kept in an attribute of that name; they enter `described`.
        passes: runs over the data, at least; sums of more than one cannot be added to later.
        functional: whether it is a posterior over functions, without weights to draw.
        semidefinite: whether H has no negative eigenvalues but for rounding.
        exact_hessian: whether there is a form for curvature='hessian'.
        scattered: whether it can keep some weights of a tensor without the others.
        prior_structures: which priors it can take, by how many precisions they have.
        precision_forms: which forms of a prior precision it takes besides: 'dense' (a matrix per tensor), 'kron' (a
            Kronecker product per tensor), 'whole' (a matrix of all weights together).
        weight_sharing: whether positions are taken together ('reduce') before their factors are formed, or not.
        keeps_points: whether predictions need some of the data.
        forms: the keys and shapes of its sums; None where it does not say, so that files are checked for less.
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
    precision_forms: tuple[str, ...] = ()
    weight_sharing: str = "expand"
    keeps_points: bool = False
    forms: Forms | None = None
    budget: Budget = Budget()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a subclass a name of its own, and no forms of its parent's where it makes other sums."""
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "name" not in own:
            cls.name = cls.__name__
        if "forms" not in own and ("sums" in own or "block_sums" in own):
            cls.forms = None

    @property
    def described(self) -> str:
        """Its name, and its options where they are not the usual ones: sums of equal description are of one kind."""
        usual = inspect.signature(type(self)).parameters
        own = [(key, getattr(self, key)) for key in self.options]
        return ", ".join([self.name, *(f"{key}={value!r}" for key, value in own if value != usual[key].default)])

    def __repr__(self) -> str:
        """The call that makes it: `Kron(damping='balanced')`."""
        return written(self, {key: getattr(self, key) for key in self.options})

    def __eq__(self, other: object) -> bool:
        """Equal to a structure of the same class with the same options."""
        if not isinstance(other, Structure):
            return NotImplemented
        mine, theirs = ([getattr(one, key) for key in one.options] for one in (self, other))
        return type(self) is type(other) and mine == theirs

    def __hash__(self) -> int:
        return hash((type(self), self.described))

    @property
    def takes(self) -> tuple[str, ...]:
        """All forms of a prior precision that it takes."""
        return *self.prior_structures, *self.precision_forms

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

    def attach_points(self, forward: Forward, points: Any, engine: Engine, limit: int) -> Forward:
        """A run at new inputs as this posterior sees it: one over functions looks at its own points, too."""
        return forward

    def describe(self, sums: Sums, layout: Layout) -> list[Kept]:
        """Describe what is kept of each tensor. Sums of all weights together count by each tensor's share of them."""
        parts: dict[str, Sums] = {name: {} for name in layout.names}
        whole: Sums = {}
        for key, value in sums.items():
            name, _, own = key.rpartition("/")
            if name in parts:
                parts[name][own] = value
            else:
                whole[key] = value
        shared = sum(value.nbytes for value in whole.values())
        return [
            Kept(
                self.form(parts[name], whole),
                sum(value.nbytes for value in parts[name].values()) + round(size / layout.n_params * shared),
                self.in_own_form(parts[name]),
            )
            for name, size in zip(layout.names, layout.sizes, strict=True)
        ]

    def form(self, own: Sums, whole: Sums) -> str:
        """Say in a few words what is kept of a tensor with sums of its `own`, and of the `whole`."""
        return self.name

    def in_own_form(self, own: Sums) -> bool:
        """Whether the sums of a tensor are in the form that the structure is named for."""
        return True

    def notes(self, sums: Sums) -> Iterator[str]:
        """What the user is warned of after a fit that left these sums."""
        yield from ()

    def spectrum(self, sums: Sums) -> Spectrum:
        """Return the eigenvalues of the curvature of all weights together, where they are kept."""
        raise UnsupportedError(
            f"{self.name} keeps no eigenvalues of all weights together; hessian_structure='lowrank' does."
        )

    def memory(self, moments: Moments, layout: Layout, itemsize: int) -> int:
        """Bytes that a fit needs: for the sums, a batch's share of them, and their decomposition.

        A number for each weight, unless a structure says otherwise; more than there is free is refused before the fit.
        """
        return 3 * itemsize * layout.n_params

    def runs(self, layout: Layout, n_data: int) -> tuple[float, float]:
        """How often a fit usually runs the network on each example, and how often it sends vectors back."""
        return self.passes, self.passes

    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        """Multiplications of a fit besides running the network: per example, and once for the decomposition.

        One for each weight and vector, unless a structure says otherwise; `laplace.plan` estimates times by it.
        """
        return vectors * layout.n_params, 0.0

    @abstractmethod
    def curvature(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> Curvature:
        """H from the sums, in `dtype`: eigendecompositions happen here, once per fit."""
