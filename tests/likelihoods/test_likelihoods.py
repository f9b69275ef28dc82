"""One suite for every likelihood: its formulas against autograd, against sums over all labels, against quadrature."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import oracle
from laplace.errors import LaplaceWarning
from laplace.likelihoods import (
    LIKELIHOODS,
    Bernoulli,
    Categorical,
    Gaussian,
    GivenNoise,
    HeteroscedasticGaussian,
    Likelihood,
    Multilabel,
    Ordinal,
    Poisson,
    Preference,
    Targets,
    from_log_prob,
)
from laplace.linalg.sampling import Draws
from laplace.network.batches import Batch
from laplace.network.inputs import Inputs
from laplace.predictive import OutputGaussian

F64 = torch.float64


@dataclass
class Case:
    """A likelihood, and the oracle's name and number of outputs for it."""

    likelihood: Likelihood
    task: str
    outputs: int

    def data(self, n: int = 4) -> tuple[Tensor, Tensor]:
        torch.manual_seed(2)
        f = 1.2 * torch.randn(n, self.outputs, dtype=F64)
        labels = [oracle.all_labels(self.task, row)[0] for row in f]
        return f, torch.stack([y[torch.randint(len(y), ()) // (1 + (self.task == "poisson"))] for y in labels])


CASES = [
    Case(Categorical(), "classification", 3),
    Case(Gaussian(), "regression", 2),
    Case(Bernoulli(), "binary", 1),
    Case(Preference(), "reward_modeling", 1),
    Case(Multilabel(), "multilabel", 3),
    Case(Poisson(), "poisson", 2),
    Case(HeteroscedasticGaussian(), "heteroscedastic", 4),
    Case(Ordinal(oracle.CUTS), "ordinal", 1),
]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.likelihood.name)


def test_every_likelihood_is_in_the_suite():
    assert {case.likelihood.name for case in CASES} | {"given_noise"} == set(LIKELIHOODS)


@every
def test_log_prob_and_score_are_those_of_the_definition(case):
    f, y = case.data()
    torch.testing.assert_close(case.likelihood.log_prob(f, y), oracle.log_probs(case.task, f, y))
    torch.testing.assert_close(case.likelihood.score(f, y), oracle.score_rows(case.task, f, y))


@every
def test_fisher_is_the_expected_square_of_the_score(case):
    f, y = case.data()
    fisher = case.likelihood.fisher(f, y)
    torch.testing.assert_close(fisher.dense(), oracle.fisher(case.task, f), rtol=1e-7, atol=1e-9)
    if case.likelihood.hessian_is_fisher:
        torch.testing.assert_close(fisher.dense(), oracle.bend_rows(case.task, f, y), rtol=1e-7, atol=1e-9)
    else:
        assert float((fisher.dense() - oracle.bend_rows(case.task, f, y)).abs().max()) > 1e-3
    torch.testing.assert_close(fisher.gram(), fisher.dense().sum(0))
    torch.testing.assert_close(fisher.squares(), fisher.dense().diagonal(dim1=1, dim2=2))


@every
def test_both_roots_are_roots_of_the_fisher(case):
    f, _ = case.data()
    dense = case.likelihood.fisher(f).dense()
    eye = torch.eye(case.outputs, dtype=F64).unsqueeze(1).expand(-1, len(f), -1)
    for root in (case.likelihood.root_times(f, eye), case.likelihood.fisher(f).root()):
        torch.testing.assert_close(torch.einsum("knc,knd->ncd", root, root), dense)


@every
def test_drawn_scores_have_mean_zero_and_the_fisher_as_covariance(case):
    f, y = case.data(n=2)
    drawn = case.likelihood.drawn_scores(f, y, 8_000, torch.Generator().manual_seed(0))
    dense = case.likelihood.fisher(f).dense()
    scale = float(dense.abs().max())
    assert float(drawn.mean(0).abs().max()) < 0.06 * scale**0.5
    second = torch.einsum("snc,snd->ncd", drawn, drawn) / len(drawn)
    assert float((second - dense).abs().max()) < 0.12 * scale


@every
def test_samples_have_the_moments_of_the_labels_and_do_not_depend_on_the_batch(case):
    f, _ = case.data(n=2)
    drawn = case.likelihood.sample(f, 20_000, torch.Generator().manual_seed(1)).double()
    for i, row in enumerate(f):
        y, p = oracle.all_labels(case.task, row)
        y = y.double().reshape(len(y), -1)
        mean = p @ y
        variance = p @ (y - mean).square()
        found = drawn[:, i].reshape(len(drawn), -1)
        assert float(((found.mean(0) - mean).abs() / (variance / len(drawn)).sqrt()).max()) < 4.5
        torch.testing.assert_close(found.var(0), variance, rtol=0.06, atol=0)
    generator = torch.Generator().manual_seed(1)
    parts = [case.likelihood.sample(f[[i]], 20_000, generator) for i in range(2)]
    assert torch.equal(torch.cat(parts, 1).double(), drawn)


@every
def test_the_inverse_link_gives_probabilities_or_the_mean(case):
    f, _ = case.data()
    for row, value in zip(f, case.likelihood.inverse_link(f), strict=True):
        y, p = oracle.all_labels(case.task, row)
        of_classes = case.task in ("classification", "ordinal")
        torch.testing.assert_close(value, p if of_classes else p @ y.double())


@every
def test_sums_add_up_to_the_weighted_log_likelihood(case):
    f, y = case.data(n=5)
    weights = torch.tensor([1.0, 0.0, 2.5, 1.0, 0.3], dtype=F64)
    sums = case.likelihood.sums(f[:2], Targets(y[:2], weights[:2]))
    for key, value in case.likelihood.sums(f[2:], Targets(y[2:], weights[2:])).items():
        sums[key] = sums[key] + value
    total = case.likelihood.log_likelihood(sums, torch.ones((), dtype=F64))
    torch.testing.assert_close(total, (weights * oracle.log_probs(case.task, f, y)).sum())


def integral(values, f: Tensor, covariance: Tensor) -> Tensor:
    """E[values(f)] for one example under N(f, covariance)."""
    z, weights = oracle.normal_nodes(len(f), 40 if len(f) < 3 else 14)
    return torch.tensordot(weights, values(f + z @ torch.linalg.cholesky(covariance).T), 1)


def gaussian(case: Case) -> OutputGaussian:
    f, _ = case.data(n=2)
    root = 0.5 * torch.randn(2, case.outputs, case.outputs, dtype=F64) + 0.3 * torch.eye(case.outputs, dtype=F64)
    covariance = root @ root.mT
    return OutputGaussian(f, covariance.diagonal(dim1=1, dim2=2), covariance)


@every
def test_predictive_moments_are_the_integrals(case):
    """Exactly where there is a closed form, within its known error for the probit approximation."""
    likelihood, outputs, one = case.likelihood, gaussian(case), torch.ones((), dtype=F64)
    link = likelihood.link_named(None)
    if likelihood.links:
        p = likelihood.links[link].apply(outputs, Draws(1, None))
        for row, f, covariance in zip(p, outputs.mean, outputs.covariance, strict=True):
            exact = integral(likelihood.inverse_link, f, covariance)
            assert float((row - exact).abs().max()) < (1e-8 * float(exact.max()) if link == "exact" else 0.06)
        if "quadrature" in likelihood.links:
            q = likelihood.links["quadrature"].apply(outputs, Draws(1, None))
            exact = torch.stack(
                [integral(likelihood.inverse_link, f, c) for f, c in zip(outputs.mean, outputs.covariance, strict=True)]
            )
            torch.testing.assert_close(q, exact, rtol=1e-5 if case.outputs > 2 else 1e-8, atol=0)
    else:
        p = None
    if case.task in ("regression", "heteroscedastic", "poisson"):
        y_mean, y_variance = [], []
        for f, covariance in zip(outputs.mean, outputs.covariance, strict=True):
            c = case.outputs // (2 if case.task == "heteroscedastic" else 1)

            def noise(f: Tensor) -> Tensor:
                return {"regression": torch.ones_like(f), "poisson": f.exp(), "heteroscedastic": f.exp()}[case.task]

            mean = integral(likelihood.inverse_link, f, covariance)
            second = integral(lambda g: likelihood.inverse_link(g).square(), f, covariance)
            extra = integral(lambda g, c=c: noise(g)[:, -c:], f, covariance)
            y_mean.append(mean)
            y_variance.append(second - mean.square() + extra)
        distribution = likelihood.distribution(outputs, p, one)
        torch.testing.assert_close(distribution.mean, torch.stack(y_mean), rtol=1e-6, atol=1e-9)
        variance = torch.stack(y_variance)
        torch.testing.assert_close(distribution.variance, variance, rtol=1e-6, atol=1e-9)
        epistemic, aleatoric = likelihood.uncertainty(outputs, p, one, Draws(10))
        torch.testing.assert_close(epistemic + aleatoric, variance, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", [case for case in CASES if case.likelihood.links], ids=lambda c: c.likelihood.name)
def test_log_predictive_is_the_log_of_a_probability(case):
    """Over all labels the predictive adds up to 1."""
    likelihood, outputs, one = case.likelihood, gaussian(case), torch.ones((), dtype=F64)
    p = likelihood.links[likelihood.link_named(None)].apply(outputs, Draws(1, None))
    y, _ = oracle.all_labels(case.task, outputs.mean[0])
    rows = OutputGaussian(outputs.mean[[0]].expand(len(y), -1), outputs.variance[[0]].expand(len(y), -1))
    found = likelihood.log_predictive(rows, p[[0]].expand(len(y), -1), y, one).exp()
    assert float(found.sum()) == pytest.approx(1, abs=2e-3 if case.task == "poisson" else 1e-9)


@every
def test_extreme_outputs_leave_everything_finite(case):
    likelihood = case.likelihood
    for size in (-30.0, 30.0):
        f = torch.full((2, case.outputs), size)
        f[0, 0] = -size
        y = likelihood.sample(f.clamp(max=8), 1, torch.Generator().manual_seed(0))[0]
        for value in (likelihood.log_prob(f, y), likelihood.score(f, y), likelihood.fisher(f).dense()):
            assert value.isfinite().all()


def test_categorical_log_likelihood_survives_extreme_logits():
    f = torch.tensor([[300.0, -300.0, 0.0]])
    likelihood = Categorical()
    assert float(likelihood.sums(f, Targets(torch.tensor([1])))["loss"]) == pytest.approx(600)
    assert likelihood.fisher(f).dense().isfinite().all()
    assert likelihood.sample(f, 5, None).eq(0).all()


@pytest.mark.parametrize("sigma", [0.3, 2.0])
@pytest.mark.parametrize("likelihood", [Gaussian(), Gaussian([0.5, 2.0])])
def test_gaussian_log_likelihood_from_sums_is_the_sum_of_log_probs(likelihood, sigma):
    f, y = CASES[1].data()
    value = likelihood.log_likelihood(likelihood.sums(f, Targets(y)), torch.tensor(sigma, dtype=F64))
    torch.testing.assert_close(value, likelihood.log_prob(f, y, sigma).sum())
    noise = torch.ones(2, dtype=F64) if likelihood.per_output is None else likelihood.per_output
    torch.testing.assert_close(value, torch.distributions.Normal(f, sigma * noise).log_prob(y).sum())


@pytest.mark.parametrize("given", [False, True])
def test_gaussian_with_unequal_noise_has_its_precisions_as_fisher(given):
    f, y = CASES[1].data()
    noise = torch.tensor([0.5, 2.0], dtype=F64).expand_as(f)
    likelihood = GivenNoise() if given else Gaussian(noise[0])
    labels = likelihood.targets(f, Batch(0, Inputs(f), y, {"noise": noise})).y if given else y
    g = f.clone().requires_grad_()
    expected = torch.distributions.Normal(g, noise).log_prob(y).sum(-1)
    torch.testing.assert_close(likelihood.log_prob(f, labels), expected.detach())
    torch.testing.assert_close(likelihood.score(f, labels), torch.autograd.grad(expected.sum(), g)[0])
    torch.testing.assert_close(likelihood.fisher(f, labels).dense(), noise.pow(-2).diag_embed())
    drawn = likelihood.drawn_scores(f, labels, 20_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.square().mean(0), noise.pow(-2), rtol=0.06, atol=0)
    eps = torch.ones(1, *f.shape, dtype=F64)
    torch.testing.assert_close(likelihood.root_times(f, eps, labels)[0], 1 / noise)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0]])
