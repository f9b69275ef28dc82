"""Sums of few rows are kept as the rows, and are the same matrix to everyone who reads them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.linalg.few_rows import FewRows
from laplace.linalg.folded import all_finite, same, written_out
from laplace.linalg.gram_sums import GramSum


def _rows(m: int, d: int = 600, seed: int = 0) -> Tensor:
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed))


def _gram(rows: Tensor) -> Tensor:  # (1, D, D)
    return (rows.double().T @ rows.double()).unsqueeze(0)


@pytest.mark.parametrize("m", [1, 40, 600])
def test_it_is_the_matrix_to_whoever_reads_it(m):
    kept, expected = FewRows.of(_rows(m), torch.float64), _gram(_rows(m))
    assert kept.shape == expected.shape
    assert kept.dtype == expected.dtype
    for read in (
        written_out, torch.clone, lambda t: t + 0, lambda t: 0 + t, lambda t: t.to(torch.float64),
        lambda t: torch.cat([t]), lambda t: t[0].unsqueeze(0),
    ):  # fmt: skip
        torch.testing.assert_close(torch.empty_like(expected).copy_(read(kept)), expected, rtol=1e-12, atol=1e-12)
    assert type(kept + 1) is Tensor
    assert type(kept.clone()) is Tensor


def test_copies_and_pickles_keep_the_rows():
    kept = FewRows.of(_rows(7), torch.float64)
    for other in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):  # noqa: S301 - our own bytes
        assert isinstance(other, FewRows)
        assert same(kept, other)
        assert other.dtype == kept.dtype
    assert kept.nbytes == 7 * 600 * 4


def test_it_cannot_be_written_to():
    kept = FewRows.of(_rows(7), torch.float64)
    with pytest.raises(TypeError, match=r"clone\(\)"):
        kept.mul_(2)


def test_equal_rows_are_the_same_matrix_and_others_are_not():
    kept = FewRows.of(_rows(7), torch.float64)
    assert same(kept, FewRows.of(_rows(7), torch.float64))
    assert not same(kept, FewRows.of(_rows(7, seed=1), torch.float64))
    assert not same(kept, FewRows.of(_rows(7, 500), torch.float64))


@pytest.mark.parametrize(("value", "dtype", "fine"), [
    (1.0, torch.float32, True), (float("nan"), torch.float64, False), (float("inf"), torch.float64, False),
    (1e25, torch.float64, True), (1e25, torch.float32, False),
])  # fmt: skip
def test_products_that_overflow_are_noticed(value, dtype, fine):
    rows = _rows(5)
    rows[2, 3] = value
    kept = FewRows.of(rows, dtype)
    assert all_finite(kept) is fine
    assert bool(written_out(kept).isfinite().all()) is fine


@pytest.mark.parametrize("step", [1, 10, 300])
@pytest.mark.parametrize("m", [32, 600, 610, 1300])
def test_a_closed_sum_is_rows_only_if_these_are_smaller(m, step):
    rows, total = _rows(m), GramSum()
    for part in rows.split(step):
        total.add(part)
    found = total.close()
    assert isinstance(found, FewRows) == (m <= 600)  # half of 600 x 600 numbers in float64
    assert total.close() is found
    tolerance = 1e-12 if m < 1200 else 1e-5
    expected = _gram(rows)
    assert float((found - expected).abs().max()) <= tolerance * float(expected.max())


def _laplace() -> Laplace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 3))
    return Laplace(model, "classification", "all", "kron")


def _data(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 8, generator=generator), torch.randint(3, (n,), generator=generator)


def _assert_same_posterior(one: Laplace, other: Laplace) -> None:
    torch.testing.assert_close(one.log_marginal_likelihood(), other.log_marginal_likelihood(), rtol=1e-6, atol=1e-6)
    x = _data(40)[0][:5]
    torch.testing.assert_close(one(x), other(x), rtol=1e-5, atol=1e-6)


def test_fits_that_keep_rows_add_subtract_save_and_load(tmp_path):
    x, y = _data(40)
    whole, first, rest = (_laplace().fit([data]) for data in ((x, y), (x[:24], y[:24]), (x[24:], y[24:])))
    kept = {key for key, value in first.posterior.fit.sums.items() if isinstance(value, FewRows)}
    assert "0.bias/B" in kept
    first.save(tmp_path / "first")
    loaded = Laplace.load(tmp_path / "first", first.model)
    assert not any(isinstance(value, FewRows) for value in loaded.posterior.fit.sums.values())
    _assert_same_posterior(first, loaded)
    _assert_same_posterior(whole, first + rest)
    _assert_same_posterior(whole - rest, first)
    _assert_same_posterior(whole, _laplace().fit([(x[:24], y[:24])]).fit([(x[24:], y[24:])], override=False))
