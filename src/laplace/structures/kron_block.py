"""Compute with a block that is diagonal in a Kronecker product of two bases.

The factors H = B (x) A of `kron` are kept in their eigenbases. A factor that is kept as its diagonal has the unit
vectors (None) as eigenbasis.

The prior is added exactly, in the eigenbasis: the eigenvalues are s beta_o alpha_i + delta. With `damping=True` it is
split over the factors as in the paper, (s B + sqrt(delta) I) (x) (A + sqrt(delta) I). `damping='balanced'` divides the
first root by pi and multiplies the second by pi, pi^2 = mean(alpha) / mean(s beta), which is closer to the exact sum.

A Kronecker prior precision d K_B (x) K_A is added exactly, too. Let K = L L^T on each side, B' = L_B^-1 B L_B^-T =
U diag(b) U^T, and A' = V diag(a) V^T in the same way. Then the covariance is W diag(1 / (s b a + d)) W^T with
W = L_B^-T U (x) L_A^-T V.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from laplace.backprop.asked import Asked
from laplace.backprop.covariances import Basis, KroneckerCovariance, rotate_left, rotate_right
from laplace.backprop.gradients import JacobianOf
from laplace.errors import OptionError, UnsupportedError
from laplace.linalg.kronecker import Kronecker
from laplace.linalg.symmetric import blurred, check_positive, may_be_rounded
from laplace.structures.base import Sums
from laplace.structures.block import Block, BlockGaussian
from laplace.structures.blockdiag import Eigh
from laplace.structures.gaussian import Traces


class EigenbasisBlock(Block):
    """Holds a block that is diagonal in a Kronecker product of two bases, O x I per group (a bias is O x 1)."""

    left: Basis | None  # (Gr, O, O)
    right: Basis | None  # (Gr, I, I)
    like: Tensor  # a tensor with the dtype and device of the block

    @abstractmethod
    def eigenvalues(self, scale: Tensor, delta: Tensor) -> Tensor:  # (Gr, O, I)
        """Return the eigenvalues of the precision in the basis left (x) right."""

    def gaussian(self, scale: Tensor, precision: Tensor | Kronecker) -> KronGaussian:
        if isinstance(precision, Kronecker):
            raise UnsupportedError(
                "a Kronecker prior precision cannot be added to eigenvalues that are kept in the basis of the factors. "
                "Take hessian_structure='kron', 'full' or 'block'."
            )
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
    """Holds the two factors of one parameter tensor (a bias has A = 1)."""

    def __init__(self, sums: Sums, shape: tuple[int, ...], damping: bool | str, eigh: Eigh) -> None:
        self.shape = shape
        self.inputs_left = any(key.startswith("A_left") for key in sums)
        self.alpha, inputs = _mean_decomposed(sums, "A_left" if self.inputs_left else "A", eigh)
        self.beta, outputs = _decomposed(sums, "b" if "b" in sums else "B", eigh)
        home = sums["count"].device  # the network's: the factors may be kept on another
        self.alpha, self.beta = self.alpha.to(home), self.beta.to(home)
        inputs, outputs = (None if basis is None else basis.on(home) for basis in (inputs, outputs))
        self.left, self.right = (inputs, outputs) if self.inputs_left else (outputs, inputs)
        self.like = self.beta
        self.damping = damping if len(shape) > 1 else False
        self.commutes = not self.damping
        self._whitened: Whitened | None = None

    def gaussian(self, scale: Tensor, precision: Tensor | Kronecker) -> KronGaussian:
        if not isinstance(precision, Kronecker):
            return super().gaussian(scale, precision)
        if self._whitened is None or not self._whitened.of(precision):
            with torch.no_grad():
                self._whitened = Whitened(self, precision)
        eigenvalues = scale * self._whitened.values + precision.strength
        check_positive(eigenvalues)
        return WhitenedGaussian(eigenvalues, self._whitened)

    def factors(self) -> tuple[Tensor, Tensor]:  # (O, O), (I, I)
        """Return the two factors in float64, the factor of the tensor's rows first."""
        if self.beta.shape[0] != 1:
            raise UnsupportedError(
                f"a Kronecker prior precision is not supported for a tensor with {self.beta.shape[0]} groups. Take "
                "hessian_structure='full' or 'block', or no matrix for this tensor."
            )
        sides = (self.alpha, self.beta) if self.inputs_left else (self.beta, self.alpha)
        pairs = zip(sides, (self.left, self.right), strict=True)
        written = [(values[0].double(), _written(q, values.shape[1], values)[0].double()) for values, q in pairs]
        left, right = [(q * values) @ q.T for values, q in written]
        return left, right

    @cached_property
    def blur(self) -> float:  # type: ignore[override]
        rounding = max(blurred(self.alpha), blurred(self.beta))
        return rounding * float(self.alpha.max() * self.beta.max()) if rounding else 0.0

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
    """Has the covariance (Q_B (x) Q_A) diag(R) (Q_B (x) Q_A)^T with R = 1 / eigenvalues."""

    def __init__(self, eigenvalues: Tensor, block: EigenbasisBlock) -> None:
        self.eigenvalues, self.block = eigenvalues, block

    @cached_property
    def variances(self) -> Tensor:  # (Gr, O, I)
        """Return R, the eigenvalues of the covariance."""
        return self.eigenvalues.reciprocal()

    @cached_property
    def spread(self) -> KroneckerCovariance:
        """Return the covariance in the form that Jacobians accept."""
        return KroneckerCovariance(self.variances, self.block.left, self.block.right)

    def logdet(self) -> Tensor:
        return self.eigenvalues.double().log().sum()

    def color(self, eps: Tensor) -> Tensor:
        return self._out(self._into(eps) * self.variances.sqrt())  # the same in any basis of eigh

    def marginal_variances(self) -> Tensor:
        left, right = self.block.left, self.block.right
        variances = self.variances if left is None else left.weighed(self.variances.mT).mT
        return (variances if right is None else right.weighed(variances)).flatten()

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

    def precision_times(self, vectors: Tensor) -> Tensor:
        return self._out(self._into(vectors) * self.eigenvalues)

    def outputs(self, jacobian: JacobianOf, asked: Asked) -> Tensor:
        return asked.of(jacobian, self.spread)

    def traces(self, each: bool) -> Traces:
        variances = self.variances.double()
        return variances.sum(), variances.square().sum()

    def _into(self, vectors: Tensor) -> Tensor:  # (..., p) -> (..., Gr, O, I)
        matrices = vectors.unflatten(-1, self.eigenvalues.shape)
        return rotate_left(rotate_right(matrices, self.block.right), self.block.left)

    def _out(self, matrices: Tensor) -> Tensor:  # (..., Gr, O, I) -> (..., p)
        left, right = self.block.left, self.block.right
        matrices = matrices if left is None else left.out_of(matrices.mT).mT
        return (matrices if right is None else right.out_of(matrices)).flatten(-3)


