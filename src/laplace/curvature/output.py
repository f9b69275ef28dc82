"""The curvature of -log p(y given f) in the outputs f, one C x C matrix per example that is never written out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OutputCurvature:
    """Lambda_n = diag(d_n) + sign * sum_k u_kn u_kn^T.

    Every curvature that we use has this form: the Fisher of a Gaussian (d = 1) and of a categorical (d = p, u = p,
    sign -1), the empirical Fisher, Monte-Carlo and sketched ones (d = 0, the u are the vectors sent back).
    """

    diagonal: Tensor | None = None  # (N, C)
    vectors: Tensor | None = None  # (K, N, C)
    sign: int = 1

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
        total = None if self.diagonal is None else self.diagonal.sum(0).diag()
        if self.vectors is not None:
            u = self.vectors.flatten(0, 1)
            outer = u.T @ u
            total = self.sign * outer if total is None else torch.add(total, outer, alpha=self.sign)
        assert total is not None
        return total

    def dense(self) -> Tensor:  # (N, C, C)
        """Lambda_n written out, for small C."""
        total = None if self.diagonal is None else self.diagonal.diag_embed()
        if self.vectors is not None:
            outer = self.sign * torch.einsum("knc,knd->ncd", self.vectors, self.vectors)
            total = outer if total is None else total + outer
        assert total is not None
        return total
