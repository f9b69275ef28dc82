"""Keep two Kronecker factors per tensor: H = B (x) A with A = mean of a a^T and B = sum of g g^T.

If the rows of a weight are its inputs (G = sum of a g^T), H = A (x) B. Two factors are kept as their diagonal: A of an
embedding table, and B of a layer with many outputs. With `rank`, a wide factor is kept as a sketch: its leading
eigenvalues, and one value for all others (`linalg/sketch.py`). The algebra of the factors is in `kron_block.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from laplace.backprop.gradients import MomentsOf
from laplace.checks import choice, device_name, dtype_name, shown, whole_number
from laplace.errors import NumericalError, OptionError
from laplace.linalg.gram_sums import GramRows
from laplace.linalg.symmetric import EIGH, SYMMETRIC, gram, may_be_rounded, plain_gram
from laplace.structures.base import Contribution, Forms, Sums
from laplace.structures.block import Block
from laplace.structures.blockdiag import BlockDiagonal, Eigh
from laplace.structures.dealing import dealing
from laplace.structures.dense import DENSE, DenseBlock, dense_bytes, dense_form, dense_work
from laplace.structures.diag import DiagBlock
from laplace.structures.kron_block import KronBlock
from laplace.structures.kron_wide import WideKronBlock

DENSE_LIMIT = 1024  # a tensor without a Kronecker form gets a dense block up to so many weights, else a diagonal
WIDE = 8192  # if a layer has more outputs (a vocabulary), only the diagonal of B is kept
DAMPINGS = (False, True, "balanced")
SHARINGS = ("expand", "reduce")
DTYPES = ("float32", "float64")


_FACTORS = tuple(
    {**inputs, **outputs, "count": ""}
    for a in ("A", "A_left")
    for inputs in ({a: "gii"}, {a: "gi"}, {f"{a}_sketch": "gir", f"{a}_trace": "g"})
    for outputs in ({"B": "goo"}, {"b": "go"}, {"B_sketch": "gor", "B_trace": "g"})
)


class Kron(BlockDiagonal):
    """Keeps a Kronecker-factored block per tensor.

    Tensors whose gradients are not sums of outer products get a dense or a diagonal block.

    Args:
        damping: False adds the prior exactly. True splits it over the two factors as in the paper, 'balanced' splits
            it in proportion to the factors' sizes, which is closer to the exact sum.
        weight_sharing: for weights used at many positions: 'expand' or 'reduce'.
        rank: factors of more rows than this are kept as so many columns. That is for adapters beside wide layers: D
            rows take D * rank numbers, not D * D. None keeps all factors whole.
        dtype: the dtype in which wide factors are multiplied out, summed and kept: torch.float32 or torch.float64. None
            takes float32 only where its rounding, 1e-8 of a factor's largest eigenvalue, can do no harm, and float64
            for the first rows and for factors of up to 1,024 columns. float32 needs half the memory, and less time.
        device: where the factors are kept and decomposed, as 'cpu' beside a network on a GPU. None: with the network.

    Raises:
        OptionError: a value is unknown.
    """

    name = "kron"
    forms = Forms((*DENSE, *_FACTORS))
    options = ("damping", "weight_sharing", "rank", "dtype", "device")
    exact_hessian = False
    prior_structures = ("scalar", "layerwise")
    precision_forms = ("kron",)

    def __init__(
        self,
        damping: bool | str = False,
        weight_sharing: str = "expand",
        rank: int | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(damping, (bool, str)) or damping not in DAMPINGS:
            raise OptionError(f"damping={shown(damping)} is not an option. Valid: {', '.join(map(repr, DAMPINGS))}.")
        self.damping, self.weight_sharing = damping, choice(weight_sharing, SHARINGS, "weight_sharing")
        self.rank: int | float | None = None if rank is None else whole_number(rank, "rank")
        self.dtype, self.device = dtype_name(dtype, "dtype", DTYPES), device_name(device, "device")
        self._sketch = self.rank  # which structures that inherit this one do not have, whatever rank means to them

    @property
    def takes(self) -> tuple[str, ...]:
        return self.prior_structures if self.damping else super().takes

    def block_sums(self, moments: MomentsOf) -> Contribution:
        if moments.form == "dense":
            small = moments.weights <= DENSE_LIMIT
            return {"H": moments.gram().double()} if small else {"diag": moments.squares()}
        _, b, a = _sides(moments)
        if self._sketched(b):
            sums: Contribution = dict(zip(("B_sketch", "B_trace"), moments.output_sketch(self._columns), strict=True))
        elif b > WIDE:
            sums = {"b": moments.output_squares()}
        else:
            rows = moments.output_rows()
            sums = {"B": moments.outputs() if rows is None else self._rows(rows)}
        if moments.first:
            key = "A_left" if moments.inputs_left else "A"
            sketched = self._sketched(a) and not moments.diagonal_inputs
            rows = None if sketched else moments.input_rows()
            if sketched:
                sums[f"{key}_sketch"], sums[f"{key}_trace"], count = moments.input_sketch(self._columns)
            elif rows is None:
                gram, count = moments.inputs()
                sums |= {key: gram}
            else:
                count = len(rows)
                sums |= {key: self._rows(rows)}
            sums |= {"count": count if isinstance(count, Tensor) else float(count)}
        return sums

    def _rows(self, rows: Tensor) -> GramRows | Tensor:  # (M, D)
        """Return what rows add to a factor. If it is kept on another device, only their product goes there."""
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        if self.device is None or torch.device(self.device) == rows.device:
            return GramRows(rows, dtype)
        product = gram(rows) if dtype is None else plain_gram(rows.to(dtype))
        return product.unsqueeze(0).to(self.device)

    def finish(self, before: Sums, found: Sums) -> Sums:
        """Put the factors into their dtype, and onto their device, when the run over the data is complete."""
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        moved: dict[tuple[object, ...], Tensor] = {}  # factors that share memory go on sharing it

        def kept(key: str, value: Tensor) -> Tensor:
            if key.rpartition("/")[2] not in ("A", "A_left", "B") or value.dim() != 3:
                return value
            place = (value.data_ptr(), value.shape, value.dtype, value.device)
            return moved.setdefault(place, value.to(device=self.device, dtype=dtype))

        return before | {key: kept(key, value) for key, value in found.items()}

    def scaled(self, sums: Sums, scale: Tensor) -> Sums:
        def is_mean(key: str) -> bool:  # A is a mean: only B is scaled
            own = key.rpartition("/")[2]
            return own == "count" or own.startswith("A")

        return {key: value if is_mean(key) else value * scale.to(value) for key, value in sums.items()}

    @property
    def _columns(self) -> int:
        assert self._sketch is not None
        return int(self._sketch)

    def _sketched(self, side: int) -> bool:
        """Return whether a factor with so many rows is kept as a sketch."""
        return self._sketch is not None and side > self._sketch

    def _numbers(self, side: int, diagonal: bool) -> int:
        """Return how many numbers are kept of a factor."""
        if diagonal:
            return side
        return side * (self._columns if self._sketched(side) else side)

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
        outputs = self._numbers(b, b > WIDE and not self._sketched(b))
        return 3 * itemsize * groups * (outputs + self._numbers(a, moments.diagonal_inputs))

    def block_work(self, moments: MomentsOf, vectors: int) -> tuple[float, float]:
        p = moments.weights
        if moments.form == "dense":
            return dense_work(moments, vectors) if p <= DENSE_LIMIT else (vectors * p, 0.0)
        groups, b, a = _sides(moments)
        t = 1 if self.weight_sharing == "reduce" else moments.positions
        inputs, of_inputs = (1, 0) if moments.diagonal_inputs else (SYMMETRIC * a**2, a**3)
        outputs, of_outputs = (b, 0) if b > WIDE else (b**2, b**3)
        if self._sketched(b):
            outputs, of_outputs = 2 * b * self._columns, b * self._columns**2
        if self._sketched(a) and not moments.diagonal_inputs:
            inputs, of_inputs = 2 * a * self._columns, a * self._columns**2
        return groups * t * (inputs + vectors * outputs), EIGH * groups * (of_outputs + of_inputs)

    def form(self, own: Sums, whole: Sums) -> str:
        if not self.in_own_form(own):
            return "diag" if "diag" in own else dense_form(own)
        groups, rows, columns = _kept_sides(own)
        kinds = "diagonal " if "b" in own else f"rank {self._sketch} of " if any("sketch" in key for key in own) else ""
        factors = f"kron {kinds}{rows} x {columns}"
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
        wide = [
            v for k, v in sums.items() if k in ("A", "A_left", "B") and v.dim() == 3 and may_be_rounded(v, eigh.dtype)
        ]
        if wide and not self.damping and not dealing():
            return WideKronBlock(sums, shape, eigh)
        return KronBlock(sums, shape, self.damping, eigh)


def _kept_sides(own: Sums) -> tuple[int, int, int]:
    """Return groups, rows and columns of a tensor from its Kronecker factors."""
    factors = {key: value for key, value in own.items() if not key.endswith("_trace")}
    (groups, o), (_, i) = (next(v for k, v in factors.items() if k[0] in first).shape[:2] for first in ("bB", "A"))
    return (groups, i, o) if any(key.startswith("A_left") for key in own) else (groups, o, i)


def _sides(moments: MomentsOf) -> tuple[int, int, int]:
    """Return the number of groups, and the sides of B and A."""
    groups, o, i = moments.factors
    return (groups, i, o) if moments.inputs_left else (groups, o, i)
