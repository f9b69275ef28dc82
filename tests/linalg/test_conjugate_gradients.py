"""Conjugate gradients: solutions, determinants and roots are those of dense arithmetic in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace.linalg.conjugate_gradients import probe, solve

P = 40


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A positive definite matrix with a condition of 1e4, and the diagonal of a preconditioner."""
    torch.manual_seed(0)
    q = torch.linalg.qr(torch.randn(P, P, dtype=torch.float64))[0]
    a = (q * torch.logspace(0, 4, P, dtype=torch.float64)) @ q.T
    return ((a + a.T) / 2).to(dtype), (a.diagonal() * (torch.rand(P, dtype=torch.float64) + 0.5)).to(dtype)


@pytest.mark.parametrize("rows", [1, 6, 3 * P])
def test_solutions_are_those_of_dense_arithmetic(rows):
    a, d = problem()
    b = torch.randn(rows, P, dtype=torch.float64)
    found = solve(lambda v: v @ a, lambda v: v / d, b, 1e-12, 1000)
    expected = torch.linalg.solve(a, b.T).T
    assert float((found.x - expected).norm() / expected.norm()) < 1e-10
    assert float((found.left - (b - found.x @ a)).norm()) < 1e-8 * float(b.norm())
    assert float(found.sizes.max()) <= 1e-12


def test_rows_that_are_zero_or_depend_on_others_are_solved_for():
    a, d = problem()
    b = torch.randn(5, P, dtype=torch.float64)
    b[1], b[2], b[3] = b[0], 0.0, b[0] - 2 * b[4]
    found = solve(lambda v: v @ a, lambda v: v / d, b, 1e-12, 1000)
    expected = torch.linalg.solve(a, b.T).T
    assert float((found.x - expected).norm() / expected.norm()) < 1e-10
    assert not found.x[2].any()


def test_the_residual_is_computed_from_the_solution_in_float32():
    a, d = problem(torch.float32)
    b = torch.randn(4, P)
    found = solve(lambda v: v @ a, lambda v: v / d, b, 1e-12, 200)  # which float32 cannot reach
    left = b.double() - found.x.double() @ a.double()
    sizes = ((left.square() / d).sum(1) / (b.double().square() / d).sum(1)).sqrt()
    assert float(found.sizes.max()) > 1e-12
    assert torch.allclose(found.sizes, sizes, rtol=0.5, atol=1e-7)


def test_no_more_blocks_are_multiplied_than_allowed():
    a, d = problem()
    count = 0

    def times(v: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return v @ a

    found = solve(times, lambda v: v / d, torch.randn(2, P, dtype=torch.float64), 1e-12, 7)
    assert count == found.iterations == 7


def test_one_krylov_space_for_all_rows_takes_fewer_blocks():
    a, d = problem()
    b = torch.randn(8, P, dtype=torch.float64)
    together = solve(lambda v: v @ a, lambda v: v / d, b, 1e-6, 1000)
    alone = probe(lambda v: v @ a, lambda v: v / d, b, 1e-6, 1000)
    assert together.iterations < alone.iterations


def test_quadratures_over_all_unit_vectors_give_the_log_determinant():
    a, d = problem()
    units = torch.eye(P, dtype=torch.float64)
    found = probe(lambda v: v @ a, lambda v: v / d, units * d.sqrt(), 1e-12, 1000)
    inside = torch.linalg.eigh(d.rsqrt().unsqueeze(1) * a * d.rsqrt())
    for f in (torch.log, torch.sqrt, torch.reciprocal):
        expected = (inside[1].square() * f(inside[0])).sum(1)
        assert torch.allclose(found.quadrature(f), expected, rtol=1e-8), f
    assert torch.allclose(found.x, torch.linalg.solve(a, (units * d.sqrt()).T).T, rtol=1e-6, atol=1e-10)


def test_roots_are_those_of_the_inverse():
    a, d = problem()
    units = torch.eye(P, dtype=torch.float64)
    found = probe(lambda v: v @ a, lambda v: v / d, units * d.sqrt(), 1e-12, 1000, with_roots=True)
    assert found.roots is not None
    assert torch.allclose(found.roots.T @ found.roots, torch.linalg.inv(a), rtol=1e-6, atol=1e-9)
