"""Define covariances of weights as Jacobians take them: in Kronecker eigenbases, row by row, or of all weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from laplace.linalg.symmetric import gram


class Basis:
    """Holds orthonormal bases Q (columns), one per group, and caches their elementwise square.

    Args:
        vectors: Q, (groups, D, D).
    """

    def __init__(self, vectors: Tensor) -> None:  # (Gr, D, D)
        self.vectors = vectors

    @cached_property
    def transposed(self) -> Tensor:  # (Gr, D, D)
        """Return Q^T as it is read fastest, row by row."""
        return self.vectors.mT.contiguous()

    @cached_property
    def squares(self) -> Tensor:  # (Gr, D, D), [k, c] = Q[c, k]^2
        """Return the transposed elementwise square, which maps weights per basis vector to weights per output."""
        return self.vectors.square().mT.contiguous()

    @cached_property
    def centred(self) -> Basis:
        """Return the same vectors with the mean of their entries taken out: what they are to contrasts of outputs."""
        return Basis(self.vectors - self.vectors.mean(1, keepdim=True))

    def into(self, x: Tensor) -> Tensor:  # (..., Gr, R, D) -> x Q
        """Return x Q."""
        if self.vectors.shape[0] == 1:
            return (x.reshape(-1, x.shape[-1]) @ self.vectors[0]).reshape(x.shape)
        return torch.einsum("...gri,gij->...grj", x, self.vectors)  # x @ Q would copy Q for every example

    def out_of(self, x: Tensor) -> Tensor:  # (..., Gr, R, D) -> x Q^T
        """Return x Q^T, back from the basis."""
        return x @ self.vectors.mT

    def apart(self) -> list[Basis]:
        """Return the basis of each group."""
        return [Basis(vectors) for vectors in self.vectors.split(1)]

    def on(self, device: torch.device) -> Basis:
        """Return the basis on a device."""
        return self if self.vectors.device == device else Basis(self.vectors.to(device))

    def weighed(self, variances: Tensor) -> Tensor:  # (Gr, R, D) -> (Gr, R, D)
        """Return the sum over basis vectors k of variances[k] Q[., k]^2: variances along the unit vectors."""
        return variances @ self.squares


class ReflectedBasis(Basis):
    """Holds an orthonormal basis Q = I - V T V^T of D dimensions, whose first R vectors matter, in D R numbers.

    Args:
        v: V, (groups, D, R).
        t: T, (groups, R, R).
    """

    def __init__(self, v: Tensor, t: Tensor) -> None:
        self.v, self.t = v, t

    @property
    def vectors(self) -> Tensor:  # type: ignore[override]  # (Gr, D, D)
        """Return Q written out, for those few who need it whole. It is not kept."""
        return self.into(
            torch.eye(self.v.shape[1], dtype=self.v.dtype, device=self.v.device).expand(len(self.v), -1, -1)
        )

    def into(self, x: Tensor) -> Tensor:
        return x - (x @ self.v) @ (self.t @ self.v.mT)

    def out_of(self, x: Tensor) -> Tensor:
        return x - (x @ self.v) @ (self.v @ self.t).mT

    def on(self, device: torch.device) -> Basis:
        return self if self.v.device == device else ReflectedBasis(self.v.to(device), self.t.to(device))

    def apart(self) -> list[Basis]:
        return [ReflectedBasis(v, t) for v, t in zip(self.v.split(1), self.t.split(1), strict=True)]

    def weighed(self, variances: Tensor) -> Tensor:
        """Return the same for variances that are equal along all vectors but the first R."""
        rank = self.v.shape[2]
        first = -self.v @ (self.t @ self.v[:, :rank].mT)  # the first R columns of Q, (Gr, D, R)
        first[:, :rank] += torch.eye(rank, dtype=first.dtype, device=first.device)
        squares = first.square()
        rest = (1 - squares.sum(2)).clamp(min=0).unsqueeze(1)  # (Gr, 1, D)
        return variances[..., :rank] @ squares.mT + variances[..., rank : rank + 1] * rest


def rotate_right(x: Tensor, basis: Basis | None) -> Tensor:  # (..., Gr, R, D) -> x Q
    """Return x Q, the columns of x in a basis. None stands for the unit vectors."""
    return x if basis is None else basis.into(x)


def rotate_left(x: Tensor, basis: Basis | None) -> Tensor:  # (..., Gr, D, R) -> Q^T x
    """Return Q^T x, the rows of x in a basis. None stands for the unit vectors."""
    if basis is None:
        return x
    rows = x.mT
    if isinstance(basis, ReflectedBasis) or (len(basis.vectors) == 1 and rows.is_contiguous()):
        return basis.into(rows).mT  # one product for all examples, which reads Q once
    return basis.vectors.mT @ x


class KroneckerCovariance:
    """Holds a covariance (Q_B (x) Q_A) diag(R) (Q_B (x) Q_A)^T of one tensor's weights.

    Args:
        variances: R, (groups, O, I).
        left: The basis Q_B of the rows; None is that of unit vectors.
        right: The basis Q_A of the columns; None is that of unit vectors.
    """

    def __init__(self, variances: Tensor, left: Basis | None = None, right: Basis | None = None) -> None:
        self.variances, self.left, self.right = variances, left, right  # R: (Gr, O, I)
        self._asked, self._by_output = 0, None

    @classmethod
    def independent(cls, variances: Tensor, shape: tuple[int, ...]) -> KroneckerCovariance:  # (p,)
        """Return the covariance of independent weights of a tensor of that shape."""
        return cls(variances.reshape(1, shape[0] if shape else 1, -1))

    @cached_property
    def centred(self) -> KroneckerCovariance:
        """Return the same covariance as contrasts of the rows see it. There must be a basis of the rows."""
        assert self.left is not None
        return KroneckerCovariance(self.variances, self.left.centred, self.right)

    def by_output(self, n: int) -> Tensor | None:  # (I, O), of a single group
        """Return M[i, c] = sum_o R[o, i] Q_B[c, o]^2, the variance that squared input i gives to output c.

        Returns None until forming it pays: once it was asked for at more examples in total, `n` at a time, than there
        are inputs.
        """
        if self.left is None:
            return self.variances[0].T
        self._asked += n
        if self._by_output is None and self._asked > self.variances.shape[2] and not self.variances.requires_grad:
            self._by_output = self.variances[0].T @ self.left.squares[0]
        return self._by_output


class RowCovariance(KroneckerCovariance):
    """Holds a covariance of one tensor's weights in which its rows are independent: R_o R_o^T for those of row o.

    A row is an entry of the tensor's first dimension, as of an output unit. Nothing of size p x p is made.

    Args:
        root: R, (O, I, I).
    """

    def __init__(self, root: Tensor) -> None:
        rows, width, _ = root.shape
        super().__init__(root.new_ones(()).expand(rows, 1, width), right=Basis(root))
        self.root = root


class Covariance:
    """Holds a covariance S = R R^T of all weights.

    Gradients are multiplied by R and then squared, so that nothing cancels. Multiplying by S directly would lose the
    small variance of a well determined direction in float32, because S also has the prior's large variances.
    """

    def __init__(self, root: Tensor) -> None:  # R: (P, P)
        self.root = root
        self._last: dict[str, tuple[object, Tensor]] = {}

    def once(self, what: str, key: object, make: Callable[[], Tensor]) -> Tensor:
        """Return a cached result that follows from S. It is computed again only when `key` changes."""
        if what not in self._last or self._last[what][0] != key:
            self._last[what] = key, make()
        return self._last[what][1]

    @cached_property
    def matrix(self) -> Tensor:  # (P, P), float64
        """Return S itself, where its blocks are cheaper. In float64, because here terms do cancel."""
        return gram(self.root.double().T)
