"""Read the Kronecker factors that structure 'kron' keeps, as laplace-torch's matrices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laplace.compat.matrix import Kron, KronDecomposed
from laplace.posterior.posterior import Fit, Posterior
from laplace.structures.blockdiag import by_tensor

__all__ = ["factors_of", "precision_of"]


def factors_of(fit: Fit) -> Kron:
    """Return the factors of H at unit noise: [B, A] of a weight, [H] of a bias or a tensor without Kronecker form."""
    parts = by_tensor(fit.sums, fit.layout)
    return Kron([_factors(parts[name]) for name in fit.layout.names])


def precision_of(posterior: Posterior) -> KronDecomposed:
    """Return the posterior precision s H + D of structure 'kron' with one prior precision per tensor or for all."""
    fit = posterior.fit
    scaled = factors_of(fit) * posterior.scale.detach()
    typed = Kron([[f.to(fit.mean.dtype) for f in block] for block in scaled.kfacs])
    deltas = [part[0] for part in fit.layout.split(posterior.prior.diagonal(fit.layout, fit.mean))]
    return typed.decompose(damping=bool(getattr(fit.structure, "damping", False))) + torch.stack(deltas)


def _factors(sums: Mapping[str, Tensor]) -> list[Tensor]:
    if "H" in sums or "diag" in sums:
        return [sums["H"] if "H" in sums else sums["diag"].flatten()]
    left = "A_left" in sums
    inputs = sums["A_left" if left else "A"]
    inputs = inputs / sums["count"].to(inputs)
    outputs = sums["B"] if "B" in sums else sums["b"]
    if outputs.shape[0] > 1:  # groups of a convolution: blocks of their own
        pairs = [(b, a) for b, a in zip(outputs, inputs.expand(len(outputs), *inputs.shape[1:]), strict=True)]
        return [torch.block_diag(*[torch.kron(_matrix(b), _matrix(a)) for b, a in pairs])]
    b, a = outputs[0], inputs[0]
    if a.numel() == 1:
        return [b * a.reshape(())]
    return [a, b] if left else [b, a]


def _matrix(factor: Tensor) -> Tensor:
    return factor.diag() if factor.dim() == 1 else factor
