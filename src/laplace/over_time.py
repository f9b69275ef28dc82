"""Learning over time: posteriors of two sets of data add, can be taken apart again, and are the next task's prior."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laplace.checkpoints.state import options_of
from laplace.curved_prior import CurvedPrior
from laplace.errors import InputError, NumericalError, UnsupportedError
from laplace.posterior import Fit, Posterior, added
from laplace.precision import plainly
from laplace.replica import unwrap
from laplace.structures import Sums, adding

if TYPE_CHECKING:
    from typing_extensions import Self

    from laplace.laplace import Laplace


class OverTime(ABC):
    """The side of `Laplace` that more than one posterior has a part in."""

    @property
    @abstractmethod
    def posterior(self) -> Posterior:
        """The posterior at the current prior, noise and temperature; an error before fit."""

    @plainly
    def as_prior(self) -> CurvedPrior:
        """This posterior as the prior of the next task: at these weights, with the curvature of all tasks so far.

        The prior precision stays apart from the curvature, and can be tuned on each task.

        Raises:
            NotFittedError: before `fit`.
            UnsupportedError: a structure whose sums do not add.
        """
        return CurvedPrior.after(self.posterior)

    @plainly
    def __add__(self, other: Any) -> Self:
        """The posterior of the data of both, with the prior, noise and temperature of the left one.

        Args:
            other: a posterior of the same network and options, fitted on other data.

        Raises:
            InputError: posteriors that differ in more than their data; it says in what.
            UnsupportedError: a structure whose sums do not add.
        """
        if not isinstance(other, OverTime):
            return NotImplemented
        _require_the_same(self, other, "+")  # type: ignore[arg-type]
        return self._with(self.posterior.fit.plus(other.posterior.fit))

    @plainly
    def __sub__(self, other: Any) -> Self:
        """The posterior without the data of the right one.

        Args:
            other: a posterior of some of the data.

        Raises:
            InputError: posteriors that differ in more than their data, or more data than there is.
            UnsupportedError: a structure whose sums do not add.
            NumericalError: a precision that would not be positive definite.
        """
        if not isinstance(other, OverTime):
            return NotImplemented
        _require_the_same(self, other, "-")  # type: ignore[arg-type]
        fit = without(self.posterior.fit, other.posterior.fit)
        try:
            _ = replace(self.posterior, fit=fit).gaussian.logdet()
        except NumericalError as error:
            raise NumericalError(
                "a - b: the precision would not be positive definite, so that not all of what is taken out was in. Fit "
                f"b on data that a has seen. ({error})"
            ) from error
        return self._with(fit)

    def __radd__(self, other: Any) -> Self:
        """sum([a, b, c]), which begins with 0."""
        if not (isinstance(other, int) and other == 0):
            return NotImplemented
        return self._with(self.posterior.fit)

    def _with(self, fit: Fit) -> Self:
        out = copy.copy(self)
        same = {"_snapshot": vars(self)["_snapshot"]}  # which a copy elsewhere forgets; this has the same network
        vars(out).update(same, structure=fit.structure, _fitted=fit, _cached=None, _warned=set())
        return out


def without(whole: Fit, part: Fit) -> Fit:
    """The sums with those of some of the data taken out of them."""
    if part.n_data >= whole.n_data:
        raise InputError(f"{part.n_data} examples cannot be taken out of {whole.n_data}: none would be left.")
    minus = {key: -value for key, value in part.sums.items()}, {key: -value for key, value in part.data.items()}
    sums, data = added(whole.sums, minus[0]), added(whole.data, minus[1])
    tolerance = torch.finfo(whole.mean.dtype).eps ** 0.5
    structure = whole.structure if _semidefinite(sums, tolerance) else whole.structure.indefinite()
    return replace(whole, structure=structure, sums=sums, data=data, n_data=whole.n_data - part.n_data)


def _semidefinite(sums: Sums, tolerance: float) -> bool:
    """Whether no sum has negative eigenvalues but for rounding."""
    spectra = [torch.linalg.eigvalsh(v) if v.dim() > 1 and v.shape[-1] == v.shape[-2] else v for v in sums.values()]
    return all(float(values.min()) >= -tolerance * float(values.abs().max()) for values in spectra)


def _require_the_same(left: Laplace, right: Laplace, sign: str) -> None:
    """Refuse posteriors of different kinds, with what differs."""
    a, b = left.posterior.fit, right.posterior.fit
    if not a.structure.adds:
        raise UnsupportedError(
            f"a {sign} b: what {a.structure.name!r} keeps depends on all data, so that it is no sum over shards. Fit "
            f"it on all data at once, or take {adding()}, whose sums add."
        )
    theirs = options_of(right)
    pairs = {key.replace("_", " "): (value, theirs[key]) for key, value in options_of(left).items()}
    pairs |= {
        "uncertain weights": (dict(zip(a.layout.names, a.layout.shapes, strict=True)),
                              dict(zip(b.layout.names, b.layout.shapes, strict=True))),
        "number of outputs": (a.n_outputs, b.n_outputs),
        "dtype": (a.mean.dtype, b.mean.dtype),
        "tasks before": tuple(x.prior.n_data if isinstance(x.prior, CurvedPrior) else 0 for x in (left, right)),
    }  # fmt: skip
    differ = [f"{what} ({x} and {y})" for what, (x, y) in pairs.items() if x != y]
    if not differ and not (torch.equal(a.mean, b.mean.to(a.mean)) and _equal(left.model, right.model)):
        differ = ["the weights of the network"]
    if differ:
        raise InputError(
            f"a {sign} b needs posteriors of one network that differ in their data alone. Here differ: "
            f"{'; '.join(differ)}. Fit both at the same weights with the same options."
        )


def _equal(left: nn.Module, right: nn.Module) -> bool:
    """Whether two networks hold the same values."""
    if left is right:
        return True
    a, b = (unwrap(model).state_dict() for model in (left, right))
    tensors = (key for key, value in a.items() if isinstance(value, Tensor))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key].to(a[key])) for key in tensors)
