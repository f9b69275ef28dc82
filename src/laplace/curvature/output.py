"""The curvature of -log p(y given f) in the outputs f, one C x C matrix per example that is never written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.algebra import gram


@dataclass(frozen=True)
class OutputCurvature:
    """Lambda_n = diag(d_n) + sign * sum_k u_kn u_kn^T.

    Every curvature that we use has this form: the Fisher of a Gaussian (d = 1) and of a categorical (d = p, u = p,
    sign -1), the empirical Fisher, Monte-Carlo and sketched ones (d = 0, the u are the vectors sent back).
    """

    diagonal: Tensor | None = None  # (N, C)
    vectors: Tensor | None = None  # (K, N, C)
    sign: int = 1

    @classmethod
    def joined(cls, parts: Sequence[OutputCurvature]) -> OutputCurvature:
        """That of several batches as of one; all parts are of one kind."""
        diagonals = [part.diagonal for part in parts if part.diagonal is not None]
        vectors = [part.vectors for part in parts if part.vectors is not None]
        return cls(
            torch.cat(diagonals) if diagonals else None, torch.cat(vectors, 1) if vectors else None, parts[0].sign
        )

    @property
    def held(self) -> int:
        """How many numbers are held per example."""
        c = 0 if self.diagonal is None else self.diagonal.shape[1]
        return c + (0 if self.vectors is None else self.vectors.shape[0] * self.vectors.shape[2])

    def squares(self) -> Tensor:  # (N, C)
        """The diagonal of Lambda_n."""
        total = self.diagonal
        if self.vectors is not None:
            outer = self.sign * self.vectors.square().sum(0)
            total = outer if total is None else total + outer
        assert total is not None
        return total

    def gram(self) -> Tensor:  # (C, C)
        """Lambda summed over the examples: one matrix product."""
        if self.vectors is None:
            assert self.diagonal is not None
            return self.diagonal.sum(0).diag()
        total = gram(self.vectors.flatten(0, 1))
        if self.sign < 0:
            total = total.neg_()
        if self.diagonal is not None:
            total.diagonal().add_(self.diagonal.sum(0))
        return total

    def dense(self) -> Tensor:  # (N, C, C)
        """Lambda_n written out, for small C."""
        total = None if self.diagonal is None else self.diagonal.diag_embed()
        if self.vectors is not None:
            outer = self.sign * torch.einsum("knc,knd->ncd", self.vectors, self.vectors)
            total = outer if total is None else total + outer
        assert total is not None
        return total
