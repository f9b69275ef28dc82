"""Transposed convolutions of every kind: curvature and Kronecker factors against the oracle."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, assert_exact, assert_predicts_exactly, labels
from laplace import Laplace
from networks import cut

SIZES = {nn.ConvTranspose1d: (4,), nn.ConvTranspose2d: (3, 2), nn.ConvTranspose3d: (2, 2, 1)}
OPTIONS = {
    "plain": {"kernel_size": 2},
    "stride": {"kernel_size": 2, "stride": 2},
    "padding": {"kernel_size": 3, "stride": 2, "padding": 1},
    "output padding": {"kernel_size": 2, "stride": 3, "output_padding": 2},
    "dilation": {"kernel_size": 2, "dilation": 2, "output_padding": 1},
    "groups": {"kernel_size": 2, "groups": 2},
    "everything": {
        "kernel_size": 3, "stride": 2, "padding": 2, "output_padding": 1, "dilation": 2, "groups": 2, "bias": False,
    },
}  # fmt: skip


class Upsampled(nn.Module):
    def __init__(self, conv: type[nn.Module], options: dict, frames: bool = False) -> None:
        super().__init__()
        self.up, self.head, self.frames = conv(4, 6, **options), nn.Linear(6, 2), frames

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x.flatten(0, 1) if self.frames else x)).flatten(2).mean(2)
        return self.head(h.unflatten(0, x.shape[:2]).mean(1) if self.frames else h)


def network(conv, options, n=7):
    torch.manual_seed(0)
    return Upsampled(conv, options).double(), torch.randn(n, 4, *SIZES[conv], dtype=torch.float64)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("conv", SIZES, ids=lambda c: c.__name__)
def test_curvature_is_exact(conv, options):
    model, x = network(conv, options)
    assert_exact(model, x, sizes=(4, 1, 2), kinds=("ggn",), rules={"up": "conv transpose"})


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("conv", SIZES, ids=lambda c: c.__name__)
def test_kronecker_factors_are_their_formula(conv, options, sharing):
    model, x = network(conv, options, n=4)
    y, names = labels("regression", len(x), 2), [k for k, _ in model.named_parameters()]
    la = Laplace(model, "regression", "all", "kron", weight_sharing=sharing).fit(cut(x, y, 3))
    expected = oracle.kron_all(model, names, x, torch.eye(2, dtype=torch.float64).expand(4, 2, 2), sharing)
    got, start = la.H.to_matrix(), 0
    for name, size in zip(names, la.posterior.fit.layout.sizes, strict=True):
        assert_close(got[start : start + size, start : start + size], expected[name])
        start += size


@pytest.mark.parametrize("structure", ["kron", "ekfac", "inf", "diag"])
@pytest.mark.parametrize("options", ["groups", "padding"])
def test_every_structures_gaussian_gives_its_own_variances(structure, options):
    model, x = network(nn.ConvTranspose2d, OPTIONS[options])
    la = Laplace(model, "regression", "all", structure).fit(cut(x, labels("regression", len(x), 2), 4))
    assert_predicts_exactly(la, copy.deepcopy(model).eval(), x)
    jac = oracle.jacobian_loop(model, list(la.posterior.fit.layout.names), x[:3]).flatten(0, 1)
    assert_close(la(x[:3], joint=True)[1], jac @ la.posterior_covariance @ jac.T)


@pytest.mark.parametrize("damping", [True, "balanced"])
def test_damping_splits_the_prior_over_the_same_two_factors(damping):
    """One output position for one input position: a linear layer whose weight is the transpose."""
    torch.manual_seed(0)
    up, x = nn.ConvTranspose1d(3, 4, 1, bias=False).double(), torch.randn(6, 3, 1, dtype=torch.float64)
    linear = nn.Linear(3, 4, bias=False).double()
    linear.weight = nn.Parameter(up.weight.detach().squeeze(2).T.contiguous())
    y = labels("regression", 6, 4)
    one = Laplace(nn.Sequential(up, nn.Flatten()), "regression", "all", "kron", damping=damping).fit([(x, y)])
    two = Laplace(linear, "regression", "all", "kron", damping=damping).fit([(x.squeeze(2), y)])
    assert_close(one.log_marginal_likelihood(), two.log_marginal_likelihood())
    assert_close(one(x)[1], two(x.squeeze(2))[1])


def test_some_weights_alone():
    model, x = network(nn.ConvTranspose2d, OPTIONS["groups"])
    y, names = labels("regression", len(x), 2), [k for k, _ in model.named_parameters()]
    index = torch.tensor([0, 5, 13, 30, 47, 48, 50])
    la = Laplace(model, "regression", "subnetwork", "full", subnetwork_indices=index).fit(cut(x, y, 5))
    _, h = oracle.curvature_all(model, names, x, y, "regression")
    assert_close(la.H, h[index][:, index])


def test_frames_in_the_batch_belong_to_their_example():
    torch.manual_seed(0)
    model = Upsampled(nn.ConvTranspose2d, OPTIONS["everything"], frames=True).double()
    assert_exact(model, torch.randn(6, 3, 4, 3, 2, dtype=torch.float64), rules={"up": "conv transpose"})