@pytest.mark.parametrize("ignore", [None, -100])
def test_categorical_with_options_is_torchs_cross_entropy(smoothing, weights, ignore):
    f, y = CASES[0].data(n=6)
    if ignore is not None:
        y[[1, 4]] = ignore
    likelihood = Categorical(smoothing, weights, ignore)
    targets = likelihood.targets(f, Batch(0, Inputs(f), y))
    g = f.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        g,
        y,
        None if weights is None else torch.tensor(weights, dtype=F64),
        ignore_index=-1 if ignore is None else ignore,
        reduction="sum",
        label_smoothing=smoothing,
    )
    torch.testing.assert_close(likelihood.sums(f, targets)["loss"], loss.detach())
    (slope,) = torch.autograd.grad(loss, g, create_graph=True)
    w = torch.ones(6, dtype=F64) if targets.weights is None else targets.weights
    torch.testing.assert_close(-w[:, None] * likelihood.score(f, targets.y), slope.detach())
    bend = torch.stack([torch.autograd.grad(column.sum(), g, retain_graph=True)[0] for column in slope.unbind(1)], 1)
    torch.testing.assert_close(likelihood.fisher(f, targets.y).weighted(targets.weights).dense(), bend)
    root = likelihood.fisher(f, targets.y).weighted(targets.weights).root()
    torch.testing.assert_close(torch.einsum("knc,knd->ncd", root, root), bend)


