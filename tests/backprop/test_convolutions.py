"""Convolutions of every kind: curvature and Kronecker factors against the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, assert_exact, labels
from laplace import Laplace
from networks import cut

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
SIZES = {nn.Conv1d: (7,), nn.Conv2d: (5, 4), nn.Conv3d: (4, 3, 3)}
OPTIONS = {
    "plain": {"kernel_size": 2},
    "one by one": {"kernel_size": 1},
    "stride": {"kernel_size": 2, "stride": 2},
    "stride over a rest": {"kernel_size": 3, "stride": 2, "padding": 1},
    "padding": {"kernel_size": 3, "padding": 2},
    "same": {"kernel_size": 3, "padding": "same"},
    "same, even kernel": {"kernel_size": 2, "padding": "same"},
    "same, dilated": {"kernel_size": 2, "dilation": 2, "padding": "same"},
    "valid": {"kernel_size": 2, "padding": "valid"},
    "dilation": {"kernel_size": 2, "dilation": 2},
    "groups": {"kernel_size": 2, "groups": 2},
    "depthwise": {"kernel_size": 2, "groups": 4, "out_channels": 8},
    "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    "replicate": {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"},
    "same, circular": {"kernel_size": 3, "padding": "same", "padding_mode": "circular"},
    "no bias": {"kernel_size": 2, "bias": False},
    "everything": {"kernel_size": 2, "stride": 2, "padding": 1, "dilation": 2, "groups": 2, "padding_mode": "circular"},
}


class Convolved(nn.Module):
    """A linear map to four channels, the convolution under test, tanh, a linear layer."""

    def __init__(self, conv: type[nn.Module], options: dict) -> None:
        super().__init__()
        self.size = SIZES[conv]
        self.inp = conv(1, 4, 1)
        self.conv = conv(4, **{"out_channels": 4} | options)
        self.head = nn.Linear(options.get("out_channels", 4), 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inp(x.unsqueeze(1)))
        return self.head(torch.tanh(self.conv(h)).flatten(2).mean(2))


def network(conv, options):
    torch.manual_seed(0)
    model = Convolved(conv, options).double()
    return model, torch.randn(8, *SIZES[conv], dtype=torch.float64)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("conv", SIZES, ids=lambda c: c.__name__)
def test_curvature_of_a_convolution_is_exact(conv, options):
    model, x = network(conv, options)
    assert_exact(model, x, sizes=(5, 3), kinds=("ggn",), rules={"inp": "conv", "conv": "conv", "head": "linear"})


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("conv", SIZES, ids=lambda c: c.__name__)
def test_kronecker_factors_of_a_convolution_are_their_formula(conv, options, sharing):
    model, x = network(conv, options)
    y, names = labels("regression", len(x), 2), [k for k, _ in model.named_parameters()]
    la = Laplace(model, "regression", "all", "kron", weight_sharing=sharing).fit(cut(x, y, 5))
    lam = torch.eye(2, dtype=torch.float64).expand(len(x), 2, 2)
    expected = oracle.kron_all(model, names, x, lam, sharing)
    assert set(expected) == set(names)
    got, start = la.H.to_matrix(), 0
    for name, size in zip(names, la.posterior.fit.layout.sizes, strict=True):
        assert_close(got[start : start + size, start : start + size], expected[name])
        start += size


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("padding", [1, "same", (1, 0), (2, 1)])
@pytest.mark.parametrize("size", [(6, 6), (7, 6), (6, 9), (3, 8), (1, 6)], ids=str)
def test_kernels_of_three_by_three_on_images_of_any_size(size, padding, sharing):
    """The kind of convolution that there is most of; its factors may be had from shifts of the image."""
    if padding == (1, 0) and size[1] < 3:
        pytest.skip("no position")

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 3, 3, padding=padding), nn.Conv2d(3, 2, 3, padding=padding)
            self.head = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))).mean((2, 3)))

    torch.manual_seed(0)
    model, x = Three().double(), torch.randn(7, 2, *size, dtype=torch.float64)
    y, names = labels("regression", 7, 2), [k for k, _ in model.named_parameters()]
    la = Laplace(model, "regression", "all", "kron", weight_sharing=sharing).fit(cut(x, y, 4))
    expected = oracle.kron_all(model, names, x, torch.eye(2, dtype=torch.float64).expand(7, 2, 2), sharing)
    got, start = la.H.to_matrix(), 0
    for name, width in zip(names, la.posterior.fit.layout.sizes, strict=True):
        assert_close(got[start : start + width, start : start + width], expected[name])
        start += width


@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.parametrize("conv", SIZES, ids=lambda c: c.__name__)
def test_frames_that_are_flattened_into_the_batch_belong_to_their_example(conv, time_first):
    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Convolved(conv, {"kernel_size": 2, "groups": 2})
            self.head = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            n, t = x.shape[:2]
            frames = x.transpose(0, 1) if time_first else x
            h = self.inner(frames.flatten(0, 1))
            h = h.unflatten(0, (t, n)).transpose(0, 1) if time_first else h.unflatten(0, (n, t))
            return self.head(torch.tanh(h).sum(1))

    torch.manual_seed(0)
    x = torch.randn(7, 3, *SIZES[conv], dtype=torch.float64)
    assert_exact(Video().double(), x, kinds=("ggn",), rules={"inner.conv": "conv", "inner.head": "linear"})
