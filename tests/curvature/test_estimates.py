"""Monte-Carlo and sketched curvature estimate the GGN without bias, whatever the batches."""

from __future__ import annotations

import pytest
import torch

from laplace import Laplace
from laplace.likelihoods import Categorical, Gaussian
from laplace.spec import estimator_named
from networks import cut, make


@pytest.mark.parametrize("kind", ["mc", "sketch"])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()])
def test_estimates_are_unbiased(kind, likelihood):
    torch.manual_seed(0)
    f = 2 * torch.randn(3, 4, dtype=torch.float64)
    exact = likelihood.fisher(f).dense()
    generator = torch.Generator().manual_seed(5)
    draws = 40_000
    estimate = estimator_named(kind, draws, None, None)(
        likelihood, f, torch.zeros(3, dtype=torch.long), generator
    ).dense()
    single = estimator_named(kind, 1, None, None)(likelihood, f, torch.zeros(3, dtype=torch.long), generator)
    assert single.vectors.shape == (1, 3, 4)
    assert float((estimate - exact).abs().max()) < 6 / draws**0.5


def test_sketch_has_less_variance_than_monte_carlo_on_a_confident_network():
    f = torch.tensor([[8.0, 0.0, -1.0]], dtype=torch.float64)
    exact = Categorical().fisher(f).dense()
    errors = {}
    for kind in ("mc", "sketch"):
        generator = torch.Generator().manual_seed(0)
        estimates = [
            estimator_named(kind, 1, None, None)(Categorical(), f, torch.zeros(1, dtype=torch.long), generator).dense()
            for _ in range(3000)
        ]
        errors[kind] = float(sum((e - exact).square().sum() for e in estimates))
    assert errors["sketch"] < errors["mc"] / 10


@pytest.mark.parametrize("kind", ["mc", "sketch"])
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_estimates_do_not_depend_on_the_batches_given_the_generator(kind, task, structure):
    model, x, y = make("mlp", task)
    evidences = []
    for sizes in (23, 7, [1, 10, 3]):
        la = Laplace(model, task, hessian_structure=structure, curvature=kind, curvature_samples=2)
        la.fit(cut(x, y, sizes), generator=torch.Generator().manual_seed(3))
        evidences.append(float(la.log_marginal_likelihood()))
    assert max(evidences) - min(evidences) < 1e-9 * abs(evidences[0])


@pytest.mark.parametrize("kind", ["mc", "sketch"])
def test_a_given_generator_is_the_only_source_of_randomness(kind):
    model, x, y = make("mlp", "classification")
    state = torch.get_rng_state()
    a = Laplace(model, "classification", curvature=kind).fit(cut(x, y, 5), generator=torch.Generator().manual_seed(1))
    b = Laplace(model, "classification", curvature=kind).fit(cut(x, y, 5), generator=torch.Generator().manual_seed(1))
    c = Laplace(model, "classification", curvature=kind).fit(cut(x, y, 5), generator=torch.Generator().manual_seed(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert float(a.log_marginal_likelihood()) == float(b.log_marginal_likelihood())
    assert float(a.log_marginal_likelihood()) != float(c.log_marginal_likelihood())


def test_more_samples_come_closer_to_the_ggn():
    model, x, y = make("mlp", "classification")
    exact = Laplace(model, "classification", hessian_structure="full").fit(cut(x, y, 23)).H
    errors = []
    for samples in (1, 100):
        la = Laplace(model, "classification", hessian_structure="full", curvature="mc", curvature_samples=samples)
        errors.append(float((la.fit(cut(x, y, 23), generator=torch.Generator().manual_seed(0)).H - exact).norm()))
    assert errors[1] < errors[0] / 3
