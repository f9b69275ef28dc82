"""Define structures: which sums to keep of the curvature H, and which Gaussian follows from them.

The data flows in three steps:

    moments of a batch      -> a dict of sums      (sums of two batches are added)
    sums                    -> a `Curvature`       (factorised once, for every prior)
    curvature, scale s, D   -> a `Gaussian`        N(0, (s H + D)^-1) with the prior precision D

No structure runs the network.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.backprop.gradients import Engine, Forward, Moments
from laplace.budget import Budget
from laplace.checks import changed_options, options_of, written
from laplace.errors import UnsupportedError
from laplace.keywords import NamedOptions
from laplace.linalg.gram_sums import GramRows
from laplace.structures.gaussian import Curvature as Curvature
from laplace.structures.gaussian import Gaussian as Gaussian
from laplace.structures.gaussian import Traces as Traces
from laplace.weights.layout import Layout

if TYPE_CHECKING:
    from laplace.structures.lowrank import Spectrum
    from laplace.structures.solves import TrainingData

Sums = dict[str, Tensor]
Contribution = dict[str, Tensor | GramRows | float]


@dataclass(frozen=True)
class Kept:
    """Describes what a structure keeps of one tensor's curvature.

    Attributes:
        form: a short description, such as 'kron 20 x 50'.
        bytes: the memory that it takes.
        own: True if it has the structure's own form, False if it has a fallback form.
    """

    form: str
    bytes: int
    own: bool = True


@dataclass(frozen=True)
class Forms:
    """Lists the keys and shapes of the sums that a structure makes. Loaded files are checked against it.

    A shape is written as one letter per dimension: 'pp' is a square matrix, '' is a single number. Within one form,
    equal letters mean equal sizes. p is the number of weights of the tensor, P the number of all weights, and
    g * o * i = p.

    Attributes:
        tensor: the alternatives for the sums of one tensor, by the part of the key after 'name/'. Exactly one applies.
        whole: the alternatives for the sums of all weights together. Exactly one applies.
        shared: letters that mean the same size in all tensors and in `whole`.
        counts: keys whose values are whole numbers.
    """

    tensor: tuple[Mapping[str, str], ...] = ({},)
    whole: tuple[Mapping[str, str], ...] = ({},)
    shared: str = ""
    counts: tuple[str, ...] = ()


class Pass(ABC):
    """Describes one run over the data: what each batch adds, and what follows from the total."""

    @abstractmethod
    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        """Return what one batch adds to the sums."""

    def finish(self, before: Sums, found: Sums) -> Sums:
        """Return the sums after this run, from the sums before it and the sums that it found."""
        return before | found


class Structure(NamedOptions, Pass):
    """Stores the curvature in one particular form. A structure is also the first run over the data.

    Attributes:
        name: the name in summaries, messages and files. Defaults to the name of the class.
        options: the names of the constructor's arguments. Each is an attribute of that name, and enters `described`.
        passes: the smallest number of runs over the data. With more than one, data cannot be added later.
        functional: whether this is a posterior over functions, which cannot draw weights.
        semidefinite: whether H is positive semi-definite, so that negative eigenvalues are rounding errors.
        exact_hessian: whether it accepts curvature='hessian'.
        scattered: whether it can keep some weights of a tensor without the others. It then gets blocks of shape (k,).
        prior_structures: the accepted priors, by the number of their precisions.
        precision_forms: further accepted forms of a prior precision: 'dense' (a matrix per tensor), 'kron' (a Kronecker
            product per tensor), 'whole' (one matrix over all weights).
        weight_sharing: for weights used at many positions, 'reduce' sums over positions before it forms the factors,
            'expand' treats each position as an example.
        keeps_points: whether predictions need some of the training data.
        rereads: whether the posterior reads the training data again whenever it is asked something.
        forms: the keys and shapes of the sums. With None, files are not checked for them.
        budget: the memory that may be taken. The user's budget replaces the default.
    """

    name: str
    options: tuple[str, ...] = ()
    passes: int = 1
    functional: bool = False
    semidefinite: bool = True
    exact_hessian: bool = True
    scattered: bool = False
    prior_structures: tuple[str, ...] = ("scalar", "layerwise", "diag")
    precision_forms: tuple[str, ...] = ()
    weight_sharing: str = "expand"
    keeps_points: bool = False
    rereads: bool = False
    forms: Forms | None = None
    budget: Budget = Budget()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Name the subclass after its class, and drop the parent's `forms` if the subclass makes other sums."""
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "name" not in own:
            cls.name = cls.__name__
        if "forms" not in own and ("sums" in own or "block_sums" in own):
            cls.forms = None

    @property
    def described(self) -> str:
        """Return the name and the options that differ from the defaults. Sums with equal descriptions may be added."""
        return ", ".join([self.name, *changed_options(self)])

    def __repr__(self) -> str:
        """Return the call that makes this structure: `Kron(damping='balanced')`."""
        return written(self)

    def __eq__(self, other: object) -> bool:
        """Compare class and options."""
        if not isinstance(other, Structure):
            return NotImplemented
        return type(self) is type(other) and options_of(self) == options_of(other)

    def __hash__(self) -> int:
        return hash((type(self), self.described))

    @property
    def takes(self) -> tuple[str, ...]:
        """Return all accepted forms of a prior precision."""
        return *self.prior_structures, *self.precision_forms

    def check(self, layout: Layout) -> None:
        """Raise OptionError if an option has no meaning for these tensors."""
        return

    @property
    def adds(self) -> bool:
        """Return whether more data can be added to the sums later."""
        return self.passes == 1

    def scaled(self, sums: Sums, scale: Tensor) -> Sums:
        """Return the sums of s H. Scaled sums can be added to those of other data."""
        return {key: value * scale.to(value) for key, value in sums.items()}

    def indefinite(self) -> Structure:
        """Return the same structure for an H with negative eigenvalues, which removing data may cause."""
        other = copy.copy(self)
        other.semidefinite = False
        return other

    def further(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> Pass | None:
        """Return the next run over the data, given the sums so far. None if the sums are complete."""
        return None

    def attach_points(self, forward: Forward, points: Any, engine: Engine, limit: int) -> Forward:
        """Add the kept points to a run at new inputs. Only posteriors over functions keep any."""
        return forward

    def attach_data(self, curvature: Curvature, data: TrainingData | None) -> Curvature:
        """Add the training data to the curvature, for structures that read it again. None if it is not there."""
        return curvature

    @property
    def stored(self) -> Structure:
        """Return the structure of the sums themselves: what is left of this one without the training data."""
        return self

    def describe(self, sums: Sums, layout: Layout) -> list[Kept]:
        """Describe what is kept of each tensor. Sums over all weights count in proportion to the tensor's size."""
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
        """Describe in a few words what is kept of a tensor, from its `own` sums and those of the `whole`."""
        return self.name

    def in_own_form(self, own: Sums) -> bool:
        """Return whether a tensor's sums have the structure's own form, not a fallback form."""
        return True

    def notes(self, sums: Sums) -> Iterator[str]:
        """Yield warnings for the user about a fit that made these sums."""
        yield from ()

    def spectrum(self, sums: Sums) -> Spectrum:
        """Return the kept eigenvalues of H over all weights. Raises UnsupportedError if there are none."""
        raise UnsupportedError(
            f"{self.name} keeps no eigenvalues of all weights together. Fit with hessian_structure='lowrank' for them."
        )

    def memory(self, moments: Moments, layout: Layout, itemsize: int) -> int:
        """Return the bytes that a fit needs: the sums, the contribution of a batch, and the decomposition.

        A fit that needs more than is free is refused before it begins. The default is one number per weight for each.
        """
        return 3 * itemsize * layout.n_params

    def runs(self, layout: Layout, n_data: int) -> tuple[float, float]:
        """Return how often a fit usually runs the network on each example, and how often it sends vectors back."""
        return self.passes, self.passes

    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        """Return the multiplications of a fit besides running the network: per example, and once per fit.

        `laplace.plan` estimates times from them. The default is one per weight and vector.
        """
        return vectors * layout.n_params, 0.0

    @abstractmethod
    def curvature(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> Curvature:
        """Return H in `dtype` from the sums. Eigendecompositions happen here, once per fit."""
