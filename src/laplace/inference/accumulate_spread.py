"""Fit on many processes so that each keeps the sums of its own layers alone (`shard_factors=True`).

What a batch adds to the sums of a layer is made, sent to the rank that keeps the layer, and dropped. So a rank has its
own sums and those of one layer of one batch. Ranks do not run in step: whoever has a batch asks all others to take part
in the sum (`Ranks.ask`), and those without data do so until everyone is done. In a second run over the data, the bases
of a layer are lent out in the same way, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, distributed

from laplace.backprop.covariances import Basis
from laplace.backprop.gradients import Moments, is_absent
from laplace.budget import in_bytes
from laplace.curvature import GGN
from laplace.distributed.buckets import Form, add_up, agreed
from laplace.distributed.ranks import Ranks
from laplace.errors import UnsupportedError
from laplace.inference.accumulate import Accumulator
from laplace.inference.sums import add_to
from laplace.linalg.gram_sums import GramRows
from laplace.linalg.symmetric import gram
from laplace.network.inputs import Inputs
from laplace.posterior.posterior import Fit
from laplace.structures import Pass, Structure, Sums
from laplace.structures.base import Contribution
from laplace.structures.blockdiag import BlockDiagonal
from laplace.structures.ekfac import Ekfac, Rotated
from laplace.structures.kron_block import KronBlock
from laplace.structures.owners import Owners, SomeMoments, dealt_by_layer, layers_of
from laplace.weights.layout import Layout

_SERVICE, _LENDING = "sums of a layer", "bases of a layer"
Sides = tuple[Form | None, ...]  # the forms of the left and the right basis


def require_spreadable(structure: Structure, checkpoint: bool) -> None:
    """Refuse structures whose sums cannot stay on their ranks, and files of an unfinished fit."""
    damped = bool(getattr(structure, "damping", False))
    several = structure.passes > 1 and not isinstance(structure, Ekfac)  # a second run of a kind that we do not know
    if not isinstance(structure, BlockDiagonal) or several or damped:
        why = (
            "splits the prior over the factors (damping). Leave out damping"
            if damped
            else "keeps more than a block per tensor. Take 'kron', 'ekfac', 'inf', 'block' or 'diag'"
        )
        raise UnsupportedError(
            f"shard_factors=True keeps the factors of each layer on one rank, and hessian_structure={structure.name!r} "
            f"{why}, or leave out shard_factors=True."
        )
    if checkpoint:
        raise UnsupportedError(
            "checkpoint= with shard_factors=True: the sums of a rank hold what the others have sent it, and files of "
            "several ranks would not belong to the same batches. Leave out one of them."
        )


class SpreadAccumulator(Accumulator):
    """Adds up the sums of this rank's layers over the data of all ranks."""

    owners: Owners
    reduce: Ranks

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.structure, BlockDiagonal)
        self.blocks = self.structure
        self._sent: set[str] = set()  # the names of tensors that this rank has sent sums of
        self._sending: Sums = {}
        self.reduce.services |= {_SERVICE: self._add_together, _LENDING: self._lend}
        self._lent: dict[str, Sides] = {}  # the forms of the bases of each tensor, wherever they are
        self._own_bases: dict[str, KronBlock] = {}

    def prepare(self, inputs: Inputs) -> None:
        """Deal the layers out, by the sizes of their sums. All ranks have the same examples and plan."""
        super().prepare(inputs)
        with torch.no_grad():
            forward = self.engine.forward(inputs)
            f = forward.outputs
            moments = next(iter(forward.moments(GGN()(self.likelihood, f, f, None))))
            owners = dealt_by_layer(self.blocks, moments, self.layout, f.element_size(), self.reduce.size)
        self.owners = Owners(tuple(owners), self.reduce.rank, self.reduce.size)

    def fit(self, mean: Tensor) -> Fit:
        fit = super().fit(mean)
        own = self.layout.only(self.owners.mine)
        described = dict(zip(own.names, self.structure.describe(fit.sums, own), strict=True))
        everyones = {name: kept for of_rank in self.reduce.agree(lambda: described) for name, kept in of_rank.items()}
        kept = tuple(
            replace(everyones[name], form=f"{everyones[name].form}, on rank {owner}")
            for name, owner in zip(self.layout.names, self.owners.of, strict=True)
        )
        return replace(fit, owners=replace(self.owners, kept=kept))

    def _add_sums(self, moments: Moments) -> None:
        for layer in layers_of(self.layout.names):
            used = [i for i in layer if not is_absent(moments.parameters[i])]
            unused = [i for i in layer if i not in used]
            self._zeros = {**self._contribution(moments, unused), **self._zeros}
            sums = self._contribution(moments, used)
            if sums:
                self._send(self.owners.of[used[0]], sums)
                self._sent |= {self.layout.names[i] for i in used}

    def _contribution(self, moments: Moments, indices: Sequence[int]) -> Sums:
        """Return what a batch adds to the sums of some tensors."""
        if not indices:
            return {}
        part = self.pass_.sums(SomeMoments.of(moments, indices), self.layout.only(indices))
        return {key: _tensor(value, self._like) for key, value in part.items()}

    def _send(self, owner: int, sums: Sums) -> None:
        """Add sums to those of a rank. What a weight and its bias have in common, B, is sent once."""
        first = {id(value): key for key, value in reversed(sums.items())}
        same = tuple((key, first[id(value)]) for key, value in sums.items() if first[id(value)] != key)
        self._sending = {key: sums[key] for key in first.values()}
        forms = {key: (tuple(value.shape), value.dtype) for key, value in self._sending.items()}
        self.reduce.ask(_SERVICE, (owner, same, *sorted(forms)), forms)
        self._sending = {}

    def _add_together(self, key: tuple[Any, ...], forms: list[dict[str, Form] | None]) -> None:
        """Take part in the sum of one layer over the ranks that have a batch of it. Its owner keeps the result."""
        owner, same, *_ = key
        own = self._sending if forms[self.reduce.rank] is not None else {}
        shapes = agreed([{} if each is None else each for each in forms])
        total = add_up(own, shapes, self._like.device, self.reduce.device, self.reduce.group, to=owner)
        if owner == self.reduce.rank:
            add_to(self.sums, total | {other: total[first] for other, first in same})

    def _further(self) -> Pass | None:
        """Return the next run over the data. Each rank has the bases of its own layers."""
        if not isinstance(self.structure, Ekfac) or isinstance(self.pass_, Borrowed):
            return None
        own = self.structure.further(self.totals, self.layout.only(self.owners.mine), self._like.dtype)
        rotated = own if isinstance(own, Rotated) else self.structure.rotated({})
        self._own_bases = rotated.bases
        forms = {name: tuple(map(_form, (block.left, block.right))) for name, block in rotated.bases.items()}
        self._lent = {name: form for of_rank in self.reduce.agree(lambda: forms) for name, form in of_rank.items()}
        return Borrowed(rotated, self._borrow) if self._lent else None

    def _borrow(self, names: Sequence[str]) -> dict[str, Bases]:
        """Return the bases of some tensors of one layer, from the rank that has them."""
        needed = [name for name in names if name in self._lent]
        owner = self.owners.of[self.layout.names.index(names[0])]
        return self.reduce.ask(_LENDING, (owner, *needed)) if needed else {}

    def _lend(self, key: tuple[Any, ...], _: list[Any]) -> dict[str, Bases]:
        """Take part in sending the bases of a layer to all ranks."""
        owner, *names = key
        source = distributed.get_global_rank(self.reduce.group, owner)

        def sent(basis: Basis | None, form: Form | None) -> Basis | None:
            if form is None:
                return None
            shape, dtype = form
            empty = torch.empty(shape, dtype=dtype, device=self._like.device)
            vectors = empty if basis is None else basis.vectors.contiguous()
            distributed.broadcast(vectors, source, group=self.reduce.group)
            return Basis(vectors) if basis is None else basis

        found = {}
        for name in names:
            block, (left, right) = self._own_bases.get(name), self._lent[name]
            sides = (None, None) if block is None else (block.left, block.right)
            found[name] = Bases(sent(sides[0], left), sent(sides[1], right))
        return found

    def _used(self) -> set[str]:
        return super()._used() | self._sent

    def _start_run(self) -> None:
        super()._start_run()
        self._sent = set()

    def _finished_sums(self, used: set[str]) -> Sums:
        """Return the sums of this rank's tensors; zeros of those that no rank has used."""
        zeros = {key: value for key, value in self._zeros.items() if key.rpartition("/")[0] not in used}
        mine = {self.layout.names[i] for i in self.owners.mine}
        whole = self.reduce.total(zeros, self._like.device)
        return self.sums | {key: value for key, value in whole.items() if key.rpartition("/")[0] in mine}

    def _reduced(self, sums: Sums, data: Sums) -> tuple[Sums, Sums]:
        return sums, self.reduce.total(data, self._like.device)

    def _require_memory(self, moments: Moments, like: Tensor) -> None:
        """Refuse a share of the layers that does not fit into memory, with one more layer on its way."""
        needs = [self.blocks.block_bytes(m, like.element_size()) for m in moments.parameters]
        layers = layers_of(self.layout.names)
        needed = sum(needs[i] for i in self.owners.mine) + max(sum(needs[i] for i in layer) for layer in layers)
        if not self.budget.has(needed, like.device):
            self.budget.refuse(
                needed,
                like.device,
                f"hessian_structure={self.structure.name!r} of {self.layout.only(self.owners.mine).n_params:,} of "
                f"{self.layout.n_params:,} weights on rank {self.reduce.rank}, and the largest layer beside them "
                f"({in_bytes(sum(needs))} on all {self.reduce.size} ranks),",
                "Take more ranks, hessian_structure='diag', or fewer weights.",
            )


