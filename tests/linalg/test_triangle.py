"""Wide sums are kept as one triangle, and are the whole matrix to everyone who reads them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from laplace.linalg.folded import all_finite, same, written_out
from laplace.linalg.triangle import Triangle


def _rows(m: int, d: int = 600, seed: int = 0) -> Tensor:
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed))


def _gram(rows: Tensor) -> Tensor:  # (D, D)
    return rows.double().T @ rows.double()


def _sum(*parts: Tensor, dtype: torch.dtype = torch.float64) -> Triangle:
    total = Triangle.zeros(parts[0].shape[1], torch.zeros(0, dtype=dtype))
    for rows in parts:
        total.add_rows(rows.to(dtype))
    return total


@pytest.mark.parametrize("d", [512, 600, 1031])
def test_it_is_the_sum_to_whoever_reads_it_in_nine_sixteenths_of_its_memory(d):
    kept, expected = _sum(_rows(40, d), _rows(3, d, 1)), (_gram(_rows(40, d)) + _gram(_rows(3, d, 1))).unsqueeze(0)
    for read in (written_out, torch.clone, lambda t: t + 0, lambda t: t[0].unsqueeze(0), lambda t: torch.cat([t])):
        torch.testing.assert_close(torch.empty_like(expected).copy_(read(kept)), expected, rtol=1e-12, atol=1e-12)
    assert kept.nbytes <= 0.57 * expected.nbytes


def test_rows_in_float32_are_multiplied_in_float32_and_added_in_float64():
    kept, rows = _sum(_rows(40)), _rows(700, seed=1)
    kept.add_rows(rows)
    before = _gram(_rows(40))
    assert kept.dtype == torch.float64
    assert 1e-7 < float((written_out(kept)[0] - before - _gram(rows)).abs().max()) < 1e-3
    torch.testing.assert_close(written_out(kept)[0] - before, (rows.T @ rows).double(), rtol=0, atol=1e-3)


def test_a_matrix_is_added_as_its_rows_would_be():
    kept = _sum(_rows(40))
    kept.add_matrix(_gram(_rows(7, seed=1)))
    torch.testing.assert_close(written_out(kept), written_out(_sum(_rows(40), _rows(7, seed=1))))


def test_copies_and_pickles_keep_the_triangle():
    kept = _sum(_rows(7))
    for other in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):  # noqa: S301 - our own bytes
        assert isinstance(other, Triangle)
        assert same(kept, other)
        assert other.data_ptr() != kept.data_ptr()
    assert not same(kept, _sum(_rows(7, seed=1)))
    assert not same(kept, written_out(kept))


def test_it_cannot_be_written_to_from_outside():
    with pytest.raises(TypeError, match=r"clone\(\)"):
        _sum(_rows(7)).mul_(2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_sums_that_overflow_are_noticed(value):
    rows = _rows(5)
    assert all_finite(_sum(rows, dtype=torch.float32))
    rows[2, 3] = value
    assert not all_finite(_sum(rows, dtype=torch.float32))
