"""The two solvers of a Gaussian process, and the two forms of its kept gradients, answer alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.backprop.uses import DenseUse
from laplace.structures.functional import points


def fitted(independent: bool = False, budget: int | None = None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randn(20, 1, 6, 6).double(), torch.randint(3, (20,))
    la = Laplace(
        model, "classification", "all", "gp", independent_outputs=independent, memory_budget=budget, prior_precision=0.7
    ).fit([(x[:12], y[:12]), (x[12:], y[12:])])
    return la, torch.randn(5, 1, 6, 6).double()


@pytest.mark.parametrize("independent", [False, True])
def test_a_factor_and_eigenvectors_give_the_same_variances_and_evidence(independent):
    (one, x), (other, _) = fitted(independent), fitted(independent)
    _ = other.posterior.fit.curvature.eigh
    assert one.posterior.gaussian.solver.factor is not None
    assert other.posterior.gaussian.solver.factor is None
    torch.testing.assert_close(
        one.predict(x).outputs.covariance, other.predict(x).outputs.covariance, rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(one.log_marginal_likelihood(), other.log_marginal_likelihood(), rtol=1e-10, atol=0)
    assert "eigh" not in one.posterior.fit.curvature.__dict__


def test_a_second_prior_is_served_by_eigenvectors_and_the_first_keeps_its_answer():
    la, x = fitted()
    first = la.predict(x).outputs.covariance
    la.prior_precision = 3.0
    second = la.predict(x).outputs.covariance
    assert "eigh" in la.posterior.fit.curvature.__dict__
    fresh, _ = fitted()
    fresh.prior_precision = 3.0
    torch.testing.assert_close(second, fresh.predict(x).outputs.covariance, rtol=1e-9, atol=1e-12)
    la.prior_precision = 0.7
    assert torch.equal(la.predict(x).outputs.covariance, first)


def test_a_prior_near_rounding_is_left_to_the_eigenvalues():
    la, _ = fitted()
    la.prior_precision = 1e-12
    assert la.posterior.gaussian.solver.factor is None


def test_kept_gradients_of_a_convolution_are_contracted_and_a_small_budget_changes_nothing():
    (la, x), (small, _) = fitted(), fitted(budget=200_000)
    expected = la.predict(x).outputs.covariance
    held = la.posterior.fit.points._held
    assert isinstance(held[0][0], DenseUse)
    assert all(use.g.dtype == torch.float64 for uses in held for use in uses)
    torch.testing.assert_close(small.predict(x).outputs.covariance, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("independent", [False, True])
def test_a_bias_is_multiplied_with_its_weight_and_each_counts_by_its_own_prior(independent, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(6, 4).double(), torch.randint(3, (6,))
    precisions = torch.tensor([0.5, 2.0, 3.0, 0.1], dtype=torch.float64)
    options = {"independent_outputs": independent, "prior_precision": precisions}
    la = Laplace(model, "classification", "all", "gp", **options).fit([(x, y)])
    together = la.predict(x[:2]).outputs.covariance
    [(weight, bias, *_)] = la.posterior.fit.points._held
    assert bias.g is weight.g
    monkeypatch.setattr(points, "_biases", lambda uses: {})
    apart = Laplace(model, "classification", "all", "gp", **options).fit([(x, y)])
    torch.testing.assert_close(together, apart.predict(x[:2]).outputs.covariance, rtol=1e-11, atol=1e-13)
    [(weight, bias, *_)] = apart.posterior.fit.points._held
    assert bias.g is not weight.g
