"""Keep the blocks of different layers on different processes: H is block-diagonal, so a block can stay with its rank.

    log det(s H + D)  = sum over ranks of that of their own blocks
    J Sigma J^T       = sum over ranks of J_b Sigma_b J_b^T

So evidence, traces and output variances are sums of one number, or one small tensor, per rank. Whoever asks for them
needs all ranks at the same time (`distributed/together.py`). A matrix over all weights is never put together.

Gradients by the prior precision and the noise: what goes into the blocks is the identity forwards and a sum over ranks
backwards, what comes out a sum forwards and the identity backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from laplace.backprop.gradients import Jacobian, JacobianOf
from laplace.distributed.ranks import Ranks
from laplace.errors import NumericalError, UnsupportedError
from laplace.linalg.symmetric import Clipped
from laplace.structures.base import Structure, Sums
from laplace.structures.blockdiag import BlockCurvature, BlockDiagonalGaussian
from laplace.structures.gaussian import Curvature, Gaussian, Traces
from laplace.structures.owners import Owners
from laplace.weights.layout import Layout

Value = TypeVar("Value")


@dataclass(frozen=True)
class _SomeJacobian:
    """Holds the Jacobian of some tensors, as a block-diagonal Gaussian reads it."""

    parameters: Sequence[JacobianOf]


class SpreadCurvature(Curvature):
    """Holds the blocks of this rank, and asks the others for theirs.

    Args:
        structure: of each rank's blocks.
        sums: of this rank's tensors.
        layout: of all tensors.
        mean: of all weights, (P,); the posterior has its dtype and device.
        owners: which rank has which tensor.
    """

    def __init__(self, structure: Structure, sums: Sums, layout: Layout, mean: Tensor, owners: Owners) -> None:
        own = structure.curvature(sums, layout.only(owners.mine), mean.dtype)
        assert isinstance(own, BlockCurvature)
        self.own, self.layout, self.owners, self.commutes = own, layout, owners, own.commutes
        self.like = mean[:0]

    @property
    def clipped(self) -> Clipped:
        return self.own.clipped

    def gaussian(self, scale: Tensor, precision: Sequence[Any]) -> SpreadGaussian:
        tie = None
        if torch.is_grad_enabled() and any(isinstance(d, Tensor) and d.requires_grad for d in (scale, *precision)):
            scale, precision, tie = _into_blocks(scale, precision, self.owners.together())
        own: BlockDiagonalGaussian | NumericalError
        try:
            own = self.own.gaussian(scale, [precision[i] for i in self.owners.mine])
        except NumericalError as error:  # the others will ask for what it has none of
            own = error
        return SpreadGaussian(own, self.layout, self.owners, self.like, tie)

    def matrix(self) -> Tensor:
        raise self.owners.refuse("la.H", "Fit without shard_factors=True.")

    def sweep(self, jacobian: Jacobian, gaussians: Sequence[Gaussian]) -> Iterator[Tensor]:
        def swept() -> Tensor:  # (G, N, C)
            own = [gaussian.own for gaussian in gaussians if isinstance(gaussian, SpreadGaussian)]
            return torch.stack([*self.own.sweep(_of_own(jacobian, self.owners), own)])

        yield from _total(_made(swept, self.owners), self.owners, self.like)


class SpreadGaussian(Gaussian):
    """Holds the independent Gaussians of this rank's tensors, and asks the others for theirs."""

    def __init__(
        self,
        own: BlockDiagonalGaussian | NumericalError,  # why there is none
        layout: Layout,
        owners: Owners,
        like: Tensor,
        tie: Tensor | None = None,
    ) -> None:
        self._own, self.layout, self.owners, self.like = own, layout, owners, like
        self._tie = tie  # 0, with a graph that leads to the prior precision and the noise

    @property
    def own(self) -> BlockDiagonalGaussian:
        """Return the Gaussian of this rank's tensors."""
        if isinstance(self._own, NumericalError):
            raise self._own
        return self._own

    def logdet(self) -> Tensor:
        own = self._made(lambda: self.own.logdet())
        own = self.like.new_zeros((), dtype=torch.float64) if own is None else own
        if self._tie is None:
            return self._sum(own.detach())
        return cast("Tensor", _Out.apply(own + self._tie, self))

    def color(self, eps: Tensor) -> Tensor:  # (S, P) -> (S, P)
        return self._placed(self._made(lambda: self.own.color(self._own_part(eps))), eps)

    def marginal_variances(self) -> Tensor:
        return self._placed(self._made(lambda: self.own.marginal_variances()), self.like)

    def quadratic(self, vector: Tensor) -> Tensor:
        return self._sum(self._made(lambda: self.own.quadratic(self._own_part(vector))))

    def precision_matrix(self) -> Tensor:
        raise self.owners.refuse(
            "the posterior precision as a matrix", "la.posterior_variance is its inverse's diagonal."
        )

    def covariance_matrix(self) -> Tensor:
        raise self.owners.refuse("the posterior covariance as a matrix", "la.posterior_variance is its diagonal.")

    def variance(self, jacobian: Jacobian) -> Tensor:
        return self._sum(self._made(lambda: self.own.variance(_of_own(jacobian, self.owners))))

    def covariance(self, jacobian: Jacobian) -> Tensor:
        return self._sum(self._made(lambda: self.own.covariance(_of_own(jacobian, self.owners))))

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:
        return self._sum(self._made(lambda: self.own.product(_of_own(jacobian, self.owners), v)))

    def joint(self, jacobian: Jacobian) -> Tensor:
        return self._sum(self._made(lambda: self.own.joint(_of_own(jacobian, self.owners))))

    def dense_variance(self, jacobians: Tensor) -> Tensor:
        return self._sum(self._made(lambda: self.own.dense_variance(self._own_part(jacobians))))

    def traces(self, groups: str) -> Traces:
        own = self._made(lambda: self.own.traces(groups))
        if own is not None and own[1].dim() == 2:
            raise self.owners.refuse(
                "tuning a prior precision for each weight", "Take prior_structure='scalar' or 'layerwise'."
            )
        if groups == "scalar":
            t, m = self._sum(None if own is None else torch.stack([*own])).unbind(0)
            return t, m
        sizes = self.layout.sizes if groups == "diag" else [1] * len(self.layout.names)
        found = [self._placed(None if own is None else each, self.like.double(), sizes) for each in own or (None, None)]
        return found[0], found[1]

    def _own_part(self, vectors: Tensor) -> Tensor:  # (..., P) -> (..., p)
        """Return the entries of this rank's tensors."""
        parts = self.layout.split(vectors)
        return torch.cat([parts[i] for i in self.owners.mine], -1)

    def _placed(self, own: Tensor | None, like: Tensor, sizes: Sequence[int] | None = None) -> Tensor:  # (..., P)
        """Return what all ranks found for their own tensors, in the order of the layout."""
        sizes = self.layout.sizes if sizes is None else sizes
        mine = self.owners.mine
        parts = {} if own is None else dict(zip(mine, own.split([sizes[i] for i in mine], -1), strict=True))
        lead = like.shape[:-1]
        whole = [parts[i] if i in parts else like.new_zeros(*lead, size) for i, size in enumerate(sizes)]
        return self._sum(torch.cat(whole, -1))

    def _made(self, make: Callable[[], Value]) -> Value | None:
        """Return what this rank's tensors give. What one rank cannot compute, all raise."""
        return _made(make, self.owners)

    def _sum(self, own: Tensor | None) -> Tensor:
        """Return the sum over ranks."""
        return _total(own, self.owners, self.like)


