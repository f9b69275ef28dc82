"""What a prior is: any log-density of the weights that is twice differentiable.

The posterior takes its curvature -d2 log p at the weights as a part of the precision; the evidence takes log p itself:

    log Z = (1/T) log p(D given theta) + log p(theta) + P/2 log 2 pi - 1/2 log det(s H + D),    D = -d2 log p(theta)

which for a Gaussian prior is the usual formula. Where D has negative eigenvalues (the tails of a Student-t), they are
set to zero: the nearest positive semi-definite D.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor

from laplace.errors import OptionError, UnsupportedError
from laplace.linalg.kronecker import Kronecker
from laplace.linalg.symmetric import Clipped
from laplace.structures import taking
from laplace.weights.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

    from laplace.structures.base import Curvature

Form = Tensor | Kronecker
"""The precision of one tensor: a scalar (), a value per weight (p,), a matrix (p, p), or a Kronecker product."""

_WORDS = {
    "diag": "a precision per weight",
    "dense": "a dense precision per tensor",
    "kron": "a Kronecker precision per tensor",
    "whole": "a dense precision of all weights together",
}


class Data(Protocol):
    """What a prior may ask of the data that it is updated with."""

    @property
    def curvature(self) -> Curvature:
        """H at unit noise, factorised."""
        ...


class Prior(ABC):
    """A log-density over the uncertain weights. Immutable: other hyperparameters make another prior.

    Attributes:
        name: what files call it.
        quadratic: whether log p is quadratic, so that the precision is the same everywhere (a Gaussian).
        unrestricted: the hyperparameters that may be any real number; all others are positive.
    """

    name: str = ""
    quadratic: bool = False
    unrestricted: tuple[str, ...] = ()

    @property
    @abstractmethod
    def hyperparameters(self) -> dict[str, Tensor]:
        """The hyperparameters by name: one number, or one per parameter tensor."""

    @property
    def described(self) -> str:
        """What files and checkpoints compare it by."""
        return self.name

    @property
    def tuned(self) -> tuple[str, ...]:
        """The hyperparameters that `la.tune()` sets if it is not told which."""
        return tuple(self.hyperparameters)

    @abstractmethod
    def with_hyperparameters(self, **values: Tensor | float) -> Self:
        """Return the same prior with other values of these hyperparameters.

        Args:
            **values: by name; a value that requires grad keeps its graph.

        Raises:
            OptionError: the name is unknown, or a value is outside its range.
        """

    def grouped(self, names: Sequence[str], groups: str, layout: Layout) -> Self:
        """Return the same prior with as many values of the named hyperparameters as a `prior_structure` asks for.

        'scalar' keeps them as they are, 'layerwise' makes one per tensor of each.
        """
        return self

    @abstractmethod
    def log_density(self, theta: Tensor, layout: Layout) -> Tensor:  # (P,) -> ()
        """Return log p(theta), normalised, in float64; differentiable in the weights and the hyperparameters."""

    @abstractmethod
    def precision_at(self, theta: Tensor, layout: Layout) -> tuple[Sequence[Form], Clipped]:
        """Return D = -d2 log p at the weights (P,), tensor by tensor, and what of it was below zero.

        Differentiable in the hyperparameters. One matrix (P, P) instead where tensors depend on each other.
        """

    def penalty(self, theta: Tensor, layout: Layout) -> Tensor:  # (P,) -> ()
        """Return -log p(theta) up to a constant: what training adds to its loss."""
        return -self.log_density(theta, layout)

    def diagonal(self, layout: Layout, theta: Tensor) -> Tensor:  # (P,)
        """Return the diagonal of D."""
        return torch.cat([diagonal_of(d, size) for d, size in self._sized(layout, theta)])

    @abstractmethod
    def check(self, layout: Layout, takes: Sequence[str] = ("diag",)) -> None:
        """Refuse lengths that the layout has no meaning for, and forms that the structure cannot take.

        Args:
            layout: of the uncertain weights.
            takes: the forms of a precision that the structure takes, `Structure.takes`.
        """

    def require_structure(self, takes: Sequence[str]) -> None:
        """Refuse a structure that cannot take the prior whatever the weights are; the rest is for `check`.

        Args:
            takes: as of `check`.
        """
        return

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that it is made of."""
        return tuple(self.hyperparameters.values())

    @property
    def needs_grad(self) -> bool:
        """Whether a value requires grad."""
        return any(tensor.requires_grad for tensor in self.tensors)

    @abstractmethod
    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same prior with each of its tensors changed."""

    def detached(self) -> Self:
        """Return the same without the graph of its values."""
        return self.mapped(Tensor.detach)

    def to(self, device: torch.device | str) -> Self:
        """Return the same prior on `device`."""
        return self.mapped(lambda tensor: tensor.to(device))

    def with_mean(self, mean: Tensor | float) -> Self:
        """Return the same prior around another mean."""
        raise UnsupportedError(f"{self} has no mean to set. Give another prior: la.prior = ...")

    @property
    def curved(self) -> bool:
        """Whether the prior adds a curvature of its own to that of the data."""
        return False

    def joined(self, data: Data, scale: Tensor) -> tuple[Curvature, Tensor]:
        """Return the curvature of the posterior beside D, factorised, and the scale that multiplies it."""
        return data.curvature, scale

    def scatter(self, theta: Tensor, layout: Layout) -> Tensor:
        """Return (theta - mu0)^T D (theta - mu0) of a Gaussian prior."""
        self._refuse("scatter")

    def logdet(self, layout: Layout, like: Tensor) -> Tensor:
        """Return log det D of a Gaussian prior."""
        self._refuse("log_det_prior_precision")

    def state(self, layout: Layout) -> dict[str, Any]:
        """Return what files keep of it: numbers, words and tensors, tensor by tensor in the order of the layout."""
        return {"kind": self.name, **{key: value.detach().clone() for key, value in self.hyperparameters.items()}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], layout: Layout) -> Prior:
        """Return the prior that `state` describes.

        Raises:
            OptionError: values that it cannot have.
        """
        return cls(**{key: value for key, value in state.items() if key != "kind"})

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={shown_values(value)}" for key, value in self.hyperparameters.items())
        return f"{type(self).__name__}({values})"

    def _sized(self, layout: Layout, theta: Tensor) -> list[tuple[Form, int]]:
        forms = self.precision_at(theta, layout)[0]
        sizes = layout.sizes if len(forms) == len(layout.names) else [layout.n_params]
        return list(zip(forms, sizes, strict=True))

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"{what} is of a Gaussian prior, and this is {self}. There is: la.log_prior, la.prior_precision_diag, "
            "la.log_det_posterior_precision and la.log_marginal_likelihood()."
        )


def require_form(prior: Prior, form: str, takes: Sequence[str]) -> None:
    """Refuse a form of the precision that the structure cannot take, with the structures that can."""
    if form not in takes:
        undamped = " without damping=" if form == "kron" else ""
        raise UnsupportedError(
            f"{prior} has {_WORDS[form]}, for which this hessian_structure has no form. Take "
            f"hessian_structure={taking(form)}{undamped}."
        )


def require_known(prior: Prior, names: Sequence[str]) -> None:
    """Refuse hyperparameters that a prior does not have."""
    known = prior.hyperparameters
    for name in names:
        if name not in known:
            listed = ", ".join(map(repr, known)) or "none"
            raise OptionError(f"{type(prior).__name__} has no hyperparameter {name!r}. It has: {listed}.")


def diagonal_of(form: Form, size: int) -> Tensor:  # (p,)
    """Return the diagonal of a precision."""
    if isinstance(form, Kronecker):
        return form.diagonal()
    return form.diagonal() if form.dim() == 2 else form.reshape(-1).expand(size)


def shown_values(value: Tensor) -> str:
    """A hyperparameter in a few words."""
    value = value.detach()
    if value.numel() == 1:
        return f"{float(value):.4g}"
    return f"<{value.numel()} values in [{float(value.min()):.3g}, {float(value.max()):.3g}]>"


def clipped_values(values: Tensor) -> tuple[Tensor, Clipped]:  # (p,)
    """Return second derivatives with those below zero set to it, and how many these were."""
    found = values.detach()
    below = found < 0
    if not below.any():
        return values, Clipped()
    return values.clamp(min=0), Clipped(int(below.sum()), float(found.min() / found.abs().max()))


def clipped_matrix(matrix: Tensor) -> tuple[Tensor, Clipped]:  # (p, p)
    """Return the nearest positive semi-definite matrix, and how many eigenvalues were below zero.

    Its derivatives are those at fixed eigenvectors, which equal eigenvalues have no others of.
    """
    values, vectors = torch.linalg.eigh(matrix.detach())
    largest = float(values.abs().max())
    below = values < -1e-12 * largest
    if not below.any():
        return matrix, Clipped()
    kept = vectors[:, ~below]
    return kept @ (kept.T @ matrix @ kept) @ kept.T, Clipped(int(below.sum()), float(values.min()) / largest)
