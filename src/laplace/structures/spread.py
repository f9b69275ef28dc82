"""Keep the blocks of different layers on different processes: H is block-diagonal, so a block can stay with its rank.

    log det(s H + D)  = sum over ranks of that of their own blocks
    J Sigma J^T       = sum over ranks of J_b Sigma_b J_b^T

So evidence, traces and output variances are sums of one number, or one small tensor, per rank. Whoever asks for them
needs all ranks at the same time (`distributed/together.py`). A matrix over all weights is never put together.

Gradients by the prior precision and the noise: what goes into the blocks is the identity forwards and a sum over ranks
backwards, what comes out a sum forwards and the identity backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from laplace.backprop.gradients import Jacobian, JacobianOf, Moments, MomentsOf
from laplace.distributed.ranks import Ranks
from laplace.distributed.together import ranks_together
from laplace.errors import InputError, UnsupportedError
from laplace.linalg.symmetric import Clipped
from laplace.structures.base import Kept, Structure, Sums
from laplace.structures.blockdiag import BlockCurvature, BlockDiagonal, BlockDiagonalGaussian
from laplace.structures.dealing import dealt
from laplace.structures.gaussian import Curvature, Gaussian, Traces
from laplace.weights.layout import Layout


@dataclass(frozen=True)
class Owners:
    """Says which rank keeps the sums of which tensor.

    Attributes:
        of: the rank of each tensor, in the order of the layout.
        rank: the number of this process.
        size: how many processes there are.
        kept: what is kept of each tensor, wherever it is.
    """

    of: tuple[int, ...]
    rank: int
    size: int
    kept: tuple[Kept, ...] = field(default=(), compare=False)

    @property
    def mine(self) -> list[int]:
        """Return the tensors of this rank."""
        return [i for i, owner in enumerate(self.of) if owner == self.rank]

    def state(self) -> dict[str, Any]:
        """Return what a file of this rank's part says."""
        kept = [[each.form, each.bytes, each.own] for each in self.kept]
        return {"of": list(self.of), "rank": self.rank, "size": self.size, "kept": kept}

    @classmethod
    def from_state(cls, state: Any, tensors: int) -> Owners:
        """Return the owners that a file tells. Raises InputError for a damaged one."""
        damaged = InputError("the state is damaged: it does not say which rank has which tensor.")
        try:
            kept = tuple(Kept(str(form), int(size), bool(own)) for form, size, own in state["kept"])
            made = cls(tuple(map(int, state["of"])), int(state["rank"]), int(state["size"]), kept)
        except (KeyError, TypeError, ValueError) as error:
            raise damaged from error
        if not (
            len(made.of) == len(kept) == tensors and all(0 <= owner < made.size for owner in (*made.of, made.rank))
        ):
            raise damaged
        return made

    def refuse(self, what: str, instead: str) -> UnsupportedError:
        """Return the error of something that needs all factors on one process."""
        return UnsupportedError(
            f"{what} needs all factors in one place, and those of this posterior stay on {self.size} ranks "
            f"(shard_factors=True). {instead}"
        )

    def together(self) -> Ranks:
        """Return the ranks that ask together. Refuse a rank that asks alone."""
        ranks = ranks_together()
        if ranks is None:
            raise UnsupportedError(
                f"the factors of this posterior stay on {self.size} ranks (shard_factors=True); this one has those of "
                f"{len(self.mine)} of {len(self.of)} tensors. All ranks must ask together: la.predict(x, group=...), "
                "la.tune(method='evidence', group=...), or `with laplace.distributed.together(group):` around any "
                "other call, with the group of fit, as torch.distributed.group.WORLD."
            )
        if ranks.size != self.size or ranks.rank != self.rank:
            raise UnsupportedError(
                f"the factors of this posterior stay on {self.size} ranks, of which this was number {self.rank}; in "
                f"group= it is number {ranks.rank} of {ranks.size}. Give the group of fit."
            )
        return ranks


def layers_of(names: Sequence[str]) -> list[list[int]]:
    """Return the tensors of each layer: a weight and its bias have the same factor B, which is decomposed once."""
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        found.setdefault(name.rpartition(".")[0], []).append(i)
    return list(found.values())


def dealt_by_layer(structure: BlockDiagonal, moments: Moments, layout: Layout, itemsize: int, size: int) -> list[int]:
    """Return the rank of each tensor: the largest layer first, each to the rank that keeps the least."""
    layers = layers_of(layout.names)
    costs = [float(sum(structure.block_bytes(moments.parameters[i], itemsize) for i in layer)) for layer in layers]
    owners = [0] * len(layout.names)
    for layer, owner in zip(layers, dealt(costs, size), strict=True):
        for i in layer:
            owners[i] = owner
    return owners


