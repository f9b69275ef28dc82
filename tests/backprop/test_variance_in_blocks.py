"""Variances and squares of layers at many positions, made block by block of their gradients."""

from __future__ import annotations

import pytest
import torch

import laplace.backprop.outer as outer
from laplace.backprop.activations import Stored
from laplace.backprop.covariances import Basis, KroneckerCovariance
from laplace.backprop.outer import Outer


def _case(k: int, n: int, o: int, i: int, t: int, rotated: bool, by_position: bool):
    torch.manual_seed(0)
    g, a = (torch.randn(*shape, dtype=torch.float64) for shape in ((k, n, t, o), (n, t, i)))
    bases = [Basis(torch.linalg.qr(torch.randn(1, d, d, dtype=torch.float64)).Q) if rotated else None for d in (o, i)]
    spread = KroneckerCovariance(torch.rand(1, o, i, dtype=torch.float64), *bases)
    g, a = (g.mT.unsqueeze(2), a.mT.unsqueeze(1))  # (K, N, 1, O, T), (N, 1, I, T)
    if not by_position:  # another order in memory, that of convolutions
        g, a = g.contiguous(), a.contiguous()
    return Outer(Stored(a), g), spread


def _dense(use: Outer, spread: KroneckerCovariance) -> torch.Tensor:  # (N, K)
    gradients = torch.einsum("kngot,ngit->knoi", use.g, use.a.read(slice(None)))
    left, right = (torch.eye(d).double() if q is None else q.vectors[0]
                   for d, q in zip(gradients.shape[2:], (spread.left, spread.right), strict=True))  # fmt: skip
    return torch.einsum("knoi,oi->nk", (left.T @ gradients @ right).square(), spread.variances[0])


@pytest.mark.parametrize("shape", [(1, 3, 7, 6, 5), (3, 2, 5, 9, 4), (2, 4, 6, 5, 2)])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("by_position", [True, False])
@pytest.mark.parametrize("block", [1, 17, 2**17])
def test_variances_in_blocks_are_those_of_dense_gradients(monkeypatch, shape, rotated, by_position, block):
    use, spread = _case(*shape, rotated, by_position)
    monkeypatch.setattr(outer, "_BLOCK", block)
    assert use._in_blocks(spread) is (block < 2**17)
    torch.testing.assert_close(use.variance(spread), _dense(use, spread), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(use.within(1).variance(spread), _dense(use, spread), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 3, 7, 6, 5), (3, 2, 5, 9, 4)])
@pytest.mark.parametrize("by_position", [True, False])
@pytest.mark.parametrize("block", [1, 17, 2**17])
def test_squares_in_blocks_are_those_of_dense_gradients(monkeypatch, shape, by_position, block):
    use, _ = _case(*shape, False, by_position)
    monkeypatch.setattr(outer, "_BLOCK", block)
    gradients = torch.einsum("kngot,ngit->knoi", use.g, use.a.read(slice(None)))
    torch.testing.assert_close(use.squares(), gradients.square().sum((0, 1)).flatten(), rtol=1e-12, atol=1e-12)


def test_gradients_that_flow_on_are_not_made_in_place(monkeypatch):
    use, spread = _case(2, 3, 7, 6, 5, True, True)
    monkeypatch.setattr(outer, "_BLOCK", 1)
    use.g.requires_grad_()
    assert not use._in_blocks(spread)
    use.variance(spread).sum().backward()
    assert use.g.grad is not None
