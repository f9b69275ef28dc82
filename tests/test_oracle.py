"""Every number of a last-layer posterior against the dense float64 oracle."""

from __future__ import annotations

import itertools

import pytest
import torch

import oracle
from laplace import Laplace
from networks import LogitsOnly, cut, head_names, make

NETS, TASKS = ["mlp", "wrapped", "residual", "conv"], ["classification", "regression"]
STRUCTURES, CURVATURES = ["full", "kron", "diag"], ["ggn", "ef"]
CASES = list(itertools.product(NETS, TASKS, STRUCTURES, CURVATURES))


def close(a, b, tol=1e-8):
    scale = max(1.0, float(b.abs().max()))
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tol * scale


def both(network, task, structure, curvature, **options):
    model, x, y = make(network, task)
    if task == "regression":
        options.setdefault("sigma_noise", 0.7)
    la = Laplace(model, task, hessian_structure=structure, curvature=curvature, **options).fit(cut(x, y, [5, 1, 9]))
    wrapped = LogitsOnly(model).eval()
    names = ["net." + k for k in head_names(model)]
    return la, oracle.fit(wrapped, names, x, y, task, structure, curvature), wrapped, names, x


def sigma_of(la):
    return float(la.sigma_noise)


@pytest.mark.parametrize(("network", "task", "structure", "curvature"), CASES)
def test_curvature_is_the_oracles(network, task, structure, curvature):
    la, dense, *_ = both(network, task, structure, curvature)
    h = la.H
    h = h.to_matrix() if structure == "kron" else h.diag() if structure == "diag" else h
    close(h, dense.h)
    close(la.mean, dense.mean)
    assert la.n_params == len(dense.mean)
    assert la.n_layers == len(dense.sizes)


WITH_PRIORS = [(*case, prior) for case in CASES for prior in ("scalar", "layerwise", "diag")]
WITH_PRIORS = [case for case in WITH_PRIORS if (case[2], case[4]) != ("kron", "diag")]  # has no Kronecker form


@pytest.mark.parametrize(("network", "task", "structure", "curvature", "prior"), WITH_PRIORS)
def test_posterior_and_evidence_are_the_oracles(network, task, structure, curvature, prior):
    la, dense, wrapped, names, x = both(network, task, structure, curvature, temperature=1.7)
    torch.manual_seed(1)
    values = {"scalar": 1, "layerwise": la.n_layers, "diag": la.n_params}[prior]
    la.prior_precision = torch.rand(values, dtype=torch.float64) + 0.3
    la.prior_mean = torch.randn(la.n_params, dtype=torch.float64)
    delta = dense.expand(la.prior_precision)
    how = {"sigma": sigma_of(la), "temperature": 1.7}
    precision, covariance = dense.precision(delta, **how), dense.covariance(delta, **how)

    shown = la.posterior_precision
    shown = shown.to_matrix() if structure == "kron" else shown.diag() if structure == "diag" else shown
    close(shown, precision)
    close(la.posterior_covariance, covariance)
    close(la.posterior_variance, covariance.diag())
    close(la.prior_precision_diag, delta)
    close(la.log_det_posterior_precision, torch.logdet(precision))
    close(la.log_det_prior_precision, delta.log().sum())
    close(la.log_marginal_likelihood(), dense.evidence(delta, la.prior_mean, **how))

    value = dense.mean + torch.randn(2, la.n_params, dtype=torch.float64)
    offset = value - dense.mean
    close(la.square_norm(value), torch.einsum("sp,pq,sq->s", offset, precision, offset))
    gaussian = torch.distributions.MultivariateNormal(dense.mean, covariance_matrix=covariance)
    close(la.log_prob(value), gaussian.log_prob(value))

    new = x[:5] * 1.3
    jac = oracle.jacobian(wrapped, names, new)
    expected = jac @ covariance @ jac.mT
    close(la.functional_variance(jac), expected)
    joint = jac.flatten(0, 1) @ covariance @ jac.flatten(0, 1).T
    close(la.functional_covariance(jac), joint)
    predicted = la.predict(new)
    close(predicted.outputs.covariance, expected)
    if task == "regression":
        mean, cov = la(new)
        close(mean, wrapped(new).detach())
        close(cov, expected)
        close(la(new, diagonal_output=True)[1], expected.diagonal(dim1=1, dim2=2))
        close(la(new, joint=True)[0], wrapped(new).detach().flatten())
        close(la(new, joint=True)[1], joint)
        noisy = expected + how["sigma"] ** 2 * torch.eye(2, dtype=torch.float64)
        close(predicted.distribution.covariance_matrix, noisy)
    else:
        variance = expected.diagonal(dim1=1, dim2=2)
        f = wrapped(new).detach()
        close(la(new), torch.softmax(f / torch.sqrt(1 + torch.pi / 8 * variance), -1))
        p = f.softmax(-1)
        eye = torch.eye(3, dtype=torch.float64)
        lam = p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)
        unit = eye - p.unsqueeze(1)  # e_k - p, one row per k
        second = (
            torch.einsum("nki,nij,nkj->nk", unit, expected, unit) - torch.einsum("nij,nji->n", lam, expected)[:, None]
        )
        raw = (p + p / 2 * second).clamp(min=0)
        close(la(new, link_approx="delta"), raw / raw.sum(-1, keepdim=True))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("task", TASKS)
