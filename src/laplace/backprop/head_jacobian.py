"""The Jacobian of the last layer's outputs in its own weights, phi (x) e_c: what predicting asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laplace.backprop.gradients import Basis, Covariance, Spread
from laplace.backprop.outer import Outer
from laplace.backprop.uses import EVERY

_CHUNK = 2**24  # elements of an intermediate tensor


@dataclass(frozen=True)
class HeadJacobian:
    """The Jacobian of the last layer's outputs in its own weights."""

    features: Sequence[Tensor]
    n: int
    c: int
    _parameters: list[HeadJacobianOf] = field(default_factory=list)

    @property
    def parameters(self) -> list[HeadJacobianOf]:
        if not self._parameters:
            self._parameters.extend(HeadJacobianOf(a, self.n, self.c) for a in self.features)
        return self._parameters

    def variance(self, covariance: Covariance) -> Tensor:
        same = torch.arange(self.c, device=covariance.root.device)
        return self._pairs(covariance, same, same)

    def covariance(self, covariance: Covariance) -> Tensor:
        rows, cols = torch.tril_indices(self.c, self.c, device=covariance.root.device).unbind()
        lower = self._pairs(covariance, rows, cols)
        out = lower.new_empty(self.n, self.c, self.c)
        out[:, rows, cols] = lower
        out[:, cols, rows] = lower
        return out

    def joint(self, covariance: Covariance) -> Tensor:
        phi, dense = self._augmented.double(), self._by_output(covariance.matrix)
        return torch.einsum("ni,cidj,mj->ncmd", phi, dense, phi).to(self.features[0])

    def variance_in(self, basis: Tensor, variances: Tensor) -> Tensor:
        phi, q = self._augmented, basis[self._order].unflatten(0, (self.c, -1))  # q: (C, I, P)
        step = max(1, _CHUNK // (self.c * basis.shape[1]))
        parts = [torch.einsum("ni,cip->ncp", part, q).square() @ variances.T for part in phi.split(step)]
        return torch.cat(parts).permute(2, 0, 1)

    def along(self, steps: Tensor) -> Tensor:
        return along(self.features, steps, self.n, self.c)

    def _pairs(self, covariance: Covariance, rows: Tensor, cols: Tensor) -> Tensor:  # (N, pairs)
        """phi^T S[c, :, d, :] phi for the asked pairs (c, d), in chunks of examples."""
        blocks = self._by_output(covariance.matrix).transpose(1, 2)[rows, cols]  # (pairs, I, I)
        wide = blocks.permute(1, 0, 2).flatten(1)  # (I, pairs * I)
        step = max(1, _CHUNK // wide.shape[1])
        parts = []
        for phi in self._augmented.double().split(step):
            half = (phi @ wide).unflatten(1, (len(rows), -1))
            parts.append((half @ phi.unsqueeze(-1)).squeeze(-1).to(self.features[0]))
        return torch.cat(parts)

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

    def _by_output(self, covariance: Tensor) -> Tensor:  # (P, P) -> (C, I, C, I)
        if len(self.features) > 1:
            order = self._order.to(covariance.device)
            covariance = covariance[order][:, order]
        return covariance.unflatten(1, (self.c, -1)).unflatten(0, (self.c, -1))


@dataclass(frozen=True)
class HeadJacobianOf:
    """One tensor's Jacobian: J[n, c, (o, i)] = [c = o] phi[n, i]."""

    features: Tensor  # (N, I), or (1, I) where it is the same for all examples
    n: int
    c: int
    _rotated: dict[Basis | None, Tensor] = field(default_factory=dict)  # squares of the rotated features

    def variance(self, spread: Spread) -> Tensor:
        by_output = spread.by_output(self.n)
        if by_output is not None:
            return (self._squares(spread.right) @ by_output).expand(self.n, self.c)
        assert spread.left is not None
        return (self._weights(spread) @ spread.left.squares[0]).expand(self.n, self.c)

    def covariance(self, spread: Spread) -> Tensor:
        w, left = self._weights(spread), spread.left
        dense = w.diag_embed() if left is None else (left.vectors * w.unsqueeze(1)) @ left.vectors.mT
        return dense.expand(self.n, self.c, self.c)

    def product(self, spread: Spread, v: Tensor) -> Tensor:
        w, left = self._weights(spread), spread.left
        return v * w if left is None else ((v @ left.vectors[0]) * w) @ left.vectors[0].T

    def joint(self, spread: Spread) -> Tensor:
        a, left = self._rotate(spread.right).expand(self.n, -1), spread.left
        inner = torch.einsum("ni,oi,mi->nmo", a, spread.variances[0], a)
        if left is None:
            dense = inner.diag_embed()
        else:
            dense = torch.einsum("co,nmo,do->nmcd", left.vectors[0], inner, left.vectors[0])
        return dense.transpose(1, 2).expand(self.n, self.c, self.n, self.c)

    def along(self, steps: Tensor, part: slice = EVERY) -> Tensor:  # (S, p) -> (S, n, C)
        rows = self.features.expand(self.n, -1)[part]
        return torch.einsum("ni,sci->snc", rows, steps.unflatten(1, (self.c, -1)))

    def alone(self) -> HeadJacobian:
        return HeadJacobian([self.features], self.n, self.c)

    def cross(self, other: Outer) -> Tensor:  # (N, C, M, L)
        return torch.einsum("nm,lmc->ncml", self._input_products(other), other.g[:, :, 0, :, 0])

    def cross_each(self, other: Outer) -> Tensor:  # (C, N, M)
        return self._input_products(other) * other.g[:, :, 0, :, 0].diagonal(dim1=0, dim2=2).T.unsqueeze(1)

    def double(self) -> HeadJacobianOf:
        return HeadJacobianOf(self.features.double(), self.n, self.c)

    def _input_products(self, other: Outer) -> Tensor:  # (N, M)
        a = other.a.read(slice(None))[:, 0, :, 0].to(self.features)
        return (self.features @ a.T).expand(self.n, -1)

    def _weights(self, spread: Spread) -> Tensor:  # (N, O), or (1, O) for a bias
        return self._squares(spread.right) @ spread.variances[0].T

    def _squares(self, right: Basis | None) -> Tensor:  # (N, I)
        if right not in self._rotated:
            self._rotated[right] = self._rotate(right).square()
        return self._rotated[right]

    def _rotate(self, right: Basis | None) -> Tensor:
        return self.features if right is None else self.features @ right.vectors[0]


@dataclass(frozen=True)
class Chosen:
    """Some rows of a Jacobian: what is asked of all outputs is cut to the chosen ones."""

    whole: Any  # Jacobian or JacobianOf
    index: Tensor

    @property
    def parameters(self) -> list[Chosen]:
        return [Chosen(part, self.index) for part in self.whole.parameters]

    def variance(self, of: Any) -> Tensor:
        return self.whole.variance(of)[:, self.index]

    def covariance(self, of: Any) -> Tensor:
        return self.whole.covariance(of)[:, self.index][:, :, self.index]

    def joint(self, of: Any) -> Tensor:
        return self.whole.joint(of)[:, self.index][..., self.index]

    def along(self, steps: Tensor, *part: slice) -> Tensor:
        return self.whole.along(steps, *part)[..., self.index]

    def alone(self) -> Chosen:
        return Chosen(self.whole.alone(), self.index)

    def cross(self, other: Outer) -> Tensor:
        return self.whole.cross(other)[:, self.index]

    def double(self) -> Chosen:
        return Chosen(self.whole.double(), self.index)


def along(features: Sequence[Tensor], steps: Tensor, n: int, c: int) -> Tensor:  # (S, P) -> (S, N, C)
    """J step: sum of step_W phi + step_b."""
    parts = steps.split([c * a.shape[1] for a in features], -1)
    total = steps.new_zeros(())
    for a, part in zip(features, parts, strict=True):
        total = total + a @ part.unflatten(-1, (c, -1)).mT
    return total.expand(len(steps), n, c)
