"""`Kron` and `KronDecomposed` are the dense matrix, in float64: products, powers, determinants, diagonals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace.errors import InputError
from laplace.utils import Kron, KronDecomposed

SIDES = [[3, 4], [5], [2, 3], [1]]
P = 12 + 5 + 6 + 1


def factors(diagonal: bool = False) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def factor(side: int) -> Tensor:
        root = torch.randn(side, side + 2, generator=generator, dtype=torch.float64)
        return (root @ root.T).diagonal().clone() if diagonal else root @ root.T

    return [[factor(side) for side in sides] for sides in SIDES]


def dense(kfacs: list[list[Tensor]]) -> Tensor:
    whole = [[f.diag() if f.dim() == 1 else f for f in block] for block in kfacs]
    return torch.block_diag(*[block[0] if len(block) == 1 else torch.kron(*block) for block in whole])


@pytest.mark.parametrize("diagonal", [False, True])
def test_factors_are_the_dense_matrix(diagonal):
    kron, matrix = Kron(factors(diagonal)), dense(factors(diagonal))
    vectors = torch.randn(2, 3, P, dtype=torch.float64)
    torch.testing.assert_close(kron.to_matrix(), matrix)
    torch.testing.assert_close(kron.diag(), matrix.diagonal())
    torch.testing.assert_close(kron.logdet(), torch.logdet(matrix))
    for w in (vectors, vectors[0], vectors[0, 0]):
        torch.testing.assert_close(kron.bmm(w), w @ matrix)
    torch.testing.assert_close((3.0 * kron).to_matrix(), 3 * matrix)
    torch.testing.assert_close((kron + kron).kfacs[1][0], 2 * kron.kfacs[1][0])


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("damping", [False, True])
def test_powers_are_those_of_the_dense_matrix(diagonal, damping):
    deltas = torch.tensor([0.3, 1.2, 0.7, 2.0], dtype=torch.float64)
    kron = 2.0 * Kron(factors(diagonal)).decompose(damping=damping) + deltas
    matrix = expected(factors(diagonal), deltas, damping)
    values, vectors = torch.linalg.eigh(matrix)
    w = torch.randn(2, 3, P, dtype=torch.float64)
    for exponent in (1, -1, -0.5, 0.5):
        power = (vectors * values**exponent) @ vectors.T
        torch.testing.assert_close(kron.to_matrix(exponent), power)
        torch.testing.assert_close(kron.diag(exponent), power.diagonal())
        torch.testing.assert_close(kron.bmm(w, exponent), w @ power)
    torch.testing.assert_close(kron.logdet(), torch.logdet(matrix))
    torch.testing.assert_close(kron.inv_square_form(w), w @ torch.linalg.inv(matrix) @ w.mT)


def expected(kfacs: list[list[Tensor]], deltas: Tensor, damping: bool) -> Tensor:
    blocks = []
    for block, delta in zip(kfacs, deltas, strict=True):
        whole = [2 ** (1 / len(block)) * (f.diag() if f.dim() == 1 else f) for f in block]
        eyes = [torch.eye(len(f), dtype=torch.float64) for f in whole]
        if len(whole) == 1:
            blocks.append(whole[0] + delta * eyes[0])
        elif damping:
            blocks.append(torch.kron(*[f + delta.sqrt() * eye for f, eye in zip(whole, eyes, strict=True)]))
        else:
            blocks.append(torch.kron(*whole) + delta * torch.kron(*eyes))
    return torch.block_diag(*blocks)


def test_the_gradient_reaches_what_is_added():
    delta = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    kron = Kron(factors()).decompose() + delta
    kron.logdet().backward()
    inverse = torch.linalg.inv(dense(factors()) + 0.5 * torch.eye(P, dtype=torch.float64))
    torch.testing.assert_close(delta.grad, inverse.trace())
    assert not kron.detach().deltas.requires_grad


def test_zeros_of_a_network():
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(4, 5))
    for given in (model, model.parameters()):
        kron = Kron.init_from_model(given, "cpu", torch.float64)
        assert [[len(f) for f in block] for block in kron.kfacs] == [[3, 8], [3], [5, 4], [5]]
        assert not kron.to_matrix().any()


def test_wrong_operands_are_refused():
    kron = Kron(factors())
    with pytest.raises(InputError, match="added to a Kron"):
        _ = kron + 3  # type: ignore[operator]
    with pytest.raises(InputError, match="one number"):
        _ = kron * torch.ones(2)
    with pytest.raises(InputError, match="give one number, or 4"):
        _ = kron.decompose() + torch.ones(3)
    with pytest.raises(InputError, match="must be a tensor"):
        _ = kron.decompose() + 1.0  # type: ignore[operator]
    with pytest.raises(InputError, match="give \\(P,\\)"):
        kron.bmm(torch.ones(1, 1, 1, P))
    assert isinstance(kron.decompose(), KronDecomposed)


def test_what_is_added_may_stand_in_front():
    kron = Kron([[torch.eye(2), torch.eye(3)], [torch.eye(2)]])
    decomposed, deltas = kron.decompose(), torch.tensor([1.0, 2.0])
    torch.testing.assert_close((deltas + decomposed).to_matrix(), (decomposed + deltas).to_matrix())
