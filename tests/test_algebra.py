"""Products and decompositions against torch's own, below and above the width from which they take another way."""

from __future__ import annotations

import pytest
import torch

from laplace.linalg.symmetric import GramSum, eigh, gram

WIDTHS = [1, 2, 37, 511, 512, 513, 700, 1025]
DTYPES = [torch.float32, torch.float64]


def tolerance(dtype):
    return {torch.float32: 1e-4, torch.float64: 1e-11}[dtype]


def semidefinite(d, seed=0, groups=()):
    """Random positive semi-definite matrices of rank d / 2, all eigenvalues of order 1."""
    torch.manual_seed(seed)
    half = torch.randn(*groups, d, max(1, d // 2), dtype=torch.float64)
    return half @ half.mT / d


def of_softmax(d, seed=0, groups=()):
    """A sum of diag(p) - p p^T: its rows sum to zero."""
    torch.manual_seed(seed)
    p = torch.randn(*groups, 3 * d, d, dtype=torch.float64).softmax(-1)
    off = -(p.mT @ p)
    off.diagonal(dim1=-2, dim2=-1).zero_()
    return off - off.sum(-1).diag_embed()


def assert_decomposes(matrix, dtype):
    values, vectors, _ = eigh(matrix.to(dtype), dtype)
    d = matrix.shape[-1]
    assert values.shape == matrix.shape[:-1]
    assert vectors.shape == matrix.shape
    assert values.dtype == vectors.dtype == dtype
    scale = float(matrix.abs().max())
    rebuilt = (vectors * values.unsqueeze(-2)) @ vectors.mT
    assert float((rebuilt.double() - matrix).abs().max()) <= tolerance(dtype) * scale
    eye = torch.eye(d, dtype=dtype).expand_as(vectors)
    torch.testing.assert_close(vectors.mT @ vectors, eye, atol=tolerance(dtype), rtol=0)
    assert float(values.min()) >= 0
    expected = torch.linalg.eigvalsh(matrix)
    assert float((values.double().sort(-1)[0] - expected).abs().max()) <= tolerance(dtype) * float(expected.max())
    return values, vectors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", WIDTHS)
def test_gram_is_rows_transposed_times_rows(d, dtype):
    torch.manual_seed(d)
    for m in (1, 5, 40):
        rows = torch.randn(m, d, dtype=dtype)
        exact = rows.double().T @ rows.double()
        torch.testing.assert_close(gram(rows).double(), exact, atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize("d", [40, 513])
def test_gram_takes_rows_that_are_not_contiguous(d):
    torch.manual_seed(0)
    wide = torch.randn(2 * d, 7, dtype=torch.float64).T[:, ::2]
    assert not wide.is_contiguous()
    torch.testing.assert_close(gram(wide), wide.T @ wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 2, 7, 100, 512, 513, 600])
def test_eigh_rebuilds_positive_semidefinite_matrices(d, dtype):
    assert_decomposes(semidefinite(d), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [2, 3, 10, 100, 512, 513, 600])
def test_eigh_rebuilds_matrices_of_softmax_and_their_flat_direction_is_exactly_flat(d, dtype):
    matrix = of_softmax(d)
    values, vectors = assert_decomposes(matrix, dtype)
    flat = vectors[:, 0]
    assert float(values[0]) == 0
    torch.testing.assert_close(flat.abs(), torch.full((d,), d**-0.5, dtype=dtype))
    assert float((values > 0).sum()) == d - 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [semidefinite, of_softmax])
@pytest.mark.parametrize("groups", [(1,), (3,)])
@pytest.mark.parametrize("d", [1, 2, 9, 64])
def test_eigh_takes_groups_one_by_one(d, groups, make, dtype):
    assert_decomposes(make(d, groups=groups), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eigh_of_groups_of_different_kinds(dtype):
    assert_decomposes(torch.stack([of_softmax(8), semidefinite(8), torch.zeros(8, 8).double()]), dtype)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-3), (torch.float64, 1e-9)])
@pytest.mark.parametrize("d", [5, 520])
def test_eigh_keeps_a_small_curvature_along_the_constant_vector(d, dtype, least):
    matrix = of_softmax(d)
    matrix = matrix + least * matrix.diagonal().max() / d
    values, _, _ = eigh(matrix.to(dtype), dtype)
    expected = torch.linalg.eigvalsh(matrix)[0]
    assert float(values.min()) == pytest.approx(float(expected), rel=0.05)


@pytest.mark.parametrize(
    "sizes", [[50], [700], [300, 300, 700], [600, 600, 600, 600], [100] * 30, [2000, 10], [10, 2000]]
)
@pytest.mark.parametrize("columns", [100, 300, 600])
def test_a_running_gram_is_the_whole_one_however_rows_come(columns, sizes):
    rows = torch.randn(sum(sizes), columns, generator=torch.Generator().manual_seed(0))
    total = GramSum()
    for part in rows.split(sizes):
        total.add(part)
    expected = rows.double().T @ rows.double()
    got = total.flush().double()
    assert float((got - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    if len(rows) < columns:  # what they do not span is zero
        assert float(torch.linalg.eigvalsh(got)[0].abs()) <= 1e-12 * float(expected.abs().max())
