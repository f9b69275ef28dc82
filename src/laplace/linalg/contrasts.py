"""Contrasts of outputs, x_c - mean of x: P x with P = I - 1 1^T / C. A shift that all have in common is not in them."""

from __future__ import annotations

import torch
from torch import Tensor


def centred(x: Tensor, dim: int = -1) -> Tensor:
    """Return P x."""
    return x - x.mean(dim, keepdim=True)


def centred_twice(matrix: Tensor) -> Tensor:  # (..., C, C)
    """Return P S P."""
    return centred(centred(matrix), -2)


def variances_if_independent(variance: Tensor) -> Tensor:  # (..., C) -> (..., C)
    """Return the variances of contrasts of independent numbers: (1 - 2/C) v_c + sum(v) / C^2."""
    c = variance.shape[-1]
    return (1 - 2 / c) * variance + variance.sum(-1, keepdim=True) / c**2


def covariances_if_independent(variance: Tensor) -> Tensor:  # (..., C) -> (..., C, C)
    """Return the covariances of contrasts of independent numbers: P diag(v) P."""
    c = variance.shape[-1]
    mean = variance.sum(-1)[..., None, None] / c**2
    return torch.diag_embed(variance) - (variance.unsqueeze(-1) + variance.unsqueeze(-2)) / c + mean


def as_if_independent(variance: Tensor) -> Tensor:  # (N, C) -> (N, C)
    """Return u such that independent outputs with variances u have contrasts with these variances.

    A contrast of independent outputs has the variance (1 - 2/C) u_c + sum(u) / C^2. Negative u are set to 0.
    """
    c = variance.shape[-1]
    if c == 2:
        return 2 * variance
    shared = variance.sum(-1, keepdim=True)  # sum(u) (1 - 1/C)
    return (torch.sub(variance, shared, alpha=1 / (c * (c - 1))) / (1 - 2 / c)).clamp(min=0)
