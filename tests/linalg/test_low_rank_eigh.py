"""Wide matrices of low rank, decomposed by their range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace.linalg.low_rank_eigh import low_rank_eigh
from laplace.linalg.symmetric import precise_gram
from laplace.structures.blockdiag import Eigh

D = 1040


def _gram(m: int, decay: float = 0.0) -> Tensor:
    rows = torch.randn(m, D, generator=torch.Generator().manual_seed(m))
    return precise_gram(rows * torch.logspace(0, -decay, m).unsqueeze(1))


@pytest.mark.parametrize("m", [1, 40, 129])
@pytest.mark.parametrize("decay", [0.0, 5.0])
def test_a_matrix_of_low_rank_is_its_decomposition(m, decay):
    matrix = _gram(m, decay)
    found = low_rank_eigh(matrix)
    assert found is not None
    values, v, t = found
    q = torch.eye(D, dtype=torch.float64) - v @ t @ v.T
    torch.testing.assert_close(q.T @ q, torch.eye(D, dtype=torch.float64), rtol=0, atol=1e-12)
    assert float((q * values @ q.T - matrix).abs().max()) <= 3e-12 * float(matrix.trace())
    expected = torch.linalg.eigvalsh(matrix)
    torch.testing.assert_close(values.sort().values, expected, rtol=0, atol=3e-12 * float(matrix.trace()))


@pytest.mark.parametrize("m", [131, 400, 3000])
def test_a_matrix_of_higher_rank_is_left_to_others(m):
    assert low_rank_eigh(_gram(m)) is None


def test_small_eigenvalues_that_are_not_rounding_count():
    matrix = _gram(40) + 1e-9 * torch.eye(D, dtype=torch.float64)
    assert low_rank_eigh(matrix) is None


def test_sums_in_float32_hide_their_rank_and_narrow_ones_are_cheap():
    assert low_rank_eigh(_gram(40).float()) is None
    assert low_rank_eigh(_gram(40)[:200, :200]) is None


def test_the_basis_of_a_low_rank_factor_takes_few_numbers_and_turns_alike():
    matrix, x = _gram(40).unsqueeze(0), torch.randn(3, 1, 5, D, dtype=torch.float64)
    values, basis = Eigh(torch.float64)(matrix)
    whole = (basis.into(x) * values).square().sum(-1)
    torch.testing.assert_close(whole, (x @ matrix[0]).square().sum(-1), rtol=1e-9, atol=1e-6)
    torch.testing.assert_close(basis.out_of(basis.into(x)), x)
    assert basis.v.numel() < D * D / 7