class Whitened(EigenbasisBlock):
    """Holds a block in bases W = L^-T U, one per side. There H is diagonal and the prior K is the identity."""

    def __init__(self, block: KronBlock, precision: Kronecker) -> None:
        self.shape, self.like, self.prior = block.shape, block.like, precision
        self.inverses: list[Basis] = []
        self.turns: list[Basis] = []
        bases, spectra = [], []
        for h, k in zip(block.factors(), (precision.left, precision.right), strict=True):
            root = torch.linalg.cholesky(k.to(h))
            half = torch.linalg.solve_triangular(root, h, upper=False)
            values, u = torch.linalg.eigh(torch.linalg.solve_triangular(root, half.T, upper=False))
            spectra.append(values.clamp(min=0))
            bases.append(Basis(torch.linalg.solve_triangular(root.T, u, upper=True).to(self.like).unsqueeze(0)))
            self.inverses.append(Basis((root @ u).to(self.like).unsqueeze(0)))  # W^-T
            self.turns.append(Basis(u.to(self.like).unsqueeze(0)))
        self.left, self.right = bases
        self.values = torch.outer(*spectra).to(self.like).unsqueeze(0)  # (1, O, I)
        self.logdet = replace(precision, strength=torch.ones_like(precision.strength)).logdet()

    def of(self, precision: Kronecker) -> bool:
        """Return whether these bases were made for the factors of this prior."""
        pairs = ((self.prior.left, precision.left), (self.prior.right, precision.right))
        return all(a is b or torch.equal(a, b) for a, b in pairs)

    def eigenvalues(self, scale: Tensor, delta: Tensor) -> Tensor:
        return scale * self.values + delta


class WhitenedGaussian(KronGaussian):
    """Has the covariance W diag(R) W^T with bases W that are not orthogonal."""

    block: Whitened

    def logdet(self) -> Tensor:
        return super().logdet() + self.block.logdet

    def color(self, eps: Tensor) -> Tensor:
        left, right = self.block.turns
        turned = rotate_left(rotate_right(eps.unflatten(-1, self.eigenvalues.shape), right), left)
        return self._out(turned * self.variances.sqrt())  # the same in any basis of eigh

    def quadratic(self, vector: Tensor) -> Tensor:
        left, right = self.block.inverses
        inside = rotate_left(rotate_right(vector.unflatten(-1, self.eigenvalues.shape), right), left)
        return (inside.square() * self.eigenvalues).sum((-3, -2, -1))

    def precision_times(self, vectors: Tensor) -> Tensor:
        return vectors @ self.precision_matrix()

    def precision_matrix(self) -> Tensor:
        basis = torch.kron(*[side.vectors[0] for side in self.block.inverses])
        return (basis * self.eigenvalues.flatten()) @ basis.T

    def traces(self, each: bool) -> Traces:
        sigma = self.covariance_times(torch.eye(self.eigenvalues.numel(), dtype=self.eigenvalues.dtype)).double()
        return sigma.trace(), sigma.square().sum()


def _mean_decomposed(sums: Sums, key: str, eigh: Eigh) -> tuple[Tensor, Basis | None]:  # (Gr, D), Q
    """Return the eigenvalues of the mean A of a a^T and their basis, from sums over all positions."""
    count = sums["count"].to(next(v.device for k, v in sums.items() if k[0] == "A"))
    if key in sums and sums[key].dim() == 3 and may_be_rounded(sums[key], eigh.dtype):  # wide: eigh keeps no copy
        values, basis = eigh(sums[key])
        return values / count.to(values), basis
    return _decomposed({k: v / count.to(v) for k, v in sums.items() if k[0] == "A"}, key, eigh)


def _decomposed(sums: Sums, key: str, eigh: Eigh) -> tuple[Tensor, Basis | None]:  # (Gr, D), Q
    """Return the eigenvalues of a factor and their basis, from the factor, its diagonal or its sketch."""
    if key not in sums:
        return eigh.of_sketch(sums[f"{key}_sketch"], sums[f"{key}_trace"])
    found = sums[key]
    return eigh(found) if found.dim() == 3 else (found.clamp(min=0).to(eigh.dtype), None)


def _written(basis: Basis | None, side: int, like: Tensor) -> Tensor:  # (Gr, side, side)
    """Return the vectors of a basis as a matrix. None stands for the unit vectors."""
    if basis is not None:
        return basis.vectors
    return torch.eye(side, dtype=like.dtype, device=like.device).expand(like.shape[0], side, side)
