"""A network in float64 is not told to take float64, and many equal rows are no reason to warn."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import LaplaceError, LaplaceWarning
from laplace.linalg.symmetric import check_positive, clip
from laplace.predictive.outputs import require_finite

DTYPES = {torch.float32: True, torch.float64: False}  # whether model.double() would help


@pytest.mark.parametrize(("dtype", "helps"), DTYPES.items())
def test_negative_eigenvalues(dtype, helps):
    with pytest.warns(LaplaceWarning, match="more than rounding") as said:
        clip(torch.tensor([-0.1, 1.0], dtype=torch.float64), dtype)
    assert ("model.double()" in str(said[0].message)) is helps


@pytest.mark.parametrize(("dtype", "helps"), DTYPES.items())
def test_values_out_of_range(dtype, helps):
    infinite = torch.full((2, 2), torch.inf, dtype=dtype)
    for call in (lambda: check_positive(infinite), lambda: require_finite(infinite, "the variance")):
        with pytest.raises(LaplaceError) as refused:
            call()
        assert ("model.double()" in str(refused.value)) is helps


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_value_out_of_range_among_many(value):
    with pytest.raises(LaplaceError, match="out of range"):
        check_positive(torch.tensor([[1.0, value], [2.0, 3.0]]))


def test_positive_values_pass_and_others_say_by_how_much():
    check_positive(torch.tensor([1e-30, 2.0]))
    check_positive(torch.empty(0, 3))
    for smallest in (0.0, -0.5):
        with pytest.raises(LaplaceError, match=f"smallest eigenvalue is {smallest:.3g}, its largest 2"):
            check_positive(torch.tensor([smallest, 2.0]))
    with pytest.raises(LaplaceError, match="not positive definite"):
        check_positive(torch.tensor([1e-9, 2.0]), rounded=True)


def test_sums_that_overflow():
    model, x = nn.Linear(2, 1).double(), torch.full((3, 2), 1e200, dtype=torch.float64)
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(LaplaceError, match="about 1") as refused:
        Laplace(model, "regression", "all", "full").fit([(x, torch.zeros(3, 1, dtype=torch.float64))])
    assert "model.double()" not in str(refused.value)


def test_fifty_thousand_equal_rows_of_a_float64_network_are_quiet():
    """Equal rows round alike, which leaves the most negative eigenvalues: 1e-13 of the largest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.full((50_000, 6), 0.1).double(), torch.randn(50_000, 2).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la = Laplace(model, "regression", "all", "full").fit(list(zip(x.split(5_000), y.split(5_000), strict=True)))
        assert la.clipped.lowest > -1e-12
        la(x[:3])


def test_a_prior_out_of_range_in_float32():
    x, y = torch.randn(3, 2), torch.randn(3, 1)
    la = Laplace(nn.Linear(2, 1), "regression", "all", "full", prior_precision=1e-300).fit([(x, y)])
    with pytest.raises(LaplaceError, match=r"model\.double\(\)"):
        la(x)
