"""Kronecker eigenbasis with eigenvalues of its own: H = (Q_B (x) Q_A) diag(E) (Q_B (x) Q_A)^T.

Q_A and Q_B are those of `kron`; a second run over the data finds E[o, i] = sum over examples and vectors of
(Q_B^T G Q_A)[o, i]^2, the exact block's diagonal in that basis: its trace, and the nearest block to it of this form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.backprop.gradients import Moments, MomentsOf
from laplace.structures.base import Contribution, Pass, Sums
from laplace.structures.block import Block
from laplace.structures.blockdiag import Eigh, by_tensor
from laplace.structures.kron import EigenbasisBlock, Kron, KronBlock
from laplace.weights.layout import Layout

_APART = 1e-8  # of the largest diagonal entry


class Ekfac(Kron):
    """The eigenbasis of kron, with exact variances along it; dense or diagonal where kron is."""

    name = "ekfac"
    options = ("weight_sharing",)
    passes = 2

    def __init__(self, weight_sharing: str = "expand") -> None:
        super().__init__(weight_sharing=weight_sharing)

    def further(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> Pass | None:
        eigh, shapes = Eigh(dtype), dict(zip(layout.names, layout.shapes, strict=True))
        parts = {name: part for name, part in by_tensor(sums, layout).items() if "B" in part}
        parts = {name: part | {key: _told_apart(part[key]) for key in "AB"} for name, part in parts.items()}
        bases = {name: KronBlock(part, shapes[name], False, eigh) for name, part in parts.items()}
        return self.rotated(bases) if bases else None

    def rotated(self, bases: dict[str, KronBlock]) -> Rotated:
        """The run over the data in these bases."""
        return Rotated(bases)

    def block_work(self, moments: MomentsOf, vectors: int) -> tuple[float, float]:
        each, once = super().block_work(moments, vectors)
        if moments.form == "dense":
            return each, once
        groups, o, i = moments.factors
        p, t = moments.weights, moments.positions
        rotated = p + groups * (i * i + vectors * o * o) if t == 1 else vectors * p * (t + min(t, i) + min(t, o))
        return each + rotated, once

    def block_bytes(self, moments: MomentsOf, itemsize: int) -> int:
        more = 0 if moments.form == "dense" else 3 * itemsize * moments.weights
        return super().block_bytes(moments, itemsize) + more

    def block(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> Block:
        return EkfacBlock(sums, shape, eigh) if "E" in sums else super().block(sums, shape, eigh)


class Rotated(Pass):
    """Squared gradients in the bases of some tensors; the bases stay in the sums, since eigh differs elsewhere."""

    def __init__(self, bases: dict[str, KronBlock]) -> None:
        self.bases = bases

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        named = dict(zip(layout.names, moments.parameters, strict=True))
        found = {name: self.block_sums(named[name], block) for name, block in self.bases.items()}
        return {f"{name}/{key}": value for name, part in found.items() for key, value in part.items()}

    def finish(self, before: Sums, found: Sums) -> Sums:
        others = {key: value for key, value in before.items() if key.rpartition("/")[0] not in self.bases}
        for name, block in self.bases.items():
            own = {key.rpartition("/")[2]: found[key] for key in found if key.rpartition("/")[0] == name}
            others |= {f"{name}/{key}": value for key, value in self.kept(name, own, block).items()}
        return others

    def block_sums(self, moments: MomentsOf, block: KronBlock) -> Contribution:
        """What one batch adds to one tensor's sums."""
        assert block.left is not None
        return {"E": moments.squares_in(block.left, block.right)}

    def kept(self, name: str, found: Sums, block: KronBlock) -> Sums:
        """What stays of one tensor's sums and bases."""
        assert block.left is not None
        return {"left": block.left.vectors, "right": block.right.vectors, **found}


class EkfacBlock(EigenbasisBlock):
    """Bases and eigenvalues of one parameter tensor."""

    def __init__(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> None:
        self.shape = shape
        self.left, self.right = eigh.found(sums["left"]), eigh.found(sums["right"])
        self.e = sums["E"].to(eigh.dtype)  # (Gr, O, I)

    def eigenvalues(self, scale: Tensor, delta: Tensor) -> Tensor:
        return scale * self.e + delta


def _told_apart(factor: Tensor) -> Tensor:  # (Gr, D, D)
    """A factor whose equal eigenvalues are no longer equal: rounding would choose their eigenvectors, and so E."""
    places = torch.arange(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    uneven = (places * 0.6180339887) % 1  # no symmetry of a factor is one of these numbers
    largest = factor.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    apart = max(_APART, 4 * torch.finfo(factor.dtype).eps)
    return factor + apart * (largest * uneven).diag_embed()