def _of_own(jacobian: Jacobian, owners: Owners) -> Jacobian:
    """Return the Jacobian of this rank's tensors."""
    return cast("Jacobian", _SomeJacobian([jacobian.parameters[i] for i in owners.mine]))


def _made(make: Callable[[], Value], owners: Owners) -> Value | None:
    """Return what is made of this rank's tensors, None if it has none.

    A search takes a shorter step after a NumericalError, so that all ranks must raise it where one does.
    """
    found: list[Value] = []

    def attempt() -> str | None:
        try:
            found.extend([make()] if owners.mine else [])
        except NumericalError as error:
            return str(error)
        return None

    if failed := [error for error in owners.together().agree(attempt) if error is not None]:
        raise NumericalError(failed[0])
    return found[0] if found else None


def _total(own: Tensor | None, owners: Owners, like: Tensor) -> Tensor:
    """Return the sum over all ranks. None is of a rank that has no tensor."""
    if own is not None and own.requires_grad:
        raise owners.refuse("a gradient of this", "log_marginal_likelihood() has one. Leave out enable_backprop=True.")
    sums = {} if own is None else {"own": own.clone()}
    return owners.together().total(sums, like.device)["own"]


def _into_blocks(scale: Tensor, precision: Sequence[Any], ranks: Ranks) -> tuple[Tensor, Sequence[Any], Tensor]:
    """Return s and D with gradients that are summed over all ranks, and a zero that is to be added to the evidence.

    The zero makes every rank take part in the backward pass, also one without a block.
    """
    if not all(isinstance(d, Tensor) for d in precision):
        raise UnsupportedError(
            "the evidence of a posterior whose factors stay on their ranks (shard_factors=True) has gradients by prior "
            "precisions that are numbers. Take la.tune(method='evidence', group=...), or a prior without matrices."
        )
    values = [scale, *precision]
    flat = torch.cat([value.reshape(-1).double() for value in values])
    parts = cast("Tensor", _Into.apply(flat, ranks)).split([value.numel() for value in values])
    back = [part.reshape(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]
    return back[0], back[1:], 0 * torch.cat(parts).sum()


class _Into(torch.autograd.Function):
    """Passes values on; sums their gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return ctx.ranks.total({"gradient": gradient.clone()}, gradient.device)["gradient"], None


class _Out(torch.autograd.Function):
    """Sums values over ranks; passes their gradients on."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, gaussian: SpreadGaussian) -> Tensor:
        return gaussian._sum(own.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
