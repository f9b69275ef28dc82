"""Compute with the Jacobian of the last layer's outputs in its own weights, phi (x) e_c, for predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laplace.backprop.covariances import Basis, Covariance, KroneckerCovariance, RowCovariance
from laplace.backprop.outer import Outer
from laplace.backprop.uses import EVERY
from laplace.linalg.contrasts import centred, covariances_if_independent, variances_if_independent
from laplace.linalg.symmetric import spectrum

_CHUNK = 2**24  # most elements of an intermediate tensor


@dataclass(frozen=True)
class HeadJacobian:
    """Computes with the Jacobian of the last layer's outputs in all its own weights."""

    features: Sequence[Tensor]
    n: int
    c: int
    index: Tensor | None = None  # the asked outputs, C' of them; None for all
    centred: bool = False  # whether contrasts of all outputs stand in place of the outputs
    _parameters: list[HeadJacobianOf] = field(default_factory=list)

    @property
    def parameters(self) -> list[HeadJacobianOf]:
        if not self._parameters:
            self._parameters.extend(HeadJacobianOf(a, self.n, self.c, self.index, self.centred) for a in self.features)
        return self._parameters

    def variance(self, covariance: Covariance) -> Tensor:
        """Return |L_c^T phi|^2, with L_c L_c^T the block of output c, factorised once. Nothing cancels."""
        factors = covariance.once("own", self._key, lambda: self._factors(covariance))  # (C', I, I)
        wide = factors.transpose(0, 1).flatten(1)  # (I, C' * I)
        parts = []
        for phi in self._augmented.split(max(1, _CHUNK // wide.shape[1])):
            parts.append((phi @ wide).unflatten(1, (len(factors), -1)).square().sum(-1))
        return torch.cat(parts)

    def covariance(self, covariance: Covariance) -> Tensor:
        """Return phi^T S[c, :, d, :] phi, computed for the pairs d <= c, in chunks of examples."""
        wide = covariance.once("pairs", self._key, lambda: self._pairs(covariance))  # (I, pairs, I), float64
        rows, cols = torch.tril_indices(self._asked, self._asked, device=wide.device).unbind()
        parts = []
        for phi in self._augmented.double().split(max(1, _CHUNK // wide[0].numel())):
            half = (phi @ wide.flatten(1)).unflatten(1, wide.shape[1:])
            lower = (half @ phi.unsqueeze(-1)).squeeze(-1).to(self.features[0])
            out = lower.new_empty(len(phi), self._asked, self._asked)
            out[:, rows, cols] = lower
            out[:, cols, rows] = lower
            parts.append(out)
        return torch.cat(parts)

    def joint(self, covariance: Covariance) -> Tensor:
        phi, dense = self._augmented.double(), self._by_output(covariance.matrix)
        if self.index is not None:
            dense = dense[self.index][:, :, self.index]
        if self.centred:
            dense = centred(centred(dense, 0), 2)
        return torch.einsum("ni,cidj,mj->ncmd", phi, dense, phi).to(self.features[0])

    def variance_in(self, basis: Tensor, variances: Tensor) -> Tensor:
        phi, q = self._augmented, self._own_rows(basis)  # q: (C', I, P)
        step = max(1, _CHUNK // (self._asked * basis.shape[1]))
        parts = [torch.einsum("ni,cip->ncp", part, q).square() @ variances.T for part in phi.split(step)]
        return torch.cat(parts).permute(2, 0, 1)

    def along(self, steps: Tensor) -> Tensor:
        moved = along(self.features, steps, self.n, self.c)
        moved = centred(moved) if self.centred else moved
        return moved if self.index is None else moved[..., self.index]

    @property
    def examples(self) -> int:
        return self.n

    def written(self, part: slice) -> Tensor:  # (n, C', P)
        return torch.cat([one.contracted(part) for one in self.parameters], 2).transpose(0, 1)

    def _factors(self, covariance: Covariance) -> Tensor:  # (C', I, I)
        rows = self._own_rows(covariance.root)
        parts = [part.double() for part in rows.split(max(1, _CHUNK // rows[0].numel()))]
        return torch.cat([_root(part @ part.mT) for part in parts]).to(self.features[0])

    def _pairs(self, covariance: Covariance) -> Tensor:  # (I, pairs, I)
        rows = self._own_rows(covariance.root).double()
        blocks = [torch.einsum("ip,djp->idj", rows[c], rows[: c + 1]) for c in range(self._asked)]
        return torch.cat(blocks, 1)

    @property
    def _asked(self) -> int:  # C'
        return self.c if self.index is None else len(self.index)

    @property
    def _key(self) -> object:
        """Return everything that the cached blocks of a covariance depend on."""
        asked = None if self.index is None else tuple(self.index.tolist())
        return self.c, tuple(a.shape[1] for a in self.features), self.features[0].dtype, asked, self.centred

    @property
    def _augmented(self) -> Tensor:  # (N, I), the features of all tensors side by side
        return torch.cat([a.expand(self.n, -1) for a in self.features], 1)

    @property
    def _order(self) -> Tensor:  # (C * I,), where (output c, feature i) lies in the vector of all weights
        parts, start = [], 0
        for a in self.features:
            width = a.shape[1]
            parts.append(start + torch.arange(self.c * width).reshape(self.c, width))
            start += self.c * width
        return torch.cat(parts, 1).flatten()

    def _own_rows(self, matrix: Tensor) -> Tensor:  # (P, R) -> (C', I, R)
        """Return the rows of a matrix that belong to each asked output's weights, or contrasts of all of them."""
        order = self._order.to(matrix.device).unflatten(0, (self.c, -1))
        rows = matrix[order if self.index is None else order[self.index]]
        return centred(rows, 0) if self.centred else rows

    def _by_output(self, covariance: Tensor) -> Tensor:  # (P, P) -> (C, I, C, I)
        if len(self.features) > 1:
            order = self._order.to(covariance.device)
            covariance = covariance[order][:, order]
        return covariance.unflatten(1, (self.c, -1)).unflatten(0, (self.c, -1))


@dataclass(frozen=True)
class HeadJacobianOf:
    """Holds one tensor's Jacobian: J[n, c, (o, i)] = [c = o] phi[n, i]; of contrasts, ([c = o] - 1/C) phi[n, i]."""

    features: Tensor  # (N, I), or (1, I) if it is the same for all examples
    n: int
    c: int
    index: Tensor | None = None  # the asked outputs, C' of them; None for all
    centred: bool = False  # whether contrasts of all outputs stand in place of the outputs
    _rotated: dict[Basis | None, Tensor] = field(default_factory=dict)  # squares of the rotated features

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return C', N and the number of weights p."""
        return self.c if self.index is None else len(self.index), self.n, self.weights

    @property
    def weights(self) -> int:
        """Return the number of weights p."""
        return self.c * self.features.shape[1]

    def variance(self, spread: KroneckerCovariance) -> Tensor:
        if isinstance(spread, RowCovariance):
            each = self._row_variances(spread)
            return (variances_if_independent(each) if self.centred else each).expand(self.n, -1)
        if self.centred and spread.left is None:
            return variances_if_independent(self._weights(spread)).expand(self.n, -1)
        spread = spread.centred if self.centred else spread
        by_output = spread.by_output(self.n)
        if by_output is not None:
            return (self._squares(spread.right) @ self._cut(by_output)).expand(self.n, -1)
        assert spread.left is not None
        return (self._weights(spread) @ self._cut(spread.left.squares[0])).expand(self.n, -1)

    def covariance(self, spread: KroneckerCovariance) -> Tensor:
        if isinstance(spread, RowCovariance):
            each = self._row_variances(spread)
            return (covariances_if_independent(each) if self.centred else each.diag_embed()).expand(self.n, -1, -1)
        w = self._weights(spread)
        if spread.left is None:
            dense = covariances_if_independent(w) if self.centred else self._cut(w).diag_embed()
        else:
            rows = self._rows(spread.left)
            dense = (rows * w.unsqueeze(1)) @ rows.T
        return dense.expand(self.n, -1, -1)

    def product(self, spread: KroneckerCovariance, v: Tensor) -> Tensor:
        if isinstance(spread, RowCovariance):
            each = self._row_variances(spread)
            return centred(centred(v) * each) if self.centred else v * each
        w = self._weights(spread)
        if spread.left is None:
            return centred(centred(v) * w) if self.centred else v * self._cut(w)
        rows = self._rows(spread.left)
        return ((v @ rows) * w) @ rows.T

    def joint(self, spread: KroneckerCovariance) -> Tensor:
        if isinstance(spread, RowCovariance):
            rows = torch.einsum("ni,cij->ncj", self.features.expand(self.n, -1), self._own_root(spread))
            return torch.einsum("ncj,mcj->nmc", rows, rows).diag_embed().transpose(1, 2)
        a = self._rotate(spread.right).expand(self.n, -1)
        inner = torch.einsum("ni,oi,mi->nmo", a, spread.variances[0], a)
        if spread.left is None:
            dense = covariances_if_independent(inner) if self.centred else self._cut(inner).diag_embed()
        else:
            rows = self._rows(spread.left)
            dense = torch.einsum("co,nmo,do->nmcd", rows, inner, rows)
        return dense.transpose(1, 2)

    def along(self, steps: Tensor, part: slice = EVERY) -> Tensor:  # (S, p) -> (S, n, C')
        rows, by_output = self.features.expand(self.n, -1)[part], steps.unflatten(1, (self.c, -1))
        by_output = by_output if self.index is None else by_output[:, self.index]
        by_output = centred(by_output, 1) if self.centred else by_output
        return torch.einsum("ni,sci->snc", rows, by_output)

    def times(self, matrix: Tensor, part: slice) -> Tensor:  # (p, R) -> (C', n, R)
        """Return J times a matrix for some examples."""
        by_output = matrix.unflatten(0, (self.c, -1))
        by_output = by_output if self.index is None else by_output[self.index]
        by_output = centred(by_output, 0) if self.centred else by_output
        return self.features.expand(self.n, -1)[part] @ by_output

    def contracted(self, part: slice) -> Tensor:  # (C', n, p)
        """Return J itself for some examples."""
        units = torch.eye(self.c, dtype=self.features.dtype, device=self.features.device)
        units = units if self.index is None else units[self.index]
        units = centred(units) if self.centred else units
        return torch.einsum("kc,ni->knci", units, self.features.expand(self.n, -1)[part]).flatten(2)

    def alone(self) -> HeadJacobian:
        return HeadJacobian([self.features], self.n, self.c, self.index, self.centred)

    def cross(self, other: Outer) -> Tensor:  # (N, C', M, L)
        g = other.g[:, :, 0, :, 0]
        return torch.einsum("nm,lmc->ncml", self._input_products(other), centred(g) if self.centred else self._cut(g))

    def cross_each(self, other: Outer) -> Tensor:  # (C, N, M)
        return self._input_products(other) * other.g[:, :, 0, :, 0].diagonal(dim1=0, dim2=2).T.unsqueeze(1)

    def double(self) -> HeadJacobianOf:
        return HeadJacobianOf(self.features.double(), self.n, self.c, self.index, self.centred)

    def _cut(self, x: Tensor) -> Tensor:  # (..., C) -> (..., C')
        return x if self.index is None else x[..., self.index]

    def _rows(self, left: Basis) -> Tensor:  # (C', C)
        """Return the unit vectors of the asked outputs, or contrasts of all, in a basis of output space."""
        left = left.centred if self.centred else left
        return left.vectors[0] if self.index is None else left.vectors[0][self.index]

    def _input_products(self, other: Outer) -> Tensor:  # (N, M)
        a = other.a.read(slice(None))[:, 0, :, 0].to(self.features)
        return (self.features @ a.T).expand(self.n, -1)

    def _weights(self, spread: KroneckerCovariance) -> Tensor:  # (N, O), or (1, O) for a bias
        return self._squares(spread.right) @ spread.variances[0].T

    def _own_root(self, spread: RowCovariance) -> Tensor:  # (C', I, I)
        return spread.root if self.index is None else spread.root[self.index]

    def _row_variances(self, spread: RowCovariance) -> Tensor:  # (N, C'), or (1, C') for a bias
        """Return |R_c^T phi|^2, some examples at a time."""
        root = self._own_root(spread)
        parts = self.features.split(max(1, _CHUNK // max(1, root[:, 0].numel())))
        return torch.cat([torch.einsum("ni,cij->ncj", part, root).square().sum(2) for part in parts])

    def _squares(self, right: Basis | None) -> Tensor:  # (N, I)
        if right not in self._rotated:
            self._rotated[right] = self._rotate(right).square()
        return self._rotated[right]

    def _rotate(self, right: Basis | None) -> Tensor:
        return self.features if right is None else right.into(self.features.unsqueeze(0)).squeeze(0)


def along(features: Sequence[Tensor], steps: Tensor, n: int, c: int) -> Tensor:  # (S, P) -> (S, N, C)
    """Return J step: sum of step_W phi + step_b."""
    parts = steps.split([c * a.shape[1] for a in features], -1)
    total = steps.new_zeros(())
    for a, part in zip(features, parts, strict=True):
        total = total + a @ part.unflatten(-1, (c, -1)).mT
    return total.expand(len(steps), n, c)


def _root(blocks: Tensor) -> Tensor:  # (C, I, I)
    """Return R with R R^T = block: the Cholesky factor if every block has one, else a root from eigenvectors."""
    lower, failed = torch.linalg.cholesky_ex(blocks)
    if not failed.any():
        return lower
    values, vectors = spectrum(blocks)
    return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
