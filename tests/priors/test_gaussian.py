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
    terms = [
        prior.terms(theta, LAYOUT, "layerwise", prior.distances(theta, LAYOUT, "layerwise")) for prior in (one, each)
    ]
    whole = one.terms(theta, LAYOUT, "scalar", one.distances(theta, LAYOUT, "scalar"))
    for found in (*terms, whole):
        _same(found.scatter, one.scatter(theta, LAYOUT))
        _same(found.logdet, one.logdet(LAYOUT, theta))
    for found, expected, total in zip(terms[0].traces, terms[1].traces, whole.traces, strict=True):
        _same(found, expected)
        _same(found.sum().reshape(1), total)
    _same(whole.traces[0], 25 / one.precision.double().reshape(1))
    _same(whole.traces[1], 25 / one.precision.double().square().reshape(1))


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
