"""Keep a wide sum of outer products, A = sum of x x^T, as a product A S with few fixed columns S.

Products of two batches add, as A itself does. From them the Nystroem approximation (Tropp, Yurtsever, Udell and Cevher,
2017) follows: A S (S^T A S)^-1 S^T A, which has the largest eigenvalues of A nearly right, and is A itself if the rank
of A is at most that of the sketch. What it leaves of the trace is spread evenly over all other directions.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import torch
from torch import Tensor


def columns_for(d: int, rank: int, like: Tensor) -> Tensor:  # (D, R)
    """Return S: random signs that depend on the sizes alone, so that sums of other days and machines fit together."""
    return torch.from_numpy(_signs(d, rank)).to(like)


@cache
def _signs(d: int, rank: int) -> np.ndarray:
    drawn = random.Random(rank).getrandbits(8 * ((d * rank + 7) // 8))  # noqa: S311 - the same in every version of Python
    bits = np.unpackbits(np.frombuffer(drawn.to_bytes((d * rank + 7) // 8, "little"), np.uint8))[: d * rank]
    return (2.0 * bits - 1.0).reshape(d, rank).astype(np.float32)


def sketched(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:  # (Gr, D, D) -> (Gr, D, R), (Gr,)
    """Return A S and the trace of A."""
    return gram @ columns_for(gram.shape[-1], rank, gram), gram.diagonal(dim1=1, dim2=2).sum(1)


def sketched_rows(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:  # (Gr, M, D) -> (Gr, D, R), (Gr,)
    """Return A S and the trace of A = sum of x x^T over rows x, without forming A."""
    return rows.mT @ (rows @ columns_for(rows.shape[-1], rank, rows)), rows.square().sum((1, 2))


def nystroem(sketch: Tensor, trace: Tensor) -> tuple[Tensor, Tensor]:  # (Gr, D, R), (Gr,) -> (Gr, D), (Gr, D, R)
    """Return all D eigenvalues, the R leading ones first and the others equal, and the R leading eigenvectors.

    In float64. The leading values are in no order that matters.
    """
    found = [_one(own.double(), float(t)) for own, t in zip(sketch, trace, strict=True)]
    return torch.stack([values for values, _ in found]), torch.stack([vectors for _, vectors in found])


def _one(sketch: Tensor, trace: float) -> tuple[Tensor, Tensor]:  # (D, R) -> (D,), (D, R)
    d, rank = sketch.shape
    s = columns_for(d, rank, sketch)
    shift = torch.finfo(sketch.dtype).eps * d**0.5 * float(sketch.norm())  # of A, so that S^T A S has a root
    if shift == 0:
        return sketch.new_zeros(d), torch.linalg.qr(s).Q
    core = s.T @ (sketch + shift * s)
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    root = vectors * values.clamp(min=shift).rsqrt()
    u, singular, _ = torch.linalg.svd((sketch + shift * s) @ root, full_matrices=False)
    leading = (singular.square() - shift).clamp(min=0)
    rest = max(0.0, trace - float(leading.sum())) / (d - rank)
    return torch.cat([leading, leading.new_full((d - rank,), rest)]), u


def reflections(vectors: Tensor) -> tuple[Tensor, Tensor]:  # (Gr, D, R) -> (Gr, D, R), (Gr, R, R)
    """Return V and T such that Q = I - V T V^T is orthogonal, and its first R columns are the vectors up to signs.

    A product of R Householder reflections: an orthonormal basis of all D dimensions in D R numbers.
    """
    packed, tau = torch.geqrf(vectors)
    d, rank = vectors.shape[-2:]
    v = packed.tril(-1) + torch.eye(d, rank, dtype=vectors.dtype, device=vectors.device)
    overlap, t = v.mT @ v, torch.zeros_like(packed[..., :rank, :])
    for i in range(rank):
        t[..., i, i] = tau[..., i]
        before = t[..., :i, :i] @ overlap[..., :i, i : i + 1]
        t[..., :i, i] = -tau[..., i : i + 1] * before.squeeze(-1)
    return v, t