@dataclass(frozen=True)
class Bases:
    """Holds the two bases of a tensor's block. None stands for the unit vectors."""

    left: Basis | None
    right: Basis | None


class Borrowed(Pass):
    """Is the second run over the data, whose bases come from the rank that has them.

    Args:
        own: the same with the bases of this rank alone.
        borrow: returns the bases of some tensors of one layer.
    """

    def __init__(self, own: Rotated, borrow: Callable[[Sequence[str]], dict[str, Bases]]) -> None:
        self.own, self.borrow = own, borrow

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        named = dict(zip(layout.names, moments.parameters, strict=True))
        bases = self.borrow([name for name, m in named.items() if not is_absent(m)]) if named else {}
        found = {name: self.own.block_sums(named[name], cast("KronBlock", of)) for name, of in bases.items()}
        return {f"{name}/{key}": value for name, part in found.items() for key, value in part.items()}

    def finish(self, before: Sums, found: Sums) -> Sums:
        return self.own.finish(before, found)


def _form(basis: Basis | None) -> Form | None:
    return None if basis is None else (tuple(basis.vectors.shape), basis.vectors.dtype)


def _tensor(value: Tensor | GramRows | float, like: Tensor) -> Tensor:
    """Return a contribution as the tensor that is added to the sums."""
    if isinstance(value, GramRows):
        return gram(value.rows).unsqueeze(0)
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device=like.device)
