"""Layers that read one tensor share a sum on each rank, which is added up over the ranks once for each of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn

from laplace import Laplace
from laplace.distributed import buckets

N = 12


class Attention(nn.Module):
    """One head, whose queries, keys and values read one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.head = (nn.Linear(width, d) for d in (width, width, width, 2))

    def forward(self, x: Tensor) -> Tensor:  # (N, T, D) -> (N, 2)
        return self.head(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)).mean(1))


def differences(width: int, bucket: int) -> tuple[float, int]:
    """Return how much the sums differ from those of one process, and in how many places the shared ones are."""
    x, y = torch.randn(N, 3, width, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 2
    own = slice(distributed.get_rank() * N // 2, (distributed.get_rank() + 1) * N // 2)
    one = Laplace(Attention(width), "classification", "all", "kron").fit([(x, y)], group=None).posterior.fit.sums
    usual, buckets.BUCKET = buckets.BUCKET, bucket
    try:
        la = Laplace(Attention(width), "classification", "all", "kron")
        both = la.fit([(x[own], y[own])], group=distributed.group.WORLD).posterior.fit.sums
    finally:
        buckets.BUCKET = usual
    largest = {key: float(value.abs().max()) for key, value in one.items()}  # of keys' biases zero but for rounding
    worst = max(float((both[key] - one[key]).abs().max()) / max(largest[key], 1e-8) for key in one)
    return worst, len({both[f"{name}.weight/A"].data_ptr() for name in "qkv"})


@pytest.mark.parametrize("bucket", [2**12, 2**26])  # bytes: each sum in a bucket of its own, all in one
@pytest.mark.parametrize("width", [80, 520])
def test_a_shared_sum_counts_once_however_tensors_are_sent(two, width, bucket):
    for worst, places in two.run(differences, width, bucket):
        assert worst < 1e-5
        assert places == 1
