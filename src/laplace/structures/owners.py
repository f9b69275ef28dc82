"""Say which process of a group keeps the sums of which layer: the largest first, each to the rank with the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from laplace.backprop.gradients import Moments, MomentsOf
from laplace.distributed.ranks import Ranks
from laplace.distributed.together import ranks_together
from laplace.errors import InputError, UnsupportedError
from laplace.structures.base import Kept
from laplace.structures.blockdiag import BlockDiagonal
from laplace.structures.dealing import dealt
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
