"""Estimate determinants and traces of the covariance A^-1 from probes, with a preconditioner P near A.

A probe is a random w with covariance P. With y = P^-1 w and x = A^-1 w, E[x y^T] = A^-1 and E[y y^T] = P^-1. So
tr(P^-1_gg), which is known, plus the mean of (x - y)_g . y_g estimates tr(Sigma_gg) with little variance, and log det P
plus the mean of Lanczos' quadratures estimates log det A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.errors import UnsupportedError
from laplace.linalg.conjugate_gradients import Probed
from laplace.structures.blockdiag import BlockDiagonalGaussian
from laplace.structures.gaussian import Traces
from laplace.structures.leading import LowRankPreconditioner
from laplace.weights.layout import Layout


@dataclass(frozen=True)
class Estimates:
    """Holds what the probes say about the determinant and the covariance.

    Attributes:
        log_ratio: log det A - log det P, ().
        error: its standard error.
        t: tr(Sigma_bb) of each tensor, (B,).
        m: |Sigma_bc|^2, (B, B), or its diagonal, (B,), to first order in what the preconditioner lacks.
        sigma: the covariance, (P, P), if all unit vectors were probed.
    """

    log_ratio: Tensor
    error: float
    t: Tensor
    m: Tensor
    sigma: Tensor | None

    @classmethod
    def of(
        cls,
        found: Sequence[tuple[Tensor, Probed]],
        inner: BlockDiagonalGaussian | LowRankPreconditioner,
        layout: Layout,
        exact: bool,
    ) -> Estimates:
        """Return the estimates from each probe's y = P^-1 w and its run of conjugate gradients."""
        logs = torch.cat([probed.quadrature(torch.log) for _, probed in found])
        t0, m0 = inner.traces("layerwise")
        t, m, sigma = torch.zeros_like(t0), torch.zeros_like(t0), None
        for y, probed in found:
            lacking = probed.x - y
            t += _by_tensor(lacking * y, layout)
            m += 2 * _by_tensor(lacking * inner.covariance_times(y), layout)
            if exact:
                part = probed.x.double().T @ y.double() / len(logs)
                sigma = part if sigma is None else sigma + part
        t = t0 + t / len(logs)
        sizes = torch.tensor(layout.sizes, dtype=t.dtype, device=t.device)
        own = (m0 if m0.dim() == 1 else m0.diagonal()) + m / len(logs)
        own = torch.maximum(own, t.square() / sizes)  # which it cannot be below
        error = 0.0 if exact else float(logs.std()) / len(logs) ** 0.5
        squares = own if m0.dim() == 1 else m0 - m0.diagonal().diag() + own.diag()
        return cls(logs.mean(), error, t, squares, sigma)

    def traces(self, groups: str, layout: Layout) -> Traces:
        """Return tr(Sigma_gg) and |Sigma_gh|^2, as `Gaussian.traces` does."""
        if self.sigma is None:
            if groups == "diag":
                raise UnsupportedError(
                    "hessian_structure='matrix_free' estimates traces of tensors, not of single weights. Take "
                    "prior_structure='layerwise' or 'scalar'."
                )
            return (self.t, self.m) if groups == "layerwise" else (self.t.sum(0, True), self.m.sum().reshape(1))
        p = len(self.sigma)
        sizes = {"scalar": [p], "layerwise": layout.sizes, "diag": [1] * p}[groups]
        rows = [part.split(sizes, 1) for part in self.sigma.split(sizes)]
        m = torch.stack([torch.stack([block.square().sum() for block in row]) for row in rows])
        return torch.stack([part.sum() for part in self.sigma.diagonal().split(sizes)]), m


def _by_tensor(rows: Tensor, layout: Layout) -> Tensor:  # (S, P) -> (B,), float64
    return torch.stack([part.sum(dtype=torch.float64) for part in layout.split(rows)])
