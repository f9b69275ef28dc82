"""softmax and log_softmax equal torch's, whichever way the numbers lie in memory."""

from __future__ import annotations

import pytest
import torch

from laplace.linalg.softmax import log_softmax, softmax

SHAPES = [(0, 3), (1, 10), (31, 10), (32, 10), (1000, 1), (500, 32), (500, 33), (7, 40, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_torch_and_contiguous(shape, dtype):
    f = 30 * torch.randn(shape, dtype=dtype)
    for ours, theirs in ((softmax, f.softmax(-1)), (log_softmax, f.log_softmax(-1))):
        torch.testing.assert_close(ours(f), theirs, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=1e-6)
        assert ours(f).is_contiguous()


def test_draws_that_lie_side_by_side():
    f = torch.randn(7, 5, 100).movedim(2, 0)
    assert f.stride(0) == 1
    torch.testing.assert_close(softmax(f), f.softmax(-1))


def test_gradients_reach_the_logits():
    f = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f: (softmax(f) * log_softmax(f)).sum(0), f)
