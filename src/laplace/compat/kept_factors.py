"""Read the sums that a fit keeps as laplace-torch's matrices, and make sums of such matrices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laplace.compat.matrix import Kron, KronDecomposed
from laplace.errors import InputError
from laplace.posterior.posterior import Fit, Posterior
from laplace.structures.base import Sums
from laplace.structures.blockdiag import by_tensor

__all__ = ["factors_of", "precision_of", "sums_of"]


def factors_of(fit: Fit) -> Kron:
    """Return the factors of H at unit noise: [B, A] of a weight, [H] of a bias or a tensor without Kronecker form."""
    parts = by_tensor(fit.whole_sums("la.H_facs", "Fit without shard_factors=True."), fit.layout)
    return Kron([_factors(parts[name]) for name in fit.layout.names])


def precision_of(posterior: Posterior) -> KronDecomposed:
    """Return the posterior precision s H + D of structure 'kron' with one prior precision per tensor or for all."""
    fit = posterior.fit
    scaled = factors_of(fit) * posterior.scale.detach()
    typed = Kron([[f.to(fit.mean.dtype) for f in block] for block in scaled.kfacs])
    deltas = [part[0] for part in fit.layout.split(posterior.prior.diagonal(fit.layout, fit.mean))]
    return typed.decompose(damping=bool(getattr(fit.structure, "damping", False))) + torch.stack(deltas)


def sums_of(fit: Fit, curvature: Tensor | Kron | KronDecomposed) -> Sums:
    """Return the sums of a fit of structure 'full', 'diag' or 'kron' whose curvature at unit noise is another one.

    Raises:
        InputError: it is not (P, P) for 'full', (P,) for 'diag', or one block per tensor for 'kron'.
    """
    layout, kind = fit.layout, fit.structure.name
    if isinstance(curvature, Tensor):
        p = layout.n_params
        if tuple(curvature.shape) != {"full": (p, p), "diag": (p,)}.get(kind):
            raise InputError(f"H has shape {tuple(curvature.shape)}, which is no curvature of structure {kind!r} here.")
        whole = curvature.detach().double().to(fit.mean.device)
        if kind == "full":
            return {"H": whole}
        return {f"{name}/diag": part for name, part in zip(layout.names, layout.split(whole), strict=True)}
    blocks = _undone(curvature) if isinstance(curvature, KronDecomposed) else curvature.kfacs
    if kind != "kron" or len(blocks) != len(layout.names):
        raise InputError(f"H has {len(blocks)} Kronecker blocks, which is no curvature of structure {kind!r} here.")
    before = by_tensor(fit.sums, layout)
    sums: Sums = {}
    for name, factors in zip(layout.names, blocks, strict=True):
        own = [f.detach().double().to(fit.mean.device) for f in factors]
        if len(own) == 1:
            sums[f"{name}/{'H' if own[0].dim() == 2 else 'diag'}"] = own[0]
            continue
        left = "A_left" in before[name]
        b, a = reversed(own) if left else own
        sums[f"{name}/{'A_left' if left else 'A'}"] = a.unsqueeze(0)
        sums[f"{name}/{'B' if b.dim() == 2 else 'b'}"] = b.unsqueeze(0)
        sums[f"{name}/count"] = torch.ones((), dtype=torch.float64, device=a.device)
    return sums


def _undone(matrix: KronDecomposed) -> list[list[Tensor]]:
    """Return the factors whose eigendecompositions these are."""
    if matrix.deltas.any():
        raise InputError("H is the curvature alone; this matrix has a prior precision added to it. Give one like la.H.")
    pairs = zip(matrix.eigenvectors, matrix.eigenvalues, strict=True)
    return [[(q * v) @ q.mT for q, v in zip(qs, vs, strict=True)] for qs, vs in pairs]


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
