"""One precision for all weights is as many equal ones, one for each tensor."""

from __future__ import annotations

import pytest
import torch

from laplace.priors import GaussianPrior, gaussian
from laplace.weights.layout import Layout

LAYOUT = Layout(("a", "b", "c"), ((3, 4), (5,), (2, 2, 2)))


@pytest.mark.parametrize("together", [2**20, 4])  # weights that are copied at a time
@pytest.mark.parametrize("mean", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_precision_is_the_same_precision_for_each_tensor(
    dtype: torch.dtype, mean: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaussian, "_TOGETHER", together)
    theta = torch.randn(25, dtype=dtype, generator=torch.Generator().manual_seed(0))
    one = GaussianPrior(torch.tensor(2.3, dtype=dtype), torch.tensor(mean, dtype=dtype))
    each = GaussianPrior(torch.full((3,), 2.3, dtype=dtype), torch.tensor(mean, dtype=dtype))
    _same(one.scatter(theta, LAYOUT), each.scatter(theta, LAYOUT))
    _same(one.scatter(theta, LAYOUT), one.precision.double() * (theta - one.mean).double().square().sum())
    _same(one.logdet(LAYOUT, theta), each.logdet(LAYOUT, theta))
    _same(one.log_density(theta, LAYOUT), each.log_density(theta, LAYOUT))
    for groups in ("scalar", "layerwise"):
        for found, expected in zip(one.traces(LAYOUT, theta, groups), each.traces(LAYOUT, theta, groups), strict=True):
            _same(found, expected)


def test_gradients_in_one_precision_and_mean() -> None:
    theta = torch.randn(25, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    precision = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    mean = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)

    def density(theta: torch.Tensor, precision: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return GaussianPrior(precision, mean).log_density(theta, LAYOUT)

    assert torch.autograd.gradcheck(density, (theta, precision, mean))


def _same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