def test_samples_have_the_posteriors_mean_and_covariance(task, structure):
    la, dense, *_ = both("mlp", task, structure, "ggn")
    delta = dense.expand(1.0)
    covariance = dense.covariance(delta, sigma=sigma_of(la))
    draws = la.sample(60_000, generator=torch.Generator().manual_seed(0))
    spread = covariance.diag().sqrt()
    assert float(((draws.mean(0) - dense.mean) / spread).abs().max()) < 5 / 60_000**0.5
    centred = (draws - draws.mean(0)) / spread
    correlation = covariance / spread / spread.unsqueeze(1)
    assert float((centred.T @ centred / len(draws) - correlation).abs().max()) < 0.025


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_output_samples_have_the_linearised_moments(structure, pred_type):
    la, *_, x = both("mlp", "regression", structure, "ggn")
    mean, covariance = la(x[:3], joint=True)
    draws = la.functional_samples(x[:3], pred_type, 40_000, generator=torch.Generator().manual_seed(1)).flatten(1)
    spread = covariance.diag().sqrt()
    assert float(((draws.mean(0) - mean) / spread).abs().max()) < 0.03
    centred = (draws - mean) / spread
    assert float((centred.T @ centred / len(draws) - covariance / spread / spread.unsqueeze(1)).abs().max()) < 0.04


@pytest.mark.parametrize("damping", [True, "balanced"])
def test_damping_splits_the_prior_over_the_factors(damping):
    la, dense, *_ = both("mlp", "classification", "kron", "ggn", damping=damping, prior_precision=0.5)
    phi = torch.tanh(la.model[0](make("mlp", "classification")[1])).detach()
    a = phi.T @ phi / len(phi)
    b = dense.h[21:, 21:]  # the bias block of the 3 x 7 layer is B itself
    root = 0.5**0.5
    pi = 1.0 if damping is True else float((a.trace() / 7) / (b.trace() / 3)) ** 0.5
    eye = torch.eye
    weight = torch.kron(b + root / pi * eye(3, dtype=a.dtype), a + root * pi * eye(7, dtype=a.dtype))
    expected = torch.block_diag(weight, b + 0.5 * eye(3, dtype=a.dtype))
    close(la.posterior_precision.to_matrix(), expected)
    close(la.log_det_posterior_precision, torch.logdet(expected))


def test_full_ggn_of_a_softmax_head_is_the_exact_hessian():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification", hessian_structure="full").fit(cut(x, y, 6))
    phi = torch.tanh(model[0](x)).detach()

    def loss(theta):
        w, b = theta[:21].reshape(3, 7), theta[21:]
        return torch.nn.functional.cross_entropy(phi @ w.T + b, y, reduction="sum")

    close(la.H, torch.autograd.functional.hessian(loss, la.mean))


def test_bayesian_linear_regression_is_exact():
    torch.manual_seed(3)
    x, y = torch.randn(31, 4, dtype=torch.float64), torch.randn(31, 1, dtype=torch.float64)
    sigma, delta = 0.6, 1.4
    features = torch.cat([x, torch.ones(31, 1, dtype=torch.float64)], 1)
    precision = features.T @ features / sigma**2 + delta * torch.eye(5, dtype=torch.float64)
    theta = torch.linalg.solve(precision, features.T @ y / sigma**2)
    model = torch.nn.Linear(4, 1).double()
    with torch.no_grad():
        model.weight.copy_(theta[:4].T)
        model.bias.copy_(theta[4])
    la = Laplace(model, "regression", hessian_structure="full", sigma_noise=sigma, prior_precision=delta).fit(
        cut(x, y, 8)
    )
    marginal = features @ features.T / delta + sigma**2 * torch.eye(31, dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(torch.zeros(31, dtype=torch.float64), marginal).log_prob(y.squeeze())
    close(la.log_marginal_likelihood(), exact)
    new = torch.randn(3, 5, dtype=torch.float64)
    new[:, 4] = 1
    close(la(new[:, :4])[1].flatten(), (new @ torch.linalg.inv(precision) * new).sum(1))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_evidence_gradient_agrees_with_finite_differences(structure, prior, curvature):
    la, *_ = both("mlp", "regression", structure, curvature)
    precision = torch.tensor(0.8 if prior == "scalar" else [0.8, 1.9], dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(la.log_marginal_likelihood, (precision, sigma), rtol=1e-6)
    assert torch.autograd.gradgradcheck(la.log_marginal_likelihood, (precision, sigma), rtol=1e-5)
