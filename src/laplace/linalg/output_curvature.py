"""Represent the curvature of -log p(y given f) in the outputs f: one C x C matrix per example, never written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.linalg.symmetric import gram


@dataclass(frozen=True)
class OutputCurvature:
    """Holds Lambda_n = diag(d_n) + sign * sum_k u_kn u_kn^T. With sign -1 each row of it sums to zero.

    Every curvature that we use has this form: the Fisher of a Gaussian (d = 1) and of a categorical (d = p, u = p, sign
    -1), and the empirical, Monte-Carlo and sketched Fisher (d = 0, the u are the vectors sent back).

    Attributes:
        diagonal: d, (N, C); None for zero.
        vectors: u, (K, N, C); None where there are none.
        sign: 1 or -1.
        counts: How often each example counts, (N,). d and u already include it; means over the examples need it.
        together: Whether u_k over all rows is one vector (an estimate or a score), so that the positions of one example
            must be sent back together.
    """

    diagonal: Tensor | None = None  # (N, C)
    vectors: Tensor | None = None  # (K, N, C)
    sign: int = 1
    counts: Tensor | None = None  # (N,)
    together: bool = False

    @classmethod
    def joined(cls, parts: Sequence[OutputCurvature]) -> OutputCurvature:
        """Return the curvature of several batches as one batch. All parts have the same form."""
        diagonals = [part.diagonal for part in parts if part.diagonal is not None]
        vectors = [part.vectors for part in parts if part.vectors is not None]
        joint = torch.cat(vectors, 1) if vectors else None
        if joint is not None and [d.data_ptr() for d in diagonals] == [v.data_ptr() for v in vectors]:
            return cls(joint[0], joint, parts[0].sign)  # softmax: d and u are the same probabilities
        counts = None
        if any(part.counts is not None for part in parts):
            counts = torch.cat([part._some.new_ones(part.n) if part.counts is None else part.counts for part in parts])
        return cls(torch.cat(diagonals) if diagonals else None, joint, parts[0].sign, counts, parts[0].together)

    def part(self, part: slice | Tensor) -> OutputCurvature:
        """Return the curvature of some examples."""
        diagonal, counts = (None if t is None else t[part] for t in (self.diagonal, self.counts))
        vectors = None if self.vectors is None else self.vectors[:, part]
        return replace(self, diagonal=diagonal, vectors=vectors, counts=counts)

    def weighted(self, weights: Tensor | None) -> OutputCurvature:  # (N,)
        """Return weight_n Lambda_n."""
        if weights is None:
            return self
        weights = weights.to(self._some)
        diagonal = None if self.diagonal is None else weights.unsqueeze(1) * self.diagonal
        vectors = None if self.vectors is None else weights.sqrt().unsqueeze(1) * self.vectors
        return replace(self, diagonal=diagonal, vectors=vectors, counts=weights)

    @property
    def n(self) -> int:
        """Return the number of examples, N."""
        return self._some.shape[-2]

    @property
    def held(self) -> int:
        """Return how many numbers are stored per example."""
        c = 0 if self.diagonal is None else self.diagonal.shape[1]
        return c + (0 if self.vectors is None else self.vectors.shape[0] * self.vectors.shape[2])

    @property
    def n_outputs(self) -> int:
        """Return the number of outputs, C."""
        return self._some.shape[-1]

    @property
    def device(self) -> torch.device:
        """Return the device of its tensors."""
        return self._some.device

    @property
    def _some(self) -> Tensor:
        some = self.vectors if self.diagonal is None else self.diagonal
        assert some is not None
        return some

    def squares(self) -> Tensor:  # (N, C)
        """Return the diagonal of Lambda_n."""
        total = self.diagonal
        if self.vectors is not None:
            outer = self.sign * self.vectors.square().sum(0)
            total = outer if total is None else total + outer
        assert total is not None
        return total

    def times(self, m: Tensor) -> Tensor:  # (S, N, C)
        """Return Lambda_n m for each of S vectors per example."""
        if self.vectors is None:
            assert self.diagonal is not None
            return self.diagonal * m
        if self.sign < 0:  # Lambda maps constants to zero: subtract one first, so nothing cancels where p is nearly 1
            assert self.diagonal is not None
            m = m - m.gather(-1, self.diagonal.argmax(-1, keepdim=True).expand(*m.shape[:-1], 1))
        u = self.vectors.to(m)
        outer = self.sign * torch.einsum("knc,snk->snc", u, torch.einsum("knc,snc->snk", u, m))
        return outer if self.diagonal is None else self.diagonal * m + outer

    def squares_in(self, basis: Tensor) -> Tensor:  # (C, C) -> (N, C)
        """Return the diagonal of Q^T Lambda_n Q.

        In float64: it is a difference of nearly equal numbers where the network is sure of a class.
        """
        q = basis.double()
        if self.sign < 0:  # rows of Lambda sum to zero: a constant added to a column of Q changes nothing
            q = q - q.mean(0)
        total = None if self.diagonal is None else self.diagonal.double() @ q.square()
        if self.vectors is not None:
            outer = self.sign * (self.vectors.double() @ q).square().sum(0)
            total = outer if total is None else total + outer
        assert total is not None
        return total.clamp(min=0)

    def gram(self) -> Tensor:  # (C, C)
        """Return Lambda summed over the examples, by one matrix product."""
        if self.vectors is None:
            assert self.diagonal is not None
            return self.diagonal.sum(0).diag()
        total = gram(self.vectors.flatten(0, 1))
        if self.sign < 0:  # rows of Lambda sum to zero, and so do those of the sum: no cancellation on the diagonal
            total = total.neg_().fill_diagonal_(0)
            total.diagonal().sub_(total.sum(1))
        elif self.diagonal is not None:
            total.diagonal().add_(self.diagonal.sum(0))
        return total

    def root(self) -> Tensor:  # (K, N, C)
        """Return vectors v_k with sum_k v_k v_k^T = Lambda, which are sent back through the network.

        For softmax there are C - 1 of them, since its Lambda is singular. They are the columns of the Cholesky factor,
        which

            diag(p) - p p^T

        has in closed form. With s_j the sum of p_i over i > j, column j is sqrt(p_j / (s_{j-1} s_j)) times s_j at j,
        and -p_i below. Nothing cancels, however sure the network is of a class.
        """
        if self.diagonal is None:
            assert self.vectors is not None
            return self.vectors
        if self.vectors is None:
            return self.diagonal.sqrt().diag_embed().permute(1, 0, 2)
        p = self.diagonal
        sums = p.flip(-1).cumsum(-1).flip(-1).T.clamp(min=torch.finfo(p.dtype).tiny)  # (C, N), sum from class j on
        factor = (p.T[:-1] / sums[:-1]).sqrt() * sums[1:].rsqrt()
        below = p.new_ones(p.shape[-1] - 1, p.shape[-1]).triu_(1).unsqueeze(1)
        v = (below * p).mul_(-factor.unsqueeze(-1))
        v.diagonal(dim1=0, dim2=2).copy_((factor * sums[1:]).T)
        return v

    def between(self, x: Tensor) -> Tensor:  # (r, N, C) -> (r, r)
        """Return the sum over n of x_n Lambda_n x_n^T, without forming a root."""
        total, diagonal = x.new_zeros(len(x), len(x)), self.diagonal
        if diagonal is not None and self.vectors is not None and self.sign < 0:  # maps constants to zero: see times
            x = x - x.gather(-1, diagonal.argmax(-1, keepdim=True).expand(*x.shape[:-1], 1))
            u = self.vectors.to(x)
            diagonal = (u * u.sum(-1, keepdim=True)).sum(0)  # so that rows of Lambda sum to zero, as p may not
        if diagonal is not None:
            total = total + (x * diagonal).flatten(1) @ x.flatten(1).T
        if self.vectors is not None:
            inner = torch.einsum("rnc,knc->rnk", x, self.vectors.to(x)).flatten(1)
            total = total + self.sign * inner @ inner.T
        return total

    def dense(self) -> Tensor:  # (N, C, C)
        """Return Lambda_n as full matrices. Only for small C."""
        total = None if self.diagonal is None else self.diagonal.diag_embed()
        if self.vectors is not None:
            outer = self.sign * torch.einsum("knc,knd->ncd", self.vectors, self.vectors)
            total = outer if total is None else total + outer
        assert total is not None
        return total
