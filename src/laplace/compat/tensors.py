"""Provide laplace-torch's functions on tensors and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from laplace.compat.enums import PriorStructure
from laplace.errors import OptionError

__all__ = [
    "SoDSampler",
    "block_diag",
    "diagonal_add_scalar",
    "expand_prior_precision",
    "fix_prior_prec_structure",
    "invsqrt_precision",
    "kron",
    "normal_samples",
    "parameters_per_layer",
    "symeig",
]


def parameters_per_layer(model: nn.Module) -> list[int]:
    """Return the number of weights of each parameter tensor.

    Args:
        model: the network.
    """
    return [p.numel() for p in model.parameters()]


def invsqrt_precision(M: Tensor) -> Tensor:
    """Return a lower triangular S with S S^T = M^-1.

    Args:
        M: a precision, (P, P).
    """
    reversed_factor = torch.linalg.cholesky(M.flip(-2, -1)).flip(-2, -1)  # M = U U^T with U upper triangular
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    return torch.linalg.solve_triangular(reversed_factor, eye, upper=True).mT


def kron(t1: Tensor, t2: Tensor) -> Tensor:
    """Return the Kronecker product of two matrices.

    Args:
        t1: (a, b).
        t2: (c, d).
    """
    return torch.kron(t1.contiguous(), t2.contiguous())


def diagonal_add_scalar(X: Tensor, value: float | Tensor) -> Tensor:
    """Return X with a number added to its diagonal.

    Args:
        X: (n, n).
        value: the number.
    """
    return X + value * torch.eye(X.shape[0], dtype=X.dtype, device=X.device)


def symeig(M: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, those below zero set to zero, and eigenvectors of a symmetric matrix.

    Args:
        M: (n, n).
    """
    values, vectors = torch.linalg.eigh(M, UPLO="U")
    return values.clamp(min=0), vectors


def block_diag(blocks: Sequence[Tensor]) -> Tensor:
    """Return the block-diagonal matrix.

    Args:
        blocks: square matrices.
    """
    return torch.block_diag(*blocks)


class SoDSampler(Sampler[int]):
    """Lists M of N indices, drawn once.

    Args:
        N: how many there are.
        M: how many are drawn.
        seed: what they are drawn by.
    """

    def __init__(self, N: int, M: int, seed: int = 0) -> None:
        drawn = torch.randperm(N, generator=torch.Generator().manual_seed(seed))[:M]
        self.indices: list[int] = drawn.tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def expand_prior_precision(prior_prec: Tensor, model: nn.Module) -> Tensor:  # (P,)
    """Return one prior precision per trainable weight.

    Args:
        prior_prec: one number, one per parameter tensor, or one per weight.
        model: the network.

    Raises:
        OptionError: it has another length.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    sizes = [p.numel() for p in trainable]
    flat = prior_prec.reshape(-1).to(trainable[0])
    if len(flat) in (1, sum(sizes)):
        return flat.expand(sum(sizes))
    if len(flat) != len(sizes):
        raise OptionError(
            f"prior_prec has {len(flat)} values; give 1, {len(sizes)} (one per tensor) or {sum(sizes)} (per weight)."
        )
    return flat.repeat_interleave(torch.tensor(sizes, device=flat.device))


def fix_prior_prec_structure(
    prior_prec_init: float, prior_structure: PriorStructure | str, n_layers: int, n_params: int, device: Any, dtype: Any
) -> Tensor:
    """Return a prior precision of the shape of a structure.

    Args:
        prior_prec_init: the value.
        prior_structure: 'scalar', 'layerwise' or 'diag'.
        n_layers: number of parameter tensors.
        n_params: number of weights.
        device: where it is made.
        dtype: its dtype.

    Raises:
        OptionError: the structure is unknown.
    """
    lengths = {"scalar": 1, "layerwise": n_layers, "diag": n_params}
    length = lengths.get(str(prior_structure))
    if length is None:
        raise OptionError(f"prior_structure={prior_structure!r} is unknown. Valid: {', '.join(lengths)}.")
    return torch.full((length,), prior_prec_init, device=device, dtype=dtype)


def normal_samples(mean: Tensor, var: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw from normal distributions, one per example.

    Args:
        mean: (N, C).
        var: variances, (N, C), or covariances, (N, C, C).
        n_samples: how many draws, S.
        generator: the only source of random numbers, if given.

    Returns:
        (S, N, C).

    Raises:
        OptionError: the shapes do not fit.
    """
    if mean.dim() != 2 or var.shape[:2] != mean.shape or var.dim() not in (2, 3):
        raise OptionError(f"mean {tuple(mean.shape)} and var {tuple(var.shape)}: give (N, C), and (N, C) or (N, C, C).")
    noise = torch.randn(n_samples, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
    if var.dim() == 2:
        return mean + var.sqrt() * noise
    return mean + torch.einsum("nij,snj->sni", torch.linalg.cholesky(var), noise)


def _is_batchnorm(module: nn.Module) -> bool:
    return isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))


def _is_valid_scalar(scalar: Any) -> bool:
    return isinstance(scalar, (int, float)) or (isinstance(scalar, Tensor) and scalar.numel() == 1)
