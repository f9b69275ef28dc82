"""Define priors: any log-density of the weights that is twice differentiable.

The posterior precision takes its curvature D = -d2 log p at the weights. The evidence takes log p itself:

    log Z = (1/T) log p(data given theta) + log p(theta) + P/2 log 2 pi - 1/2 log det(s H + D),    D = -d2 log p(theta)

For a Gaussian prior this is the usual formula. Negative eigenvalues of D (the tails of a Student-t) are set to zero,
which gives the nearest positive semi-definite D.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from laplace.errors import OptionError, UnsupportedError
from laplace.keywords import NamedOptions
from laplace.linalg.kronecker import Kronecker
from laplace.linalg.symmetric import Clipped
from laplace.structures import taking
from laplace.weights.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

    from laplace.structures.gaussian import Curvature

_CLOSE = 1e-6  # of the largest second derivative
_VANISHING = 1e-8  # of the square of the largest slope

Form = Tensor | Kronecker
"""Precision of one tensor: a scalar (), a value per weight (p,), a matrix (p, p), or a Kronecker product."""

_WORDS = {
    "diag": "a precision per weight",
    "dense": "a dense precision per tensor",
    "kron": "a Kronecker precision per tensor",
    "whole": "a dense precision of all weights together",
}


class Data(Protocol):
    """Gives a prior access to the curvature of the data."""

    @property
    def curvature(self) -> Curvature:
        """Return H at unit noise, factorised."""
        ...


class Prior(NamedOptions, ABC):
    """Defines a log-density over the uncertain weights. Immutable: other hyperparameters make another prior.

    Attributes:
        name: its name in saved files.
        quadratic: whether log p is quadratic (a Gaussian), so that the precision does not depend on the weights.
        unrestricted: the hyperparameters that may be any real number. All others must be positive.
    """

    name: str = ""
    quadratic: bool = False
    unrestricted: tuple[str, ...] = ()

    @property
    @abstractmethod
    def hyperparameters(self) -> dict[str, Tensor]:
        """Return the hyperparameters by name. Each has one value, or one per parameter tensor."""

    @property
    def described(self) -> str:
        """Return the description by which files and checkpoints compare priors."""
        return self.name

    @property
    def tuned(self) -> tuple[str, ...]:
        """Return the hyperparameters that `la.tune()` sets by default."""
        return tuple(self.hyperparameters)

    @abstractmethod
    def with_hyperparameters(self, **values: Tensor | float) -> Self:
        """Return the same prior with other values of these hyperparameters.

        Args:
            **values: the new values by name. A value that requires grad keeps its graph.

        Raises:
            OptionError: the name is unknown, or a value is outside its range.
        """

    def grouped(self, names: Sequence[str], groups: str, layout: Layout) -> Self:
        """Return the same prior with the number of values per hyperparameter that a `prior_structure` means.

        'scalar' changes nothing. 'layerwise' gives each named hyperparameter one value per tensor.
        """
        return self

    @abstractmethod
    def log_density(self, theta: Tensor, layout: Layout) -> Tensor:  # (P,) -> ()
        """Return log p(theta), normalised, in float64. It is differentiable in weights and hyperparameters."""

    @abstractmethod
    def precision_at(self, theta: Tensor, layout: Layout) -> tuple[Sequence[Form], Clipped]:
        """Return D = -d2 log p at the weights (P,), tensor by tensor, and which eigenvalues were set to zero.

        If tensors depend on each other, D is one matrix (P, P) instead. Differentiable in the hyperparameters.
        """

    def penalty(self, theta: Tensor, layout: Layout) -> Tensor:  # (P,) -> ()
        """Return -log p(theta) up to a constant, the term that training adds to its loss."""
        return -self.log_density(theta, layout)

    def diagonal(self, layout: Layout, theta: Tensor) -> Tensor:  # (P,)
        """Return the diagonal of D."""
        return torch.cat([diagonal_of(d, size) for d, size in self._sized(layout, theta)])

    @abstractmethod
    def check(self, layout: Layout, takes: Sequence[str] = ("diag",)) -> None:
        """Refuse hyperparameters of wrong lengths, and forms of the precision that the structure does not accept.

        Args:
            layout: the layout of the uncertain weights.
            takes: the forms of a precision that the structure accepts, `Structure.takes`.
        """

    def require_structure(self, takes: Sequence[str]) -> None:
        """Refuse a structure that cannot accept this prior for any weights. `check` does the rest.

        Args:
            takes: as for `check`.
        """
        return

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors of the prior."""
        return tuple(self.hyperparameters.values())

    def __eq__(self, other: object) -> bool:
        """Compare class and values."""
        if not isinstance(other, Prior):
            return NotImplemented
        own, others = ({k: v for k, v in vars(prior).items() if k != "compared"} for prior in (self, other))
        return type(self) is type(other) and _equal(own, others)

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def needs_grad(self) -> bool:
        """Return whether a value requires grad."""
        return any(tensor.requires_grad for tensor in self.tensors)

    @abstractmethod
    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same prior with `change` applied to each of its tensors."""

    def detached(self) -> Self:
        """Return the same prior without autograd graphs."""
        return self.mapped(Tensor.detach)

    def to(self, device: torch.device | str) -> Self:
        """Return the same prior on `device`."""
        return self.mapped(lambda tensor: tensor.to(device))

    def with_mean(self, mean: Tensor | float) -> Self:
        """Return the same prior with another mean."""
        raise UnsupportedError(f"{self} has no mean to set. Give another prior: la.prior = ...")

    @property
    def curved(self) -> bool:
        """Return whether the prior adds its own curvature to that of the data."""
        return False

    def joined(self, data: Data, scale: Tensor) -> tuple[Curvature, Tensor]:
        """Return the factorised curvature that is added to D, and its scale."""
        return data.curvature, scale

    def scatter(self, theta: Tensor, layout: Layout) -> Tensor:
        """Return (theta - mu0)^T D (theta - mu0) of a Gaussian prior."""
        self._refuse("scatter")

    def logdet(self, layout: Layout, like: Tensor) -> Tensor:
        """Return log det D of a Gaussian prior."""
        self._refuse("log_det_prior_precision")

    def state(self, layout: Layout) -> dict[str, Any]:
        """Return the values to save: numbers, words and tensors, in the order of the layout."""
        return {"kind": self.name, **{key: value.detach().clone() for key, value in self.hyperparameters.items()}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], layout: Layout) -> Prior:
        """Return the prior that `state` describes.

        Raises:
            OptionError: a value is out of range.
        """
        return cls(**{key: value for key, value in state.items() if key != "kind"})

    def restored(self, state: Mapping[str, Any], layout: Layout) -> Prior:
        """Return this prior with the values of `state`: for classes whose code is not in files."""
        return self.from_state(state, layout)

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={shown_values(value)}" for key, value in self.hyperparameters.items())
        return f"{type(self).__name__}({values})"

    def _sized(self, layout: Layout, theta: Tensor) -> list[tuple[Form, int]]:
        forms = self.precision_at(theta, layout)[0]
        sizes = layout.sizes if len(forms) == len(layout.names) else [layout.n_params]
        return list(zip(forms, sizes, strict=True))

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"{what} exists only for a Gaussian prior; this is {self}. Use la.log_prior, la.prior_precision_diag, "
            "la.log_det_posterior_precision or la.log_marginal_likelihood()."
        )


def require_form(prior: Prior, form: str, takes: Sequence[str]) -> None:
    """Refuse a form of the precision that the structure does not accept, and name structures that do."""
    if form not in takes:
        undamped = " ('kron' without damping=)" if form == "kron" else ""
        raise UnsupportedError(
            f"{prior} has {_WORDS[form]}, which this hessian_structure does not accept. Take "
            f"hessian_structure={taking(form)}{undamped}."
        )


def require_known(prior: Prior, names: Sequence[str]) -> None:
    """Refuse hyperparameters that a prior does not have."""
    known = prior.hyperparameters
    for name in names:
        if name not in known:
            listed = ", ".join(map(repr, known)) or "none"
            raise OptionError(f"{type(prior).__name__} has no hyperparameter {name!r}. It has: {listed}.")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.double(), other.to(one.device).double())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, (Tensor, np.ndarray)) or isinstance(other, (Tensor, np.ndarray)):
        return False
    return one is other or bool(one == other)


def rounding(bends: Tensor, slopes: Tensor) -> Tensor:  # (...), (P,) -> ()
    """Return up to which size differences between second derivatives mean nothing.

    Where all of these vanish, as those of |w|, they are nothing but rounding. Squares of slopes have the same unit.
    """
    largest = [t.detach().abs().nan_to_num(0.0).max() for t in (bends, slopes)]
    return _CLOSE * largest[0] + _VANISHING * largest[1].square()


def slope(value: Tensor, weights: Tensor, keep: bool) -> Tensor:
    """Return the derivative, or zero if `value` does not depend on the weights. `keep` keeps its graph."""
    if not value.requires_grad:
        return torch.zeros_like(weights)
    return torch.autograd.grad(value, weights, create_graph=keep, allow_unused=True, materialize_grads=True)[0]


def diagonal_of(form: Form, size: int) -> Tensor:  # (p,)
    """Return the diagonal of a precision."""
    if isinstance(form, Kronecker):
        return form.diagonal()
    return form.diagonal() if form.dim() == 2 else form.reshape(-1).expand(size)


def shown_values(value: Tensor) -> str:
    """Return a short description of a hyperparameter's values."""
    value = value.detach()
    if value.numel() == 1:
        return f"{float(value):.4g}"
    return f"<{value.numel()} values in [{float(value.min()):.3g}, {float(value.max()):.3g}]>"


def clipped_values(values: Tensor) -> tuple[Tensor, Clipped]:  # (p,)
    """Set negative second derivatives to zero. Return them with the number that was negative."""
    found = values.detach()
    below = found < 0
    if not below.any():
        return values, Clipped()
    return values.clamp(min=0), Clipped(int(below.sum()), float(found.min() / found.abs().max()))


def clipped_matrix(matrix: Tensor) -> tuple[Tensor, Clipped]:  # (p, p)
    """Return the nearest positive semi-definite matrix, and how many eigenvalues were negative.

    Derivatives treat the eigenvectors as fixed, because those of equal eigenvalues have no derivative.
    """
    values, vectors = torch.linalg.eigh(matrix.detach())
    largest = float(values.abs().max())
    below = values < -1e-12 * largest
    if not below.any():
        return matrix, Clipped()
    kept = vectors[:, ~below]
    return kept @ (kept.T @ matrix @ kept) @ kept.T, Clipped(int(below.sum()), float(values.min()) / largest)
