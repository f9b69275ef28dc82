"""Run a network so that it can be differentiated twice.

Some operations of torch have no second derivative (fused attention, bags of embeddings, sparse gradients), and that of
the fused weight norm is wrong. Here they are computed from operations whose second derivatives are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Give a network's outputs second derivatives. The outputs themselves do not change, up to rounding."""
    with sdpa_kernel(SDPBackend.MATH), _Replaced():
        yield


class _Replaced(TorchFunctionMode):
    """Replaces some functions by others, in this thread only."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return g v / |v|, with a norm for each index of `dim`. The fused version's second derivative is wrong."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows with dense gradients, because sparse ones cannot be differentiated."""
    return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:  # (B, T) ids, or (L,) with the offsets of B bags -> (B, D)
    """Look up rows one by one, then combine them, because the fused gradient has no derivative."""
    ids = input.flatten()
    if offsets is None:
        starts = torch.arange(0, input.numel(), input.shape[1], device=input.device)
    else:
        starts = offsets[:-1] if include_last_offset else offsets
    places = torch.arange(len(ids), device=ids.device)
    bag = torch.searchsorted(starts.contiguous(), places, right=True) - 1  # (L,); of equal starts only the last has ids
    rows = F.embedding(ids, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)
    padding = None if padding_idx is None else padding_idx % len(weight)
    share = torch.ones_like(rows[:, 0]) if padding is None else (ids != padding).to(rows)
    counts = rows.new_zeros(len(starts)).index_add(0, bag, share).unsqueeze(1)  # (B, 1)
    if mode == "max":
        with torch.no_grad():
            plain = (scale_grad_by_freq, 2, False, None, include_last_offset, padding_idx)
            chosen = torch.embedding_bag(weight, ids, starts if offsets is None else offsets, *plain)[3]  # (B, D)
        return weight.gather(0, chosen.clamp(min=0)) * (counts > 0)
    share = share if per_sample_weights is None else share * per_sample_weights.flatten()
    total = rows.new_zeros(len(starts), rows.shape[1]).index_add(0, bag, rows * share.unsqueeze(1))
    return total / counts.clamp(min=1) if mode == "mean" else total


_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._weight_norm: _weight_norm,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
}
