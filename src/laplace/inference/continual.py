"""Continual learning: add posteriors of two data sets, subtract one again, or use one as the next task's prior."""

from __future__ import annotations

from dataclasses import replace

import torch

from laplace.errors import InputError, NumericalError, UnsupportedError
from laplace.inference.source import Fitted
from laplace.linalg.autocast import plainly
from laplace.posterior.posterior import Fit, added
from laplace.posterior.task_prior import CurvedPrior
from laplace.priors.base import Prior
from laplace.structures import Sums, adding


@plainly
def as_prior(la: Fitted) -> CurvedPrior:
    """Return this posterior as the prior of the next task.

    It is centred at these weights, with the curvature of all tasks so far. The prior precision stays separate from the
    curvature, and can be tuned on each task.

    Raises:
        NotFittedError: `fit` was not called yet.
        UnsupportedError: the sums of this structure do not add.
    """
    return CurvedPrior.after(la.posterior)


@plainly
def merged(left: Fitted, right: Fitted) -> Fit:
    """Return the sums over the data of both posteriors. Refuse posteriors that differ in more than their data."""
    _require_the_same(left, right, "+")
    return left.posterior.fit.plus(right.posterior.fit)


@plainly
def subtracted(left: Fitted, right: Fitted) -> Fit:
    """Return the sums without the data of the right posterior.

    Raises:
        InputError: the posteriors differ in more than their data, or the right one has as many examples as the left.
        NumericalError: the precision would not be positive definite.
    """
    _require_the_same(left, right, "-")
    fit = without(left.posterior.fit, right.posterior.fit)
    try:
        _ = replace(left.posterior, fit=fit).gaussian.logdet()
    except NumericalError as error:
        raise NumericalError(
            "a - b: the precision would not be positive definite, so b has seen data that a has not. Fit b on data "
            f"that a has seen. ({error})"
        ) from error
    return fit


def without(whole: Fit, part: Fit) -> Fit:
    """Return the sums of `whole` minus those of `part`."""
    if part.n_data >= whole.n_data:
        raise InputError(
            f"{part.n_data} examples cannot be taken out of {whole.n_data}: none would be left. In a - b, b must have "
            "fewer examples than a."
        )
    minus = {key: -value for key, value in part.sums.items()}, {key: -value for key, value in part.data.items()}
    sums, data = added(whole.sums, minus[0]), added(whole.data, minus[1])
    tolerance = torch.finfo(whole.mean.dtype).eps ** 0.5
    structure = whole.structure if _semidefinite(sums, tolerance) else whole.structure.indefinite()
    return replace(whole, structure=structure, sums=sums, data=data, n_data=whole.n_data - part.n_data)


def _semidefinite(sums: Sums, tolerance: float) -> bool:
    """Return whether no sum has negative eigenvalues, apart from rounding."""
    spectra = [torch.linalg.eigvalsh(v) if v.dim() > 1 and v.shape[-1] == v.shape[-2] else v for v in sums.values()]
    return all(float(values.min()) >= -tolerance * float(values.abs().max()) for values in spectra)


def _require_the_same(left: Fitted, right: Fitted, sign: str) -> None:
    """Refuse posteriors of different kinds, and say what differs."""
    a, b = left.posterior.fit, right.posterior.fit
    if not a.structure.adds:
        raise UnsupportedError(
            f"a {sign} b: the sums of {a.structure.name!r} depend on all data, so that they cannot be added. Fit all "
            f"data at once, or take {adding()}, whose sums add."
        )
    theirs = right.runner.spec.described(b.kind)
    pairs = {key.replace("_", " "): (value, theirs[key]) for key, value in left.runner.spec.described(a.kind).items()}
    pairs |= {
        "uncertain weights": (dict(zip(a.layout.names, a.layout.shapes, strict=True)),
                              dict(zip(b.layout.names, b.layout.shapes, strict=True))),
        "number of outputs": (a.n_outputs, b.n_outputs),
        "dtype": (a.mean.dtype, b.mean.dtype),
        "tasks before": tuple(_n_earlier(x.posterior.prior) for x in (left, right)),
    }  # fmt: skip
    differ = [f"{what} ({x} and {y})" for what, (x, y) in pairs.items() if x != y]
    if not differ and not torch.equal(a.mean, b.mean.to(a.mean)):
        differ = ["the weights of the network"]
    then, there = left.runner.snapshot, right.runner.snapshot  # the networks as they were when fitted
    if not differ and then is not None and there is not None:
        said = then.differs(there)
        differ = [f"the weights of the network ({said})"] if said else []
    if differ:
        raise InputError(
            f"a {sign} b needs posteriors of one network that differ only in their data. These differ in: "
            f"{'; '.join(differ)}. Fit both at the same weights with the same options."
        )


def _n_earlier(prior: Prior) -> int:
    return prior.n_data if isinstance(prior, CurvedPrior) else 0
