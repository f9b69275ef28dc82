"""Patches that are rotated and contracted by convolutions are those that are unfolded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace.backprop.activations import Stored
from laplace.backprop.covariances import Basis, KroneckerCovariance
from laplace.backprop.layers.conv import Patches, patches
from laplace.backprop.outer import Outer

CONVOLUTIONS = {
    "3x3": (nn.Conv2d(4, 6, 3, padding=1), (7, 7)),
    "strided": (nn.Conv2d(3, 5, 3, stride=2, padding=1), (8, 7)),
    "a row left over": (nn.Conv2d(3, 5, 2, stride=3), (9, 10)),
    "dilated": (nn.Conv2d(3, 5, 3, dilation=2), (9, 8)),
    "groups": (nn.Conv2d(4, 6, 3, padding=1, groups=2), (6, 6)),
    "one position": (nn.Conv2d(3, 5, 4), (4, 4)),
    "size 1": (nn.Conv2d(5, 7, 1), (6, 5)),
    "same, reflected": (nn.Conv2d(3, 4, (3, 2), padding="same", padding_mode="reflect"), (6, 7)),
    "one side": (nn.Conv1d(3, 4, 3, padding=2, stride=2), (11,)),
    "three sides": (nn.Conv3d(2, 3, (2, 3, 2), padding=1), (4, 5, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_rotated_patches_are_the_unfolded_ones_in_the_basis(name: str, frames: int, dtype: torch.dtype) -> None:
    seen, unfolded = _patches(name, frames, dtype)
    basis = _basis(seen.shape[1], seen.shape[2], dtype)
    expected = (basis.vectors.double().mT @ unfolded)[1:4]
    assert _near(seen.turned(slice(1, 4), basis, dtype), expected, dtype)
    assert _near(seen.turned(slice(1, 4), None, dtype), unfolded[1:4], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("examples", [slice(0, 5), slice(2, 3)])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_contracted_patches_are_sums_over_positions(
    name: str, examples: slice, frames: int, dtype: torch.dtype
) -> None:
    seen, unfolded = _patches(name, frames, dtype)
    g = _gradients(name, seen, dtype)
    expected = torch.einsum("kngot,ngit->kngoi", g.double(), unfolded)[:, examples]
    assert _near(seen.contracted(examples, g[:, examples]), expected, dtype)


@pytest.mark.parametrize("vectors", [1, 3, 40])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_variances_do_not_depend_on_how_patches_are_read(name: str, vectors: int) -> None:
    """Many vectors rotate the patches first, few of them the contracted gradients."""
    seen, unfolded = _patches(name, 1, torch.float32)
    g = _gradients(name, seen, torch.float32, vectors)
    _, _, groups, o, _ = g.shape
    left, right = (_basis(groups, size, torch.float32) for size in (o, seen.shape[2]))
    spread = KroneckerCovariance(torch.rand(groups, o, seen.shape[2]) + 0.1, left, right)
    exact = KroneckerCovariance(spread.variances.double(), Basis(left.vectors.double()), Basis(right.vectors.double()))
    expected = Outer(Stored(unfolded), g.double())
    found = Outer(seen, g)
    torch.testing.assert_close(found.variance(spread).double(), expected.variance(exact), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.squares().double(), expected.squares(), rtol=1e-5, atol=1e-5)


def test_gradients_flow_through_contracted_patches() -> None:
    conv, size = CONVOLUTIONS["3x3"]
    x = torch.randn(2, 1, 4, *size, requires_grad=True)
    seen = Patches(conv, x, 49)
    g = torch.randn(3, 2, 1, 6, 49, requires_grad=True)
    found = seen.contracted(slice(None), g).square().sum()
    expected = torch.einsum("kngot,ngit->kngoi", g, seen.read(slice(None))).square().sum()
    for one, other in zip(torch.autograd.grad(found, (x, g)), torch.autograd.grad(expected, (x, g)), strict=True):
        torch.testing.assert_close(one, other)


def _patches(name: str, frames: int, dtype: torch.dtype) -> tuple[Patches, Tensor]:
    """Return patches of five examples, and the same unfolded in float64, (N, Gr, I, T)."""
    torch.manual_seed(0)
    conv, size = CONVOLUTIONS[name]
    x = torch.randn(5, frames, conv.in_channels, *size, dtype=dtype)
    flat = patches(conv, x.flatten(0, 1)).double().unflatten(0, (5, frames))  # (N, frames, Gr, I, T)
    unfolded = flat.permute(0, 2, 3, 1, 4).flatten(3)
    return Patches(conv, x, unfolded.shape[3]), unfolded


def _gradients(name: str, seen: Patches, dtype: torch.dtype, vectors: int = 3) -> Tensor:  # (K, N, Gr, O, T)
    conv, _ = CONVOLUTIONS[name]
    n, groups, _, t = seen.shape
    return torch.randn(vectors, n, groups, conv.out_channels // groups, t, dtype=dtype)


def _basis(groups: int, size: int, dtype: torch.dtype) -> Basis:
    return Basis(torch.linalg.qr(torch.randn(groups, size, size, dtype=torch.float64))[0].to(dtype))


def _near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    assert found.dtype == dtype
    assert found.shape == expected.shape
    rounding = 20 * torch.finfo(dtype).eps * float(expected.abs().max())
    return bool((found.double() - expected).abs().max() <= rounding)
