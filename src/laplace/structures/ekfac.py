"""Keep exact variances in the Kronecker eigenbasis: H = (Q_B (x) Q_A) diag(E) (Q_B (x) Q_A)^T.

Q_A and Q_B are the eigenvectors of the factors of `kron`. A second run over the data finds E[o, i] = sum over examples
and vectors of (Q_B^T G Q_A)[o, i]^2, the diagonal of the exact block in that basis. So the trace is exact, and no other
E gives a block that is nearer to the exact one.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from laplace.backprop.gradients import Moments, MomentsOf, is_absent
from laplace.linalg.symmetric import blurred
from laplace.structures.base import Contribution, Forms, Pass, Sums
from laplace.structures.block import Block
from laplace.structures.blockdiag import Eigh, by_tensor
from laplace.structures.dense import DENSE
from laplace.structures.kron import Kron
from laplace.structures.kron_block import EigenbasisBlock, KronBlock
from laplace.weights.layout import Layout

EIGENBASIS = tuple(
    {"E": "goi"} | ({"left": "goo"} if left else {}) | ({"right": "gii"} if right else {})
    for left in (True, False)
    for right in (True, False)
)


class Ekfac(Kron):
    """Keeps the eigenbasis of `kron`, with exact variances along it. Dense or diagonal blocks stay as in `kron`.

    Args:
        weight_sharing: for weights used at many positions: 'expand' or 'reduce'.

    Raises:
        OptionError: a value is unknown.
    """

    name = "ekfac"
    options = ("weight_sharing",)
    precision_forms = ()
    passes = 2
    forms = Forms((*DENSE, *EIGENBASIS))

    def __init__(self, weight_sharing: str = "expand") -> None:
        super().__init__(weight_sharing=weight_sharing)

    def further(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> Pass | None:
        eigh, shapes = Eigh(dtype, ties=True), dict(zip(layout.names, layout.shapes, strict=True))
        parts = {name: part for name, part in by_tensor(sums, layout).items() if "B" in part}
        bases = {name: KronBlock(part, shapes[name], False, eigh) for name, part in parts.items()}
        return self.rotated(bases) if bases else None

    def rotated(self, bases: dict[str, KronBlock]) -> Rotated:
        """Return the second run over the data, in these bases."""
        return Rotated(bases)

    def form(self, own: Sums, whole: Sums) -> str:
        if "E" not in own:
            return super().form(own, whole)
        groups, rows, columns = own["E"].shape
        return f"ekfac {rows} x {columns}" if groups == 1 else f"{groups} groups of ekfac {rows} x {columns}"

    def block_work(self, moments: MomentsOf, vectors: int) -> tuple[float, float]:
        each, once = super().block_work(moments, vectors)
        if moments.form == "dense":
            return each, once
        groups, o, i = moments.factors
        p, t = moments.weights, moments.positions
        o, i = (i, o) if moments.inputs_left else (o, i)
        turned = 0 if moments.diagonal_inputs else i * i
        rotated = p + groups * (turned + vectors * o * o) if t == 1 else vectors * p * (t + min(t, i) + min(t, o))
        return each + rotated, once

    def block_bytes(self, moments: MomentsOf, itemsize: int) -> int:
        more = 0 if moments.form == "dense" else 3 * itemsize * moments.weights
        return super().block_bytes(moments, itemsize) + more

    def block(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> Block:
        return EkfacBlock(sums, shape, eigh) if "E" in sums else super().block(sums, shape, eigh)


class Rotated(Pass):
    """Sums squared gradients in the bases. The sums keep the bases, because eigh differs between machines."""

    def __init__(self, bases: dict[str, KronBlock]) -> None:
        self.bases = bases

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        named = dict(zip(layout.names, moments.parameters, strict=True))
        used = {name: block for name, block in self.bases.items() if not is_absent(named[name])}
        found = {name: self.block_sums(named[name], block) for name, block in used.items()}
        return {f"{name}/{key}": value for name, part in found.items() for key, value in part.items()}

    def finish(self, before: Sums, found: Sums) -> Sums:
        others = {key: value for key, value in before.items() if key.rpartition("/")[0] not in self.bases}
        for name, block in self.bases.items():
            own = {key.rpartition("/")[2]: found[key] for key in found if key.rpartition("/")[0] == name}
            others |= {f"{name}/{key}": value for key, value in self.kept(name, own, block).items()}
        return others

    def block_sums(self, moments: MomentsOf, block: KronBlock) -> Contribution:
        """Return what one batch adds to one tensor's sums."""
        return {"E": moments.squares_in(block.left, block.right)}

    def kept(self, name: str, found: Sums, block: KronBlock) -> Sums:
        """Return the sums and bases of one tensor that are kept."""
        bases = {"left": block.left, "right": block.right}
        return {key: basis.vectors for key, basis in bases.items() if basis is not None} | found


class EkfacBlock(EigenbasisBlock):
    """Holds bases and eigenvalues of one parameter tensor."""

    def __init__(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> None:
        self.shape = shape
        self.left, self.right = (eigh.found(sums[key]) if key in sums else None for key in ("left", "right"))
        self.e = self.like = sums["E"].to(eigh.dtype)  # (Gr, O, I)

    @cached_property
    def blur(self) -> float:  # type: ignore[override]
        """Return the rounding of small eigenvalues: E itself is accurate, but the directions of small ones are not."""
        largest = self.e.max()
        sides = [self.e.amax(2), self.e.amax(1)]  # (Gr, O), (Gr, I)
        return max(blurred(side) for side in sides) * float(largest)

    def eigenvalues(self, scale: Tensor, delta: Tensor) -> Tensor:
        return scale * self.e + delta
