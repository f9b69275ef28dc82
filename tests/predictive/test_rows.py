"""Links for one row in NumPy are the links themselves, and as near to the exact integral."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from laplace.predictive.links import bridge, probit
from laplace.predictive.one_vs_rest import one_vs_rest, softmax_of_independent
from laplace.predictive.rows import MOST, row_form

FORMS = {"probit": probit, "one_vs_rest": one_vs_rest}
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-12}


def by_row(link, f: Tensor, variance: Tensor) -> Tensor:  # (C,), (C,)
    form = row_form(link, len(f), f.numpy().dtype)
    assert form is not None
    terms = form.terms(variance.double().numpy()).astype(f.numpy().dtype)
    return torch.from_numpy(form(f.tolist(), terms.tolist()))


def case(classes: int, size: float | None, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    f = 4 * torch.randn(classes, generator=rng, dtype=torch.float64)
    drawn = torch.rand(classes, generator=rng, dtype=torch.float64)
    return f.to(dtype), (10 ** (5 * drawn - 2) if size is None else size * (0.5 + drawn)).to(dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("size", [0.0, 1e-3, 0.5, 1.5, 3.0, 100.0, 1e8, None])
@pytest.mark.parametrize("name", FORMS)
def test_a_row_form_is_its_link(name, size, dtype):
    for classes in (2, 3, 10, MOST):
        f, v = case(classes, size, classes, dtype)
        found, expected = by_row(FORMS[name], f, v), FORMS[name](f[None], v[None])[0]
        assert found.dtype is dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("size", [1e-3, 0.9, 1.5, 20.0])
def test_the_integral_of_a_row_is_near_the_exact_one(size):
    for seed in range(5):
        f, u = case(5, size, seed, torch.float64)
        form = row_form(one_vs_rest, 5, np.dtype("float64"))
        assert form is not None
        found = torch.from_numpy(form(f.tolist(), u.tolist()))
        assert float((found - oracle.softmax_of_independent(f, u)).abs().max()) < 5e-4


@pytest.mark.parametrize("u", [[-1e-3, 0.0, 0.5], [1e10, 0.0, 1.5], [0.0, 0.0, 0.0]], ids=str)
def test_outputs_far_apart_and_variances_below_zero_stay_finite(u):
    f = torch.tensor([1e4, 0.0, -1e4], dtype=torch.float64)
    expected = softmax_of_independent(f.unsqueeze(0), torch.tensor([u], dtype=torch.float64).clamp(min=0))[0]
    rounded = torch.finfo(torch.float32).eps * max(1e4, max(u) ** 0.5)  # what float32 does to outputs of that size
    for dtype, tolerance in (("float64", 1e-11), ("float32", max(1e-6, rounded / 100))):
        form = row_form(one_vs_rest, 3, np.dtype(dtype))
        assert form is not None
        found = torch.from_numpy(form(f.tolist(), u)).double()
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_only_small_rows_of_known_links_have_a_form():
    assert row_form(bridge, 3, np.dtype("float32")) is None
    assert row_form(probit, MOST + 1, np.dtype("float32")) is None
