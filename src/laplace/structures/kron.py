"""Kronecker factors: H = B (x) A with A = mean of a a^T and B = sum of g g^T, kept in their eigenbases.

Where a weight's rows are its inputs (G = sum of a g^T), H = A (x) B. Of a table whose rows are looked up, A is kept as
its diagonal, and so is B of a layer with many outputs; their eigenbasis is that of unit vectors (None).

The prior is added exactly, in the eigenbasis: eigenvalues s beta_o alpha_i + delta. With `damping=True` it is split
over the factors as in the paper, (s B + sqrt(delta) I) (x) (A + sqrt(delta) I); `damping='balanced'` divides and
multiplies the two roots by pi, pi^2 = mean(alpha) / mean(s beta), which keeps the split close to the exact one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from laplace.algebra import EIGH, SYMMETRIC, Rows, check_positive
from laplace.backprop.gradients import Basis, JacobianOf, MomentsOf, Spread, rotate_left, rotate_right
from laplace.checks import shown
from laplace.errors import NumericalError, OptionError
from laplace.structures.base import Contribution, Sums, Traces
from laplace.structures.block import Block, BlockGaussian
from laplace.structures.blockdiag import BlockDiagonal, Eigh
from laplace.structures.dense import DenseBlock, dense_bytes, dense_work
from laplace.structures.diag import DiagBlock

DENSE_LIMIT = 1024  # weights up to which a tensor without a Kronecker form gets a dense block; beyond, a diagonal
WIDE = 8192  # outputs of a layer (a vocabulary) above which B is its diagonal
DAMPINGS = (False, True, "balanced")


class Kron(BlockDiagonal):
    """A Kronecker-factored block per tensor; dense or diagonal where a tensor's gradients are no outer products."""

    name = "kron"
    options = ("damping", "weight_sharing")
    exact_hessian = False
    scattered = False
    prior_structures = ("scalar", "layerwise")

    def __init__(self, damping: bool | str = False, weight_sharing: str = "expand") -> None:
        if not isinstance(damping, (bool, str)) or damping not in DAMPINGS:
            raise OptionError(f"damping={shown(damping)} is not an option. Valid: {', '.join(map(repr, DAMPINGS))}.")
        self.damping, self.weight_sharing = damping, weight_sharing

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
                sums |= {key: Rows(rows)}
            sums |= {"count": count if isinstance(count, Tensor) else float(count)}
        return sums

    def scaled(self, sums: Sums, scale: Tensor) -> Sums:
        means = ("A", "A_left", "count")  # the scale belongs to the other factor
        return {k: v if k.rpartition("/")[2] in means else v * scale.to(v) for k, v in sums.items()}

    def indefinite(self) -> Kron:
        raise NumericalError(
            "the Kronecker factors would have negative eigenvalues, and so might the precision: not all of what is "
            "taken out was in. Take hessian_structure='full', 'block' or 'diag', whose differences are exact."
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

    def notes(self, sums: Sums) -> Iterator[str]:
        wide = {key.rpartition("/")[0]: b.shape[1] for key, b in sums.items() if key.rpartition("/")[2] == "b"}
        if wide:
            named = ", ".join(f"{name} ({o:,} outputs)" for name, o in wide.items())
            yield (
                f"of {named} the output factor B is kept as its diagonal: above {WIDE:,} outputs it is too large a "
                "matrix. Outputs are independent of each other there. See la.coverage()."
            )

    def block(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> Block:
        if "diag" in sums:
            return DiagBlock(sums["diag"].clamp(min=0).to(eigh.dtype), shape)
        if "H" in sums:
            return DenseBlock(sums["H"], shape, eigh.dtype)
        return KronBlock(sums, shape, self.damping, eigh)


def _sides(moments: MomentsOf) -> tuple[int, int, int]:
    """Groups, and the sides of B and A."""
    groups, o, i = moments.factors
    return (groups, i, o) if moments.inputs_left else (groups, o, i)


class EigenbasisBlock(Block):
    """A block that is diagonal in a Kronecker product of two bases, O x I for each group (a bias is O x 1)."""

    left: Basis | None  # (Gr, O, O)
    right: Basis | None  # (Gr, I, I)
    like: Tensor  # of its dtype and device

    @abstractmethod
    def eigenvalues(self, scale: Tensor, delta: Tensor) -> Tensor:  # (Gr, O, I)
        """The precision's eigenvalues in the basis left (x) right."""

    def gaussian(self, scale: Tensor, precision: Tensor) -> KronGaussian:
        if precision.numel() != 1:
            raise OptionError(
                f"a prior precision per weight ({precision.numel()} values for one tensor) has no Kronecker form. Give "
                "a scalar or one value per tensor."
            )
        eigenvalues = self.eigenvalues(scale, precision.reshape(()))
        check_positive(eigenvalues)
        return KronGaussian(eigenvalues, self)

    def matrix(self) -> Tensor:
        one = self.like.new_ones(())
        return KronGaussian(self.eigenvalues(one, 0 * one), self).precision_matrix()


class KronBlock(EigenbasisBlock):
    """The two factors of one parameter tensor (a bias has A = 1)."""

    def __init__(self, sums: Sums, shape: tuple[int, ...], damping: bool | str, eigh: Eigh) -> None:
        self.shape = shape
        self.inputs_left = "A_left" in sums
        a = sums["A_left" if self.inputs_left else "A"]
        a = a / sums["count"].to(a)
        self.alpha, inputs = eigh(a) if a.dim() == 3 else (a.to(eigh.dtype), None)  # (Gr, I)
        self.beta, outputs = (
            eigh(sums["B"]) if "B" in sums else (sums["b"].clamp(min=0).to(eigh.dtype), None)
        )  # (Gr, O)
        self.left, self.right = (inputs, outputs) if self.inputs_left else (outputs, inputs)
        self.like = self.beta
        self.damping = damping if len(shape) > 1 else False
        self.commutes = not self.damping

    def eigenvalues(self, scale: Tensor, delta: Tensor) -> Tensor:
        columns, rows = (2, 1) if self.inputs_left else (1, 2)
        alpha, beta = self.alpha.unsqueeze(columns), (scale * self.beta).unsqueeze(rows)
        if not self.damping:
            return beta * alpha + delta
        root, pi = delta.sqrt(), 1.0
        if self.damping == "balanced":
            means = alpha.mean((1, 2), True) / beta.mean((1, 2), True)
            pi = means.nan_to_num(1.0).clamp(1e-12, 1e12).sqrt()
        return (beta + root / pi) * (alpha + root * pi)


class KronGaussian(BlockGaussian):
    """Covariance (Q_B (x) Q_A) diag(R) (Q_B (x) Q_A)^T with R = 1 / eigenvalues."""

    def __init__(self, eigenvalues: Tensor, block: EigenbasisBlock) -> None:
        self.eigenvalues, self.block = eigenvalues, block

    @cached_property
    def variances(self) -> Tensor:  # (Gr, O, I)
        """R, the covariance's eigenvalues."""
        return self.eigenvalues.reciprocal()

    @cached_property
    def spread(self) -> Spread:
        """The covariance as a Jacobian asks for it."""
        return Spread(self.variances, self.block.left, self.block.right)

    def logdet(self) -> Tensor:
        return self.eigenvalues.double().log().sum()

    def color(self, eps: Tensor) -> Tensor:
        return self._out(self._into(eps) * self.variances.sqrt())  # whatever basis eigh chose

    def marginal_variances(self) -> Tensor:
        left, right = self.block.left, self.block.right
        variances = self.variances if left is None else left.squares.mT @ self.variances
        return (variances if right is None else variances @ right.squares).flatten()

    def quadratic(self, vector: Tensor) -> Tensor:
        return (self._into(vector).square() * self.eigenvalues).sum((-3, -2, -1))

    def precision_matrix(self) -> Tensor:
        _, o, i = self.eigenvalues.shape
        lefts, rights = _written(self.block.left, o, self.eigenvalues), _written(self.block.right, i, self.eigenvalues)
        blocks = []
        for left, right, values in zip(lefts, rights, self.eigenvalues, strict=True):
            basis = torch.kron(left, right)
            blocks.append((basis * values.flatten()) @ basis.T)
        return torch.block_diag(*blocks)

    def covariance_times(self, vectors: Tensor) -> Tensor:
        return self._out(self._into(vectors) * self.variances)

    def outputs(self, jacobian: JacobianOf, what: str, *args: Tensor) -> Tensor:
        return getattr(jacobian, what)(self.spread, *args)

    def traces(self, each: bool) -> Traces:
        variances = self.variances.double()
        return variances.sum(), variances.square().sum()

    def _into(self, vectors: Tensor) -> Tensor:  # (..., p) -> (..., Gr, O, I)
        matrices = vectors.unflatten(-1, self.eigenvalues.shape)
        return rotate_left(rotate_right(matrices, self.block.right), self.block.left)

    def _out(self, matrices: Tensor) -> Tensor:  # (..., Gr, O, I) -> (..., p)
        left, right = self.block.left, self.block.right
        matrices = matrices if left is None else left.vectors @ matrices
        return (matrices if right is None else matrices @ right.vectors.mT).flatten(-3)


def _written(basis: Basis | None, side: int, like: Tensor) -> Tensor:  # (Gr, side, side)
    """The vectors of a basis, those of unit vectors included."""
    if basis is not None:
        return basis.vectors
    return torch.eye(side, dtype=like.dtype, device=like.device).expand(like.shape[0], side, side)
