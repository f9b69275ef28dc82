"""Draws: of independent outputs, of outputs together, of the weights; and the predictives that are means of them."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

import oracle
from laplace import Laplace
from laplace.distributed import alone
from laplace.inference.predict_shards import same_draws
from laplace.linalg.sampling import Draws, seed_from
from laplace.predictive.outputs import OutputGaussian
from networks import cut, make
from zoo import build

STRUCTURES = ["full", "kron", "diag"]
SUBSETS = ["last_layer", "all"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def fitted(task, subset="last_layer", structure="kron", **options):
    model, x, y, _ = build("mlp", task)
    return Laplace(model, task, subset, structure, **options).fit(cut(x, y, 4)), x


def outputs_of_drawn_weights(la, x, n, seed=0):
    """The network run with each draw of `la.sample`, (S, N, C)."""
    layout, out = la.posterior.fit.layout, []
    for weights in la.sample(n, generator=seeded(seed)):
        parts = zip(layout.names, layout.split(weights), layout.shapes, strict=True)
        out.append(functional_call(la.model, {k: w.reshape(shape) for k, w, shape in parts}, (x,)))
    return torch.stack(out).detach()


def correlations(draws):  # (S, M) -> (M, M)
    return torch.corrcoef(draws.T)


@pytest.mark.parametrize("apart", [True, False])
def test_independent_draws_have_the_marginal_variances(apart):
    mean = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, 7.0]], dtype=torch.float64)
    variance = torch.tensor([[0.01, 4.0, 1.0], [25.0, 0.25, 0.09]], dtype=torch.float64)
    draws = torch.cat(list(OutputGaussian(mean, variance).draws(Draws(40_000, seeded(), apart))), 1)
    assert draws.shape == (40_000, 2, 3)
    torch.testing.assert_close(draws.var(0), variance, rtol=0.04, atol=0)
    assert float(((draws.mean(0) - mean) / variance.sqrt()).abs().max()) < 5 / 200
    between = torch.eye(2, dtype=torch.float64) if apart else torch.ones(2, 2, dtype=torch.float64)  # inputs
    off = correlations(draws.flatten(1)) - torch.kron(between, torch.eye(3, dtype=torch.float64))
    assert float(off.abs().max()) < 5 / 200


@pytest.mark.parametrize("c", [3, 200])
def test_shared_draws_depend_on_the_generator_alone_and_not_on_the_parts_that_they_are_made_in(c):
    torch.manual_seed(0)
    f, v = torch.randn(7, c, dtype=torch.float64), torch.rand(7, c, dtype=torch.float64)
    state = torch.get_rng_state()
    whole = torch.cat(list(OutputGaussian(f, v).draws(Draws(50, seeded()))), 1)
    again = Draws(50, seeded())
    parts = [torch.cat(list(OutputGaussian(f[i : i + 2], v[i : i + 2]).draws(again)), 1) for i in range(0, 7, 2)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(torch.cat(list(OutputGaussian(f, v).draws(Draws(50, seeded(1)))), 1), whole)


def test_draws_with_a_covariance_have_it():
    torch.manual_seed(0)
    half = torch.randn(2, 3, 3, dtype=torch.float64)
    s = half @ half.mT
    outputs = OutputGaussian(torch.zeros(2, 3, dtype=torch.float64), s.diagonal(dim1=1, dim2=2), s)
    draws = torch.cat(list(outputs.draws(Draws(40_000, seeded()))), 1)
    for n in range(2):
        torch.testing.assert_close(torch.cov(draws[:, n].T), s[n], atol=0.03 * float(s[n].max()), rtol=0)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_functional_samples_are_uncorrelated_only_where_asked(subset, structure):
    la, x = fitted("regression", subset, structure, prior_precision=0.5, sigma_noise=2.0)
    new = x[:3]
    joint = la(new, joint=True)[1]
    scale = joint.diagonal().rsqrt()
    expected = scale[:, None] * joint * scale
    together = la.functional_samples(new, n_samples=20_000, generator=seeded()).flatten(1)
    apart = la.functional_samples(new, n_samples=20_000, generator=seeded(), diagonal_output=True).flatten(1)
    eye = torch.eye(len(joint), dtype=torch.float64)
    assert float((expected - eye).abs().max()) > 0.3  # or nothing could be told apart
    torch.testing.assert_close(correlations(together), expected, atol=0.04, rtol=0)
    torch.testing.assert_close(correlations(apart), eye, atol=0.04, rtol=0)
    for draws in (together, apart):
        torch.testing.assert_close(draws.var(0), joint.diagonal(), rtol=0.06, atol=0)
        torch.testing.assert_close(draws.mean(0), la(new)[0].flatten(), atol=0.04 * float(scale.min()) ** -1, rtol=0)


def test_predictive_samples_are_the_functional_ones_through_the_link():
    la, x = fitted("classification")
    for diagonal in (False, True):
        how = {"n_samples": 5, "diagonal_output": diagonal}
        f = la.functional_samples(x, generator=seeded(), **how)
        torch.testing.assert_close(la.predictive_samples(x, generator=seeded(), **how), f.softmax(-1))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_monte_carlo_of_independent_outputs_is_the_integral_over_their_variances(structure):
    la, x = fitted("classification", structure=structure, prior_precision=0.05)
    new = x[:3]
    gaussian = la.predict(new).outputs
    got = la(new, link_approx="mc", n_samples=40_000, generator=seeded(), diagonal_output=True)
    noticeable = 0.0
    for n in range(3):
        exact = oracle.softmax_gaussian_integral(gaussian.mean[n], gaussian.variance[n].diag())
        assert float((got[n] - exact).abs().max()) < 5 * 0.5 / 200
        wrong = oracle.softmax_gaussian_integral(gaussian.mean[n], gaussian.variance[n].square().diag())
        noticeable = max(noticeable, float((wrong - exact).abs().max()))
    assert noticeable > 0.015  # squares instead of variances


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_delta_of_independent_outputs_is_its_formula_with_a_diagonal_covariance(subset, structure):
    la, x = fitted("classification", subset, structure, prior_precision=20.0)
    gaussian = la.predict(x).outputs

    def formula(f, s):
        p = f.softmax(-1)
        fisher = p.diag() - p.outer(p)
        moves = torch.eye(len(p), dtype=p.dtype) - p  # rows e_k - p
        return p + p / 2 * (torch.einsum("ki,ij,kj->k", moves, s, moves) - (fisher * s).sum())

    independent = torch.stack([formula(f, v.diag()) for f, v in zip(gaussian.mean, gaussian.variance, strict=True)])
    together = torch.stack([formula(f, s) for f, s in zip(gaussian.mean, gaussian.covariance, strict=True)])
    assert float(independent.min()) > 0  # inside the simplex: nothing is clipped
    torch.testing.assert_close(la(x, link_approx="delta", diagonal_output=True), independent)
    torch.testing.assert_close(la.predict(x, link_approx="delta", diagonal_output=True).mean, independent)
    torch.testing.assert_close(la(x, link_approx="delta"), together)
    if (subset, structure) != ("last_layer", "diag"):  # whose outputs are independent
        assert float((independent - together).abs().max()) > 1e-5


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_nn_of_classification_is_the_mean_of_softmax_over_drawn_weights(subset, structure):
    la, x = fitted("classification", subset, structure, prior_precision=0.2)
    f = outputs_of_drawn_weights(la, x, 12)
    expected = f.softmax(-1).mean(0)
    assert float((f.mean(0).softmax(-1) - expected).abs().max()) > 0.005  # not the softmax of the mean
    torch.testing.assert_close(la(x, pred_type="nn", n_samples=12, generator=seeded()), expected)
    prediction = la.predict(x, pred_type="nn", n_samples=12, generator=seeded())
    torch.testing.assert_close(prediction.mean, expected)
    torch.testing.assert_close(prediction.distribution.probs, expected)
    entropy = torch.special.entr(f.softmax(-1)).sum(-1).mean(0)
    torch.testing.assert_close(prediction.aleatoric, entropy)
    torch.testing.assert_close(prediction.epistemic, torch.special.entr(expected).sum(-1) - entropy)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_nn_of_regression_has_mean_and_variance_of_the_network_over_drawn_weights(subset, structure):
    la, x = fitted("regression", subset, structure, sigma_noise=0.7)
    f = outputs_of_drawn_weights(la, x, 12)
    mean, variance = la(x, pred_type="nn", n_samples=12, generator=seeded())
    torch.testing.assert_close(mean, f.mean(0))
    torch.testing.assert_close(variance, f.var(0))
    prediction = la.predict(x, pred_type="nn", n_samples=12, generator=seeded())
    torch.testing.assert_close(prediction.mean, f.mean(0))
    torch.testing.assert_close(prediction.epistemic, f.var(0))
    torch.testing.assert_close(prediction.distribution.variance, f.var(0) + 0.49)


@pytest.mark.parametrize("subset", SUBSETS)
def test_weight_draws_have_the_posteriors_mean_and_covariance(subset):
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression", subset, "full").fit(cut(x, y, 8))
    draws = la.sample(40_000, generator=seeded())
    spread = float(la.posterior_variance.max())
    torch.testing.assert_close(torch.cov(draws.T), la.posterior_covariance, atol=0.04 * spread, rtol=0)
    torch.testing.assert_close(draws.mean(0), la.mean, atol=0.03 * spread**0.5, rtol=0)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm", "delta"])
def test_class_probabilities_have_the_right_gradients_in_the_inputs(subset, structure, link):
    la, x = fitted("classification", subset, structure, enable_backprop=True, prior_precision=5.0)
    new = x[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda inputs: la(inputs, link_approx=link), (new,), atol=1e-6)
    assert not fitted("classification", subset, structure)[0](new).requires_grad


def test_seeds_are_drawn_on_the_device_of_their_generator():
    expected, shared = seed_from(seeded()), same_draws(Draws(3, seeded()), alone).generator.initial_seed()
    with torch.device("meta"):  # the default of new tensors, which a generator on the CPU cannot fill
        assert seed_from(seeded()) == expected
        assert same_draws(Draws(3, seeded()), alone).generator.initial_seed() == shared
