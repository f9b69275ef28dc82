"""Keep two Kronecker factors per tensor: H = B (x) A with A = mean of a a^T and B = sum of g g^T.

If the rows of a weight are its inputs (G = sum of a g^T), H = A (x) B. Two factors are kept as their diagonal: A of an
embedding table, and B of a layer with many outputs. The algebra of the factors is in `kron_block.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from laplace.backprop.gradients import MomentsOf
from laplace.checks import choice, shown
from laplace.errors import NumericalError, OptionError
from laplace.linalg.symmetric import EIGH, SYMMETRIC, GramRows
from laplace.structures.base import Contribution, Forms, Sums
from laplace.structures.block import Block
from laplace.structures.blockdiag import BlockDiagonal, Eigh
from laplace.structures.dense import DENSE, DenseBlock, dense_bytes, dense_form, dense_work
from laplace.structures.diag import DiagBlock
from laplace.structures.kron_block import KronBlock

DENSE_LIMIT = 1024  # a tensor without a Kronecker form gets a dense block up to so many weights, else a diagonal
WIDE = 8192  # if a layer has more outputs (a vocabulary), only the diagonal of B is kept
DAMPINGS = (False, True, "balanced")
SHARINGS = ("expand", "reduce")


_FACTORS = tuple(
    {a: inputs, b: outputs, "count": ""}
    for a in ("A", "A_left")
    for inputs in ("gii", "gi")
    for b, outputs in (("B", "goo"), ("b", "go"))
)


class Kron(BlockDiagonal):
    """Keeps a Kronecker-factored block per tensor.

    Tensors whose gradients are not sums of outer products get a dense or a diagonal block.

    Args:
        damping: False adds the prior exactly. True splits it over the two factors as in the paper, 'balanced' splits
            it in proportion to the factors' sizes, which is closer to the exact sum.
        weight_sharing: for weights used at many positions: 'expand' or 'reduce'.

    Raises:
        OptionError: a value is unknown.
    """

    name = "kron"
    forms = Forms((*DENSE, *_FACTORS))
    options = ("damping", "weight_sharing")
    exact_hessian = False
    prior_structures = ("scalar", "layerwise")
    precision_forms = ("kron",)

    def __init__(self, damping: bool | str = False, weight_sharing: str = "expand") -> None:
        if not isinstance(damping, (bool, str)) or damping not in DAMPINGS:
            raise OptionError(f"damping={shown(damping)} is not an option. Valid: {', '.join(map(repr, DAMPINGS))}.")
        self.damping, self.weight_sharing = damping, choice(weight_sharing, SHARINGS, "weight_sharing")

    @property
    def takes(self) -> tuple[str, ...]:
        return self.prior_structures if self.damping else super().takes

    def block_sums(self, moments: MomentsOf) -> Contribution:
        if moments.form == "dense":
            small = moments.weights <= DENSE_LIMIT
            return {"H": moments.gram().double()} if small else {"diag": moments.squares()}
        wide = _sides(moments)[1] > WIDE
        sums: Contribution = {"b": moments.output_squares()} if wide else {"B": moments.outputs()}
        if moments.first:
            rows = moments.input_rows()
            key = "A_left" if moments.inputs_left else "A"
            if rows is None:
                gram, count = moments.inputs()
                sums |= {key: gram}
            else:
                count = len(rows)
                sums |= {key: GramRows(rows)}
            sums |= {"count": count if isinstance(count, Tensor) else float(count)}
        return sums

    def scaled(self, sums: Sums, scale: Tensor) -> Sums:
        means = ("A", "A_left", "count")  # A is a mean: only B is scaled
        return {k: v if k.rpartition("/")[2] in means else v * scale.to(v) for k, v in sums.items()}

    def indefinite(self) -> Kron:
        raise NumericalError(
            "some of the data that is taken out was not in the fit: the Kronecker factors would have negative "
            "eigenvalues, and the precision might, too. Take hessian_structure='full', 'block' or 'diag', whose "
            "differences are exact."
        )

    def block_bytes(self, moments: MomentsOf, itemsize: int) -> int:
        if moments.form == "dense":
            small = moments.weights <= DENSE_LIMIT
            return dense_bytes(moments.weights) if small else 3 * itemsize * moments.weights
        groups, b, a = _sides(moments)
        return 3 * itemsize * groups * ((b if b > WIDE else b**2) + (a if moments.diagonal_inputs else a**2))

    def block_work(self, moments: MomentsOf, vectors: int) -> tuple[float, float]:
        p = moments.weights
        if moments.form == "dense":
            return dense_work(moments, vectors) if p <= DENSE_LIMIT else (vectors * p, 0.0)
        groups, b, a = _sides(moments)
        t = 1 if self.weight_sharing == "reduce" else moments.positions
        inputs, of_inputs = (1, 0) if moments.diagonal_inputs else (SYMMETRIC * a**2, a**3)
        outputs, of_outputs = (b, 0) if b > WIDE else (b**2, b**3)
        return groups * t * (inputs + vectors * outputs), EIGH * groups * (of_outputs + of_inputs)

    def form(self, own: Sums, whole: Sums) -> str:
        if not self.in_own_form(own):
            return "diag" if "diag" in own else dense_form(own)
        groups, rows, columns = _kept_sides(own)
        factors = f"kron {'diagonal ' if 'b' in own else ''}{rows} x {columns}"
        return factors if groups == 1 else f"{groups} groups of {factors}"

    def in_own_form(self, own: Sums) -> bool:
        return not own.keys() & {"diag", "H"}

    def notes(self, sums: Sums) -> Iterator[str]:
        wide = {key.rpartition("/")[0]: b.shape[1] for key, b in sums.items() if key.rpartition("/")[2] == "b"}
        if wide:
            named = ", ".join(f"{name} ({o:,} outputs)" for name, o in wide.items())
            yield (
                f"only the diagonal of the output factor B is kept for {named}: above {WIDE:,} outputs the matrix is "
                "too large. Weights of different outputs are independent there. See la.coverage()."
            )

    def block(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> Block:
        if "diag" in sums:
            return DiagBlock(sums["diag"].clamp(min=0).to(eigh.dtype), shape)
        if "H" in sums:
            return DenseBlock(sums["H"], shape, eigh.dtype)
        return KronBlock(sums, shape, self.damping, eigh)


def _kept_sides(own: Sums) -> tuple[int, int, int]:
    """Return groups, rows and columns of a tensor from its Kronecker factors."""
    b, a = own["b" if "b" in own else "B"], own["A_left" if "A_left" in own else "A"]
    o, i = b.shape[-1], a.shape[-1]
    return (b.shape[0], i, o) if "A_left" in own else (b.shape[0], o, i)


def _sides(moments: MomentsOf) -> tuple[int, int, int]:
    """Return the number of groups, and the sides of B and A."""
    groups, o, i = moments.factors
    return (groups, i, o) if moments.inputs_left else (groups, o, i)
