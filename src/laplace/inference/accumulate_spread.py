"""Fit on many processes so that each keeps the sums of its own layers alone (`shard_factors=True`).

What a batch adds to the sums of a layer is made, sent to the rank that keeps the layer, and dropped. So a rank has its
own sums and those of one layer of one batch. Ranks do not run in step: whoever has a batch asks all others to take part
in the sum (`Ranks.ask`), and those without data do so until everyone is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laplace.backprop.gradients import Moments, is_absent
from laplace.budget import in_bytes
from laplace.curvature import GGN
from laplace.distributed.buckets import add_up
from laplace.distributed.ranks import Form, Ranks, agreed
from laplace.errors import UnsupportedError
from laplace.inference.accumulate import Accumulator, add_to
from laplace.linalg.symmetric import GramRows, GramSum
from laplace.network.batches import Inputs
from laplace.posterior.posterior import Fit
from laplace.structures import Structure, Sums
from laplace.structures.blockdiag import BlockDiagonal
from laplace.structures.spread import Owners, SomeMoments, dealt_by_layer, layers_of

_SERVICE = "sums of a layer"


def require_spreadable(structure: Structure, checkpoint: bool) -> None:
    """Refuse structures whose sums cannot stay on their ranks, and files of an unfinished fit."""
    if not isinstance(structure, BlockDiagonal) or structure.passes > 1 or getattr(structure, "damping", False):
        why = (
            "splits the prior over the factors (damping)"
            if getattr(structure, "damping", False)
            else "reads the data a second time in bases that every rank would need"
            if isinstance(structure, BlockDiagonal)
            else "keeps one matrix for all weights"
        )
        raise UnsupportedError(
            f"shard_factors=True keeps the factors of each layer on one rank, and hessian_structure={structure.name!r} "
            f"{why}. Take 'kron', 'block' or 'diag', or leave out shard_factors=True."
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
        self.reduce.services[_SERVICE] = self._add_together

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
            if used:
                self._send(self.owners.of[used[0]], self._contribution(moments, used))
                self._sent |= {self.layout.names[i] for i in used}

    def _contribution(self, moments: Moments, indices: Sequence[int]) -> Sums:
        """Return what a batch adds to the sums of some tensors."""
        if not indices:
            return {}
        part = self.pass_.sums(SomeMoments.of(moments, indices), self.layout.only(indices))
        return {key: _tensor(value, self._like) for key, value in part.items()}

    def _send(self, owner: int, sums: Sums) -> None:
        """Add sums to those of a rank."""
        self._sending = sums
        forms = {key: (tuple(value.shape), value.dtype) for key, value in sums.items()}
        self.reduce.ask(_SERVICE, (owner, *sorted(sums)), forms)
        self._sending = {}

    def _add_together(self, key: tuple[Any, ...], forms: list[dict[str, Form] | None]) -> None:
        """Take part in the sum of one layer over the ranks that have a batch of it. Its owner keeps the result."""
        own = self._sending if forms[self.reduce.rank] is not None else {}
        shapes = agreed([{} if each is None else each for each in forms])
        total = add_up(own, shapes, self._like.device, self.reduce.device, self.reduce.group, to=key[0])
        if key[0] == self.reduce.rank:
            add_to(self.sums, total)

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


def _tensor(value: Tensor | GramRows | float, like: Tensor) -> Tensor:
    """Return a contribution as the tensor that is added to the sums."""
    if isinstance(value, GramRows):
        gram = GramSum()
        gram.add(value.rows)
        return gram.flush().unsqueeze(0)
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device=like.device)
