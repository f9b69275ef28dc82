"""Float32 where it changes no variance, float64 where it would: errors are relative to the matrix, not to its norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace.backprop.activations import grams
from laplace.linalg.conditioning import (
    float32_products_suffice,
    least_in_float32,
    may_exceed,
)
from laplace.linalg.symmetric import eigh

CLOSE = 0.005  # share of a variance that may be rounding


def off(found: Tensor, exact: Tensor) -> float:
    """The smallest s with -s M <= E <= s M, from the eigenvalues of E relative to M."""
    root = torch.linalg.cholesky(exact.double())
    half = torch.linalg.solve_triangular(root, (found.double() - exact.double()), upper=False)
    whole = torch.linalg.solve_triangular(root, half.mT, upper=False)
    return float(torch.linalg.eigvalsh((whole + whole.mT) / 2).abs().max())


def at_positions(gap: float, groups: int = 1) -> Tensor:  # (128, Gr, 16 / Gr, 64)
    """Gradients whose last channel differs from the first by a share `gap`, too many to copy to float64 unasked."""
    x = torch.randn(128, groups, 16 // groups, 64, generator=torch.Generator().manual_seed(0))
    x[:, :, -1] = x[:, :, 0] + gap * x[:, :, -1]
    return x


def exact_grams(x: Tensor) -> Tensor:
    return torch.einsum("mgit,mgjt->gij", x.double(), x.double())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("gap", [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
def test_products_at_positions_are_exact_relative_to_their_smallest_eigenvalue(gap, groups):
    x = at_positions(gap, groups)
    found, exact = grams(x), exact_grams(x)
    assert found.dtype == torch.float64
    assert max(off(a, b) for a, b in zip(found, exact, strict=True)) <= CLOSE


@pytest.mark.parametrize(("gap", "suffices"), [(1.0, True), (1e-1, True), (1e-3, False)])
def test_float32_products_suffice_where_channels_differ(gap, suffices):
    exact = exact_grams(at_positions(gap))
    assert float32_products_suffice(exact) is suffices


def test_dead_and_small_units_do_not_ask_for_float64():
    x = at_positions(1.0)
    x[:, :, 3] = 0
    x[:, :, 4] *= 1e-6
    assert float32_products_suffice(exact_grams(x))
    assert not float32_products_suffice(exact_grams(x * torch.nan))


def wide(smallest: float, constant: bool) -> Tensor:  # (300, 300)
    """Eigenvalues from `smallest` to 1; with `constant`, rows that sum to zero."""
    q = torch.randn(300, 300, generator=torch.Generator().manual_seed(0)).double()
    if constant:
        q[:, 0] = 1
    q = torch.linalg.qr(q)[0]
    values = torch.logspace(float(torch.tensor(smallest).log10()), 0, 300).double()
    values[0] = 0 if constant else values[0]
    matrix = (q * values) @ q.T
    return (matrix + matrix.T) / 2


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("smallest", [0.1, 1e-2, 1e-4, 1e-6])
def test_wide_decompositions_are_exact_relative_to_their_smallest_eigenvalue(smallest, constant):
    matrix = wide(smallest, constant)
    values, vectors, _ = eigh(matrix, torch.float32)
    exact = torch.linalg.eigvalsh(matrix)
    first = int(constant)
    assert not constant or float(values[0]) == 0
    assert float((values[first:] / exact[first:] - 1).abs().max()) <= CLOSE
    found = (vectors.double() * values.double()) @ vectors.double().T
    lift = float(constant) / 300  # an eigenvalue of 1 for the constant vector, of both
    if smallest >= 1e-4:  # below that, eigenvectors rounded to float32 show
        assert off(found + lift, matrix + lift) <= 2 * CLOSE


@pytest.mark.parametrize("constant", [False, True])
def test_float32_decompositions_suffice_for_well_conditioned_matrices_alone(constant):
    for smallest, expected in ((0.1, True), (1e-4, False)):
        matrix = wide(smallest, constant).float()
        least = least_in_float32(matrix)
        assert bool(torch.linalg.eigvalsh(matrix.double())[int(constant)] >= least) == expected
        assert may_exceed(matrix, least, constant) or not expected  # never False where it does


def test_a_block_shows_that_a_matrix_needs_float64():
    assert not may_exceed(torch.ones(300, 300) + 1e-6 * torch.eye(300), torch.tensor(0.3), False)