def most_on_one_rank(structure: BlockDiagonal, moments: Moments, layout: Layout, itemsize: int, size: int) -> int:
    """Return the bytes of the rank that keeps the most, with the largest layer beside its own, which is on its way."""
    needs = [structure.block_bytes(m, itemsize) for m in moments.parameters]
    if size == 1:
        return sum(needs)
    owners = dealt_by_layer(structure, moments, layout, itemsize, size)
    own = [sum(n for n, owner in zip(needs, owners, strict=True) if owner == rank) for rank in range(size)]
    return max(own) + max(sum(needs[i] for i in layer) for layer in layers_of(layout.names))


@dataclass(frozen=True)
class SomeMoments:
    """Holds the moments of some tensors, as a block-diagonal structure reads them."""

    parameters: Sequence[MomentsOf]

    @classmethod
    def of(cls, moments: Moments, indices: Sequence[int]) -> Moments:
        """Return the moments of the tensors at these indices."""
        return cast("Moments", cls([moments.parameters[i] for i in indices]))


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
        own = self.own.gaussian(scale, [precision[i] for i in self.owners.mine])
        return SpreadGaussian(own, self.layout, self.owners, self.like, tie)

    def matrix(self) -> Tensor:
        raise self.owners.refuse("la.H", "Fit without shard_factors=True.")

    def sweep(self, jacobian: Jacobian, gaussians: Sequence[Gaussian]) -> Iterator[Tensor]:
        own = [gaussian.own for gaussian in gaussians if isinstance(gaussian, SpreadGaussian)]
        part, mine = _of_own(jacobian, self.owners), bool(self.owners.mine)
        found = torch.stack([*self.own.sweep(part, own)]) if mine else None  # (G, N, C)
        yield from _total(found, self.owners, self.like)


class SpreadGaussian(Gaussian):
    """Holds the independent Gaussians of this rank's tensors, and asks the others for theirs."""

    def __init__(
        self, own: BlockDiagonalGaussian, layout: Layout, owners: Owners, like: Tensor, tie: Tensor | None = None
    ) -> None:
        self.own, self.layout, self.owners, self.like = own, layout, owners, like
        self._tie = tie  # 0, with a graph that leads to the prior precision and the noise

    def logdet(self) -> Tensor:
        own = self.own.logdet() if self.owners.mine else self.like.new_zeros((), dtype=torch.float64)
        if self._tie is None:
            return self._sum(own.detach())
        return cast("Tensor", _Out.apply(own + self._tie, self))

    def color(self, eps: Tensor) -> Tensor:  # (S, P) -> (S, P)
        return self._placed(self.own.color(self._own_part(eps)) if self.owners.mine else None, eps)

    def marginal_variances(self) -> Tensor:
        return self._placed(self.own.marginal_variances() if self.owners.mine else None, self.like)

    def quadratic(self, vector: Tensor) -> Tensor:
        return self._sum(self.own.quadratic(self._own_part(vector)) if self.owners.mine else None)

    def precision_matrix(self) -> Tensor:
        raise self.owners.refuse(
            "the posterior precision as a matrix", "la.posterior_variance is its inverse's diagonal."
        )

    def covariance_matrix(self) -> Tensor:
        raise self.owners.refuse("the posterior covariance as a matrix", "la.posterior_variance is its diagonal.")

    def variance(self, jacobian: Jacobian) -> Tensor:
        return self._sum(self.own.variance(_of_own(jacobian, self.owners)) if self.owners.mine else None)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        return self._sum(self.own.covariance(_of_own(jacobian, self.owners)) if self.owners.mine else None)

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:
        return self._sum(self.own.product(_of_own(jacobian, self.owners), v) if self.owners.mine else None)

    def joint(self, jacobian: Jacobian) -> Tensor:
        return self._sum(self.own.joint(_of_own(jacobian, self.owners)) if self.owners.mine else None)

    def dense_variance(self, jacobians: Tensor) -> Tensor:
        return self._sum(self.own.dense_variance(self._own_part(jacobians)) if self.owners.mine else None)

    def traces(self, groups: str) -> Traces:
        own = self.own.traces(groups) if self.owners.mine else None
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

    def _sum(self, own: Tensor | None) -> Tensor:
        """Return the sum over ranks."""
        return _total(own, self.owners, self.like)


def _of_own(jacobian: Jacobian, owners: Owners) -> Jacobian:
    """Return the Jacobian of this rank's tensors."""
    return cast("Jacobian", _SomeJacobian([jacobian.parameters[i] for i in owners.mine]))


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
