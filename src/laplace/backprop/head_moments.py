"""Compute second moments of the last layer's gradients v phi^T in closed form, for fitting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace.backprop.covariances import Basis
from laplace.backprop.gradients import Sketchable
from laplace.backprop.head_jacobian import HeadJacobianOf, along
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.symmetric import gram, in_sums, precise_gram

_CHUNK = 2**24  # most elements of an intermediate tensor
_ROWS = 2**24  # most numbers in the rows u (x) phi that are written out at a time


@dataclass(frozen=True)
class HeadMoments:
    """Computes second moments of G = v phi^T in closed form."""

    features: Sequence[Tensor]
    curvature: OutputCurvature
    n: int

    @property
    def held(self) -> int:
        return self.n * (sum(a.shape[1] for a in self.features) + self.curvature.held)

    def merged(self, others: Sequence[Any]) -> HeadMoments:
        parts = [self, *others]
        features = [
            torch.cat([part.features[i].expand(part.n, -1) for part in parts]) if len(a) > 1 or self.n == 1 else a
            for i, a in enumerate(self.features)
        ]
        curvature = OutputCurvature.joined([part.curvature for part in parts])
        return HeadMoments(features, curvature, sum(part.n for part in parts))

    @property
    def parameters(self) -> list[HeadMomentsOf]:
        shared = functools.cache(self.curvature.gram)
        return [HeadMomentsOf(a.expand(self.n, -1), self.curvature, self.n, shared) for a in self.features]

    def gram(self) -> Tensor:
        """Return the sum over n of Lambda_n (x) (phi phi^T), (P, P), some examples at a time."""
        vectors = 1 if self.curvature.vectors is None else len(self.curvature.vectors)
        width = vectors * self.curvature.n_outputs * sum(a.shape[1] for a in self.features)
        step = max(1, _ROWS // width)
        parts = (self._part(slice(start, min(start + step, self.n))) for start in range(0, self.n, step))
        total = next(parts)._gram()
        for part in parts:
            total += part._gram()
        return total

    def products(self, vectors: Tensor) -> Tensor:
        """Return the sum over n of J_n^T Lambda_n J_n u, some examples at a time."""
        vectors = in_sums(vectors.to(self.features[0]))
        step = max(1, _ROWS // (len(vectors) * self.curvature.n_outputs))
        total = torch.zeros_like(vectors)
        for start in range(0, self.n, step):
            part = self._part(slice(start, min(start + step, self.n)))
            features = [a.to(vectors) for a in part.features]
            sent = part.curvature.times(along(features, vectors, part.n, self.curvature.n_outputs)).mT
            total += torch.cat([(sent @ a.expand(part.n, -1)).flatten(1) for a in features], 1)
        return total

    def trace(self) -> Tensor:
        """Return the sum over n of tr(Lambda_n) |phi|^2, in float64."""
        sizes = self.curvature.squares().double().sum(1)  # (N,)
        return sum(((sizes * a.double().square().sum(1)).sum() for a in self.features), start=sizes.new_zeros(()))

    def gram_along(self, steps: Sequence[Tensor]) -> Tensor:  # (r, r)
        """Return the sum over n of (J_n U)^T Lambda_n (J_n U), some examples at a time."""
        c, total = self.curvature.n_outputs, torch.zeros((), dtype=torch.float64, device=steps[0].device)
        step = max(1, _CHUNK // (c * len(steps[0])))
        for start in range(0, self.n, step):
            part = self._part(slice(start, min(start + step, self.n)))
            jacobians = [HeadJacobianOf(a.double(), part.n, c) for a in part.features]
            moved = torch.stack([j.along(u.double()) for j, u in zip(jacobians, steps, strict=True)]).sum(0)
            total = total + part.curvature.between(moved)
        return total

    def _part(self, part: slice) -> HeadMoments:
        if (part.start, part.stop) == (0, self.n):
            return self
        features = [a if a.shape[0] != self.n else a[part] for a in self.features]
        return HeadMoments(features, self.curvature.part(part), part.stop - part.start)

    def _gram(self) -> Tensor:
        """Return one product of rows u (x) phi, plus one of d-weighted features."""
        total = None
        if self.curvature.vectors is not None:  # in float64: the sum of two such matrices may be nearly singular
            u = self.curvature.vectors.flatten(0, 1).double()
            k = self.curvature.vectors.shape[0]
            rows = torch.cat([_outer(u, a.expand(self.n, -1).repeat(k, 1)) for a in self.features], 1)
            total = gram(rows)
            if self.curvature.sign < 0:
                return self._with_zero_sums(total.neg_())
        if self.curvature.diagonal is not None:
            total = self._add_diagonal(total, self.curvature.diagonal.double())
        assert total is not None
        return total

    def _with_zero_sums(self, total: Tensor) -> Tensor:
        """Set each output's block with itself to minus the sum of its blocks with the others.

        This is right because rows of Lambda sum to zero. It avoids diag(d) - u u^T, a small difference of large numbers
        once the network is sure of a class.
        """
        c, blocks = self.curvature.n_outputs, [self.curvature.n_outputs * a.shape[1] for a in self.features]
        for rows in total.split(blocks):
            for part in rows.split(blocks, 1):
                block = part.unflatten(1, (c, -1)).unflatten(0, (c, -1))  # (C, I, C, J), a view
                own = block.diagonal(dim1=0, dim2=2)  # (I, J, C)
                own.zero_()
                own.sub_(block.sum(2).permute(1, 2, 0))
        return total

    def _add_diagonal(self, total: Tensor | None, d: Tensor) -> Tensor:
        """Add the part of diag(d): output c of one tensor meets only output c of another."""
        n_outputs = d.shape[1]
        widths = [a.shape[1] for a in self.features]
        ends = torch.tensor([n_outputs * w for w in widths]).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        total = d.new_zeros(ends[-1], ends[-1]) if total is None else total
        for a, i, iw in zip(self.features, starts, widths, strict=True):
            left = d.T.unsqueeze(1) * a.T  # (C, I, N)
            for b, j, jw in zip(self.features, starts, widths, strict=True):
                block = total[i : i + n_outputs * iw, j : j + n_outputs * jw].unflatten(0, (n_outputs, iw))
                block.unflatten(2, (n_outputs, jw)).diagonal(dim1=0, dim2=2).add_(
                    (left @ b.expand(self.n, -1).double()).permute(1, 2, 0)
                )
        return total


@dataclass(frozen=True)
class HeadMomentsOf(Sketchable):
    """Computes second moments of one tensor of the last layer."""

    features: Tensor  # (N, I)
    curvature: OutputCurvature
    n: int
    shared: Callable[[], Tensor]  # (O, O), computed once for weight and bias

    def outputs(self) -> Tensor:
        return self.shared().unsqueeze(0)

    def output_squares(self) -> Tensor:
        return self.curvature.squares().sum(0, keepdim=True)

    form, first, positions, inputs_left, diagonal_inputs = "kron", True, 1, False, False

    def input_rows(self) -> None:
        return None

    @property
    def weights(self) -> int:
        return self.features.shape[1] * self.curvature.n_outputs

    @property
    def rows(self) -> int:
        return self.curvature.n_outputs

    @property
    def factors(self) -> tuple[int, int, int]:
        return 1, self.weights // self.features.shape[1], self.features.shape[1]

    def inputs(self) -> tuple[Tensor, float]:
        counts = self.curvature.counts
        if counts is None:
            return precise_gram(self.features).unsqueeze(0), self.n
        return precise_gram(self.features * counts.sqrt().unsqueeze(1)).unsqueeze(0), float(counts.double().sum())

    def gram(self) -> Tensor:
        return HeadMoments([self.features], self.curvature, self.n).gram()

    def row_grams(self) -> Tensor:  # (O, I, I)
        """Return the sum over n of (Lambda_n)_oo phi phi^T, some outputs at a time."""
        phi = self.features.double()
        each = self.curvature.squares_in(torch.eye(self.rows, device=phi.device)).T  # (O, N)
        parts = each.split(max(1, _CHUNK // max(1, phi.numel())))
        return torch.cat([(part.unsqueeze(1) * phi.T) @ phi for part in parts])

    def squares(self) -> Tensor:
        return (self.curvature.squares().T @ self.features.square()).flatten()

    def squares_in(self, left: Basis | None, right: Basis | None) -> Tensor:  # (1, O, I)
        """Return the sum over n of (Q_B^T Lambda_n Q_B)_oo (Q_A^T phi)_i^2."""
        assert left is not None
        assert right is not None
        inputs = (self.features @ right.vectors[0]).square()
        return (self.curvature.squares_in(left.vectors[0]).T.to(inputs) @ inputs).unsqueeze(0)


def _outer(u: Tensor, a: Tensor) -> Tensor:  # (M, C), (M, I) -> (M, C * I)
    return (u.unsqueeze(2) * a.unsqueeze(1)).flatten(1)
