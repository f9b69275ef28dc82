"""Diagonal plus low rank: every answer that of the dense matrix, however U is cut into pieces."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from laplace.backprop.asked import ALL_EXAMPLES, EACH_EXAMPLE, EACH_OUTPUT, Times
from laplace.linalg.lowrank import DiagonalPlusLowRank, symmetric_root

P, SIZES = 11, [4, 1, 6]


@dataclass
class Pieces:
    """A stored U, read in pieces of a given size."""

    u: Tensor
    step: int

    @property
    def shape(self):
        return tuple(self.u.shape)

    def rows(self):
        for start in range(0, len(self.u), self.step):
            part = slice(start, min(start + self.step, len(self.u)))
            yield part, self.u[part]


@pytest.fixture(params=[(3, 2), (3, 11), (1, 4), (14, 3), (0, 4)], ids=lambda p: f"k{p[0]}-step{p[1]}")
def given(request):
    k, step = request.param
    torch.manual_seed(0)
    d, u = torch.rand(P, dtype=torch.float64) + 0.1, torch.randn(P, k, dtype=torch.float64)
    w = torch.rand(k, dtype=torch.float64) * 5
    w[1:2] = 0.0
    precision = d.diag() + (u * w) @ u.T
    return DiagonalPlusLowRank(d, Pieces(u, step), w), precision, torch.linalg.inv(precision)


def test_every_answer_is_the_dense_matrixs(given):
    algebra, precision, covariance = given
    v = torch.randn(5, P, dtype=torch.float64)
    pairs = [
        (algebra.precision_matrix(), precision),
        (algebra.covariance_matrix(), covariance),
        (algebra.logdet(), torch.logdet(precision)),
        (algebra.marginal_variances(), covariance.diagonal()),
        (algebra.quadratic(v), ((v @ precision) * v).sum(-1)),
        (algebra.quadratic(v[0]), v[0] @ precision @ v[0]),
        (algebra.covariance_times(v), v @ covariance),
    ]
    for got, expected in pairs:
        torch.testing.assert_close(got, expected)


def test_colour_is_a_root_of_the_covariance_and_leaves_the_pieces_out(given):
    algebra, _, covariance = given
    root = algebra.color(torch.eye(P, dtype=torch.float64))
    torch.testing.assert_close(root.T @ root, covariance)


def test_colour_does_not_depend_on_the_order_of_the_columns():
    torch.manual_seed(0)
    d, u, w = torch.rand(P) + 0.1, torch.randn(P, 4), torch.rand(4)
    d, u, w, eps = d.double(), u.double(), w.double(), torch.randn(3, P).double()
    order = torch.tensor([2, 0, 3, 1])
    one = DiagonalPlusLowRank(d, Pieces(u, 5), w).color(eps)
    other = DiagonalPlusLowRank(d, Pieces(u[:, order], 3), w[order]).color(eps)
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sizes", [[P], SIZES, [1] * P])
def test_traces_are_those_of_the_covariances_blocks(given, sizes):
    algebra, _, covariance = given
    t, m = algebra.group_traces(sizes)
    torch.testing.assert_close(t, torch.stack([x.sum() for x in covariance.diagonal().split(sizes)]))
    blocks = [[b.square().sum() for b in rows.split(sizes, 1)] for rows in covariance.split(sizes)]
    torch.testing.assert_close(m, torch.tensor(blocks, dtype=torch.float64))


def test_the_part_of_the_low_rank_in_the_outputs(given):
    algebra, _, covariance = given
    jac = torch.randn(7, P, dtype=torch.float64)
    prior = (jac / algebra.d) @ jac.T
    y = algebra.explained(((jac / algebra.d) @ algebra.u.u).T.unsqueeze(2))  # one output at seven points
    expected, v = jac @ covariance @ jac.T, torch.randn(7, 1, dtype=torch.float64)
    each = expected.diagonal().reshape(7, 1)
    torch.testing.assert_close(ALL_EXAMPLES.left(prior.reshape(7, 1, 7, 1), y), expected.reshape(7, 1, 7, 1))
    alone = prior.diagonal().reshape(7, 1)
    torch.testing.assert_close(EACH_OUTPUT.left(alone, y), each)
    torch.testing.assert_close(EACH_EXAMPLE.left(alone.unsqueeze(2), y), each.unsqueeze(2))
    torch.testing.assert_close(Times(v).left(alone * v, y), each * v)


def test_float32_is_accurate_where_the_data_says_much():
    """Variances far below those of the prior are differences of nearly equal numbers."""
    torch.manual_seed(0)
    d, u, w = torch.full((P,), 1e-4), torch.randn(P, 3), torch.full((3,), 1e4)
    algebra = DiagonalPlusLowRank(d, Pieces(u, 4), w)
    exact = torch.linalg.inv(d.double().diag() + (u.double() * w.double()) @ u.double().T)
    torch.testing.assert_close(algebra.marginal_variances(), exact.diagonal().float())
    assert algebra.marginal_variances().dtype == torch.float32
    torch.testing.assert_close(algebra.covariance_times(u.T).double(), u.T.double() @ exact, rtol=1e-4, atol=1e-12)


def test_a_root_has_derivatives_where_eigenvalues_are_equal():
    """Of the identity's root, whose eigenvectors are any."""
    x = torch.randn(3, 3, dtype=torch.float64)
    direction = x + x.T

    def root(t):
        return symmetric_root(torch.eye(3, dtype=torch.float64) * 4 + t * direction + t**2 * x @ x.T)

    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(root, (t,))
    assert torch.autograd.gradgradcheck(root, (t,))
    torch.testing.assert_close(root(t) @ root(t), torch.eye(3, dtype=torch.float64) * 4)


def test_draws_have_the_right_gradients():
    torch.manual_seed(0)
    u, eps = torch.eye(P, 3, dtype=torch.float64), torch.randn(2, P, dtype=torch.float64)

    def draws(d, w):
        return DiagonalPlusLowRank(d.expand(P), Pieces(u, 4), w.expand(3)).color(eps)

    values = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.7, 2.0)]
    assert torch.autograd.gradcheck(draws, values)
