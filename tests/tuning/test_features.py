"""Regression on features in closed form: the Gaussian density of the targets and a fitted Laplace are the oracles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import InputError, OptionError
from laplace.tuning import regress_on_features

SIGMA, DELTA = 0.3, torch.tensor([2.0, 0.5], dtype=torch.float64)


def data(n: int, h: int, c: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + h + c)
    return tuple(torch.randn(n, k, generator=generator, dtype=torch.float64) for k in (h, c))  # pyright: ignore


def density(phi: Tensor, y: Tensor, delta: Tensor, sigma: Tensor | float) -> Tensor:
    """log N(y; 0, Phi Phi^T / delta_W + 1 / delta_b + sigma^2), one column after the other."""
    n = len(phi)
    covariance = phi @ phi.T / delta[0] + 1 / delta[1] + torch.as_tensor(sigma) ** 2 * torch.eye(n, dtype=phi.dtype)
    normal = torch.distributions.MultivariateNormal(torch.zeros(n, dtype=phi.dtype), covariance)
    return normal.log_prob(y.T).sum()


@pytest.mark.parametrize(("n", "h"), [(6, 20), (20, 6), (7, 6), (1, 3)])
@pytest.mark.parametrize("c", [1, 3])
def test_evidence_is_the_density_of_the_targets(n, h, c):
    phi, y = data(n, h, c)
    torch.testing.assert_close(regress_on_features(phi, y, DELTA, SIGMA).log_evidence, density(phi, y, DELTA, SIGMA))
    one = regress_on_features(phi, y, 2.0, SIGMA).log_evidence
    torch.testing.assert_close(one, density(phi, y, torch.tensor([2.0, 2.0]), SIGMA))


@pytest.mark.parametrize(("n", "h"), [(5, 12), (25, 4)])
@pytest.mark.parametrize("structure", ["full", "gp"])
def test_a_laplace_at_these_weights_has_the_same_evidence(n, h, structure):
    phi, y = data(n, h, 2)
    found = regress_on_features(phi, y, DELTA, SIGMA)
    network = nn.Sequential(nn.Identity(), found.linear())
    la = Laplace(network, "regression", "last_layer", structure, sigma_noise=SIGMA, prior_precision=DELTA)
    la.fit([(phi, y)])
    torch.testing.assert_close(la.log_marginal_likelihood().detach(), found.log_evidence)


@pytest.mark.parametrize(("n", "h"), [(5, 12), (25, 4)])
def test_the_weights_are_the_posterior_mean(n, h):
    phi, y = data(n, h, 2)
    found = regress_on_features(phi, y, DELTA, SIGMA)
    weight, bias = found.weight.clone().requires_grad_(), found.bias.clone().requires_grad_()
    error = (y - phi @ weight.T - bias).square().sum() / SIGMA**2
    (error + DELTA[0] * weight.square().sum() + DELTA[1] * bias.square().sum()).backward()
    for p in (weight, bias):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, torch.zeros_like(p), atol=1e-9, rtol=0)


@pytest.mark.parametrize(("n", "h"), [(4, 6), (6, 3)])
def test_gradients_reach_features_precisions_and_noise(n, h):
    phi, y = data(n, h, 2)
    arguments = phi.requires_grad_(), y.requires_grad_(), DELTA.clone().requires_grad_(), torch.tensor(SIGMA).double()
    arguments[3].requires_grad_()
    assert torch.autograd.gradcheck(lambda *given: regress_on_features(*given).log_evidence, arguments)


def test_wrong_input_is_refused():
    phi, y = data(4, 3, 1)
    with pytest.raises(InputError, match=r"\(4, 3\) and \(4,\); .* Write y.unsqueeze\(-1\)"):
        regress_on_features(phi, y[:, 0])
    with pytest.raises(InputError, match=r"\(4, 3\) and \(3, 1\)"):
        regress_on_features(phi, y[1:])
    with pytest.raises(OptionError, match="prior_precision must be positive"):
        regress_on_features(phi, y, -1.0)
    with pytest.raises(OptionError, match="one precision or two"):
        regress_on_features(phi, y, torch.ones(3))
