"""The exact Hessian of -log p(D given theta) at unit noise, by Hessian-vector products: one per weight.

Unlike the others it is no sum of squares, and may have negative eigenvalues away from an optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laplace.errors import UnsupportedError, quiet

LIMIT = 10_000  # weights up to which it is computed


class HessianMoments:
    """H itself, where other curvatures have second moments of gradients."""

    held = 2**62

    def __init__(self, h: Tensor, sizes: Sequence[int]) -> None:  # (P, P), or its diagonal (P,)
        self.h, self.sizes = h, sizes

    @property
    def parameters(self) -> list[HessianOf]:
        diagonal = self.h if self.h.dim() == 1 else self.h.diagonal()
        return [HessianOf(part) for part in diagonal.split(list(self.sizes))]

    def gram(self) -> Tensor:
        return self.h

    def gram_along(self, steps: Sequence[Tensor]) -> Tensor:
        u = torch.cat([*steps], 1).to(self.h)
        return u @ self.h @ u.T

    def merged(self, others: Sequence[Any]) -> HessianMoments:
        raise NotImplementedError("a Hessian is taken before the next")


class HessianOf:
    """The Hessian's diagonal for one parameter."""

    form, first = "dense", True

    def __init__(self, diagonal: Tensor) -> None:
        self.diagonal, self.weights = diagonal, len(diagonal)

    def squares(self) -> Tensor:
        return self.diagonal


def hessian(loss: Tensor, parameters: Sequence[Tensor], diagonal: bool, chunk: int) -> Tensor:
    """(P, P), or (P,) with `diagonal`: P Hessian-vector products, `chunk` at a time where they can be batched."""
    size = sum(p.numel() for p in parameters)
    if size > LIMIT:
        raise UnsupportedError(
            f"an exact Hessian of {size:,} weights needs as many Hessian-vector products; the limit is {LIMIT:,}. Take "
            "curvature='ggn', or freeze layers with requires_grad_(False)."
        )
    slopes = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    flat = torch.cat([(p * 0 if g is None else g).reshape(-1) for p, g in zip(parameters, slopes, strict=True)])
    rows = []
    for start in range(0, size, chunk):
        index = torch.arange(start, min(start + chunk, size), device=flat.device)
        part = _products(flat, parameters, torch.nn.functional.one_hot(index, size).to(flat))
        rows.append(part.gather(1, index.unsqueeze(1)).squeeze(1) if diagonal else part)
    return torch.cat(rows).detach()


def _products(flat: Tensor, parameters: Sequence[Tensor], vectors: Tensor) -> Tensor:  # (K, P) -> (K, P)
    """Hessian times each vector: all at once, or one after the other where an operation has no batching rule."""
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    try:
        with quiet():
            found = torch.autograd.grad(flat, parameters, vectors, is_grads_batched=True, **options)
    except RuntimeError:
        rows = [torch.autograd.grad(flat, parameters, v, **options) for v in vectors]
        found = [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]  # type: ignore[arg-type]
    parts = [
        p.new_zeros(len(vectors), p.numel()) if g is None else g.reshape(len(vectors), -1)
        for p, g in zip(parameters, found, strict=True)
    ]
    return torch.cat(parts, 1)