def test_smoothed_labels_leave_the_drawn_scores_a_root_of_the_fisher():
    f, y = CASES[0].data(n=2)
    likelihood = Categorical(label_smoothing=0.3)
    drawn = likelihood.drawn_scores(f, y, 20_000, torch.Generator().manual_seed(0))
    second = torch.einsum("snc,snd->ncd", drawn, drawn) / len(drawn)
    assert float((second - likelihood.fisher(f).dense()).abs().max()) < 0.01


def test_from_log_prob_of_a_known_likelihood_is_that_likelihood():
    for case in (CASES[0], CASES[5]):
        f, y = case.data()
        custom = from_log_prob(case.likelihood.log_prob)
        torch.testing.assert_close(custom.score(f, y), case.likelihood.score(f, y))
        torch.testing.assert_close(custom.fisher(f, y).dense(), case.likelihood.fisher(f, y).dense())
        eye = torch.eye(case.outputs, dtype=F64).unsqueeze(1).expand(-1, len(f), -1)
        root = custom.root_times(f, eye, y)
        torch.testing.assert_close(torch.einsum("knc,knd->ncd", root, root), custom.fisher(f, y).dense())


def test_from_log_prob_takes_negative_curvature_out_and_says_so_once():
    def student(f: Tensor, y: Tensor) -> Tensor:
        return -2 * torch.log1p((f - y).square() / 3).sum(-1)

    f, y = torch.tensor([[0.0, 0.0], [0.1, 0.0]], dtype=F64), torch.tensor([[5.0, 0.1], [0.0, 0.0]], dtype=F64)
    likelihood = from_log_prob(student)
    with pytest.warns(LaplaceWarning, match="negative eigenvalues at 1 of 2 examples"):
        first = likelihood.fisher(f, y).dense()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        likelihood.fisher(f, y)
    bend = -torch.stack(
        [torch.autograd.functional.hessian(lambda g, i=i: student(g[None], y[[i]])[0], f[i]) for i in range(2)]
    )
    assert float(bend[0, 0, 0]) < 0
    expected = bend.clone()
    expected[0, 0, 0] = 0
    torch.testing.assert_close(first, expected)
