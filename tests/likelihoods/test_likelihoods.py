"""Each likelihood's formulas against autograd and against its own samples."""

from __future__ import annotations

import pytest
import torch

import oracle
from laplace.likelihoods import Categorical, Gaussian

CASES = [(Categorical(), "classification"), (Gaussian(), "regression")]


def data(task, n=6, c=3):
    torch.manual_seed(2)
    f = 2 * torch.randn(n, c, dtype=torch.float64)
    y = torch.randint(c, (n,)) if task == "classification" else torch.randn(n, c, dtype=torch.float64)
    return f, y


@pytest.mark.parametrize(("likelihood", "task"), CASES)
def test_log_prob_score_and_fisher_agree_with_autograd(likelihood, task):
    f, y = data(task)
    expected = torch.stack([oracle.log_prob(task, a, b) for a, b in zip(f, y, strict=True)])
    torch.testing.assert_close(likelihood.log_prob(f, y), expected)
    torch.testing.assert_close(likelihood.score(f, y), oracle.scores(task, f, y))
    torch.testing.assert_close(likelihood.fisher(f).dense(), oracle.hessian_of_loss(task, f, y))


@pytest.mark.parametrize(("likelihood", "task"), CASES)
def test_root_times_the_unit_vectors_is_a_root_of_the_fisher(likelihood, task):
    f, _ = data(task)
    eye = torch.eye(3, dtype=torch.float64).unsqueeze(1).expand(3, 6, 3)
    root = likelihood.root_times(f, eye)  # (K, N, C)
    torch.testing.assert_close(torch.einsum("knc,knd->ncd", root, root), likelihood.fisher(f).dense())


@pytest.mark.parametrize(("likelihood", "task"), CASES)
def test_output_curvature_gram_and_squares_are_those_of_the_dense_matrices(likelihood, task):
    f, _ = data(task)
    curvature = likelihood.fisher(f)
    torch.testing.assert_close(curvature.gram(), curvature.dense().sum(0))
    torch.testing.assert_close(curvature.squares(), curvature.dense().diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize(("likelihood", "task"), CASES)
def test_the_score_of_samples_has_mean_zero_and_the_fisher_as_covariance(likelihood, task):
    f, _ = data(task, n=2)
    draws = likelihood.sample(f, 50_000, torch.Generator().manual_seed(0))
    scores = torch.stack([likelihood.score(f[i].expand(50_000, 3), draws[:, i]) for i in range(2)])
    assert float(scores.mean(1).abs().max()) < 0.02
    second = torch.einsum("nsc,nsd->ncd", scores, scores) / 50_000
    assert float((second - likelihood.fisher(f).dense()).abs().max()) < 0.03


@pytest.mark.parametrize("sigma", [0.3, 2.0])
def test_gaussian_log_likelihood_from_sums_is_the_sum_of_log_probs(sigma):
    f, y = data("regression")
    likelihood = Gaussian()
    value = likelihood.log_likelihood(likelihood.sums(f, y), torch.tensor(sigma, dtype=torch.float64))
    torch.testing.assert_close(value, likelihood.log_prob(f, y, sigma).sum())


def test_categorical_log_likelihood_survives_extreme_logits():
    f = torch.tensor([[300.0, -300.0, 0.0]])
    likelihood = Categorical()
    assert float(likelihood.sums(f, torch.tensor([1]))["loss"]) == pytest.approx(600)
    assert likelihood.fisher(f).dense().isfinite().all()
    assert likelihood.sample(f, 5, None).eq(0).all()
