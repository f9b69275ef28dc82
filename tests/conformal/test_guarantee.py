"""The coverage is what exchangeability promises: the exact Beta distribution, and over random splits of real data."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_diabetes, load_digits
from torch import nn

from laplace import Laplace
from laplace.conformal import from_predictions
from laplace.conformal.coverage import beta_binomial_cdf
from laplace.conformal.quantiles import least_examples, rank_of, threshold
from made_up_predictions import classes, labels, random_classes, random_regression, regression


def test_the_rank_is_exact_where_floating_point_is_not():
    for n in range(1, 200):
        for percent in (1, 5, 10, 30, 50, 70, 80, 90, 95, 99):
            level = Fraction(percent, 100)
            assert rank_of(n, percent / 100) == max(ceil((n + 1) * level), 1)
    for percent in (50, 80, 90, 95, 99):
        n = least_examples(percent / 100)
        assert rank_of(n, percent / 100) <= n
        assert rank_of(n - 1, percent / 100) > n - 1
    assert least_examples(0.9) == 9
    assert least_examples(0.99) == 99


@pytest.mark.parametrize("n", [1, 8, 9, 10, 57])
def test_the_threshold_is_the_finite_sample_quantile(n):
    scores = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    for level in (0.3, 0.5, 0.9):
        share = ceil((n + 1) * Fraction(str(level))) / n
        expected = np.quantile(scores, share, method="inverted_cdf") if share <= 1 else np.inf
        assert threshold(scores, level).item() == expected


@pytest.mark.parametrize("method", ["scaled", "absolute", "cqr"])
def test_the_coverage_of_intervals_has_the_exact_beta_distribution(method):
    """With one mean and one deviation, the coverage of an interval is known from its half-width."""
    n, level, found = 40, 0.8, []
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.zeros(n, 1, dtype=torch.float64), torch.full((n, 1), 0.4, dtype=torch.float64)
    for _ in range(400):
        y = torch.randn(n, 1, generator=generator, dtype=torch.float64)
        lower, upper = from_predictions(regression(mean, std), y, level, method).interval(regression(mean, std)[:1])
        found.append(stats.norm.cdf(upper.item()) - stats.norm.cdf(lower.item()))
    k = ceil((n + 1) * Fraction(4, 5))
    assert stats.kstest(found, stats.beta(k, n + 1 - k).cdf).pvalue > 0.01


def test_the_coverage_of_adaptive_sets_has_the_exact_beta_distribution():
    """If y is drawn from the probabilities, its randomised score is uniform, and the coverage is the threshold."""
    n, found = 40, []
    for seed in range(400):
        p, y = random_classes(n, seed=seed)
        made = from_predictions(classes(p), y, 0.8, "aps", generator=torch.Generator().manual_seed(seed))
        found.append(made.threshold().item())
    k = ceil((n + 1) * Fraction(4, 5))
    assert stats.kstest(found, stats.beta(k, n + 1 - k).cdf).pvalue > 0.01


def splits(prediction, y, n_cal, repeats, **options):
    """Coverage tests of random splits into calibration and test examples."""
    rng = np.random.default_rng(0)
    for _ in range(repeats):
        order = rng.permutation(len(y))
        cal, test = order[:n_cal], order[n_cal:]
        generator = torch.Generator().manual_seed(int(order[0]))
        made = from_predictions(prediction[cal], y[cal], generator=generator, **options)
        yield made.coverage_test(prediction[test], y[test], generator=generator)


def require_promised(found, level):
    """The mean coverage over splits lies between the level and what its rounding adds, and p-values are uniform."""
    coverage = np.array([test.coverage for test in found])
    n = found[0].cells[0].n_calibration
    error = 3 * coverage.std() / np.sqrt(len(coverage))
    expected = rank_of(n, level) / (n + 1)
    assert abs(coverage.mean() - expected) < error
    assert level - error <= coverage.mean() <= level + 1 / (n + 1) + error
    assert np.mean([test.p_value < 0.1 for test in found]) < 0.2
    assert np.mean([test.holds for test in found]) > 0.95


@pytest.fixture(scope="module")
def diabetes():
    """A posterior after some training, its predictions, and targets, on data that it has not seen."""
    torch.manual_seed(0)
    x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    x, y = x / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1)
    order = torch.randperm(len(x))
    train, rest = order[:142], order[142:]
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x[train]), y[train]).backward()
        optimizer.step()
    la = Laplace(net, "regression", sigma_noise=0.3).fit(x[train], y[train])
    return la, la.predict(x[rest]), y[rest]


@pytest.fixture(scope="module")
def digits():
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16 + 0.5 * torch.randn(len(x), 64), torch.tensor(y)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[:600]), y[:600]).backward()
        optimizer.step()
    la = Laplace(net, "classification").fit(x[:600], y[:600])
    return la, la.predict(x[600:], generator=torch.Generator().manual_seed(0)), y[600:]


@pytest.mark.parametrize("method", ["scaled", "absolute", "cqr"])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_of_real_data_hold_what_is_promised_over_random_splits(diabetes, method, level):
    _, prediction, y = diabetes
    found = list(splits(prediction, y, 100, 150, level=level, method=method))
    require_promised(found, level)
    if method == "scaled" and level == 0.9:  # the posterior's own intervals do not, here
        lower, upper = prediction.interval(level)
        assert ((lower <= y) & (y <= upper)).float().mean() < 0.7


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_sets_of_real_data_hold_what_is_promised_over_random_splits(digits, method, level):
    _, prediction, y = digits
    require_promised(list(splits(prediction, y, 200, 100, level=level, method=method)), level)


def test_without_random_numbers_the_promise_holds_and_sets_are_larger(digits):
    _, prediction, y = digits
    drawn, whole = (
        list(splits(prediction, y, 200, 60, level=0.8, method="aps", randomized=given)) for given in (True, False)
    )
    assert np.mean([test.coverage for test in whole]) > 0.79
    assert np.mean([test.size for test in whole]) > np.mean([test.size for test in drawn])


@pytest.mark.parametrize("method", ["lac", "aps"])
def test_class_conditional_sets_hold_the_promise_for_every_class(digits, method):
    _, prediction, y = digits
    shares = {False: np.zeros((60, 10)), True: np.zeros((60, 10))}
    for by_class, table in shares.items():
        rng = np.random.default_rng(0)
        for row in table:
            order = rng.permutation(len(y))
            cal, test = order[:500], order[500:]
            generator = torch.Generator().manual_seed(0)
            made = from_predictions(
                prediction[cal], y[cal], 0.9, method, class_conditional=by_class, generator=generator
            )
            members = made.set(prediction[test], generator=generator)
            hit = members[torch.arange(len(test)), y[test]]
            row[:] = [hit[y[test] == k].float().mean() for k in range(10)]
    worst = {by_class: table.mean(0).min() for by_class, table in shares.items()}
    assert worst[True] > 0.88
    assert worst[False] < 0.87  # one threshold for all favours the easy classes


def test_each_output_and_each_label_holds_the_promise_by_itself():
    mean, std, y = random_regression(4000, c=3)
    y[:, 2] *= 5
    made = from_predictions(regression(mean[:2000], std[:2000]), y[:2000], 0.9)
    found = made.coverage_test(regression(mean[2000:], std[2000:]), y[2000:])
    assert [cell.name for cell in found.cells] == ["output 0", "output 1", "output 2"]
    assert all(abs(cell.coverage - 0.9) < 0.03 for cell in found.cells)
    assert found.holds
    p, _ = random_classes(4000, 3)
    ones = (torch.rand(4000, 3, generator=torch.Generator().manual_seed(1)) < p.sqrt()).long()  # p is too low
    for by_class in (False, True):
        made = from_predictions(labels(p[:2000]), ones[:2000], 0.9, class_conditional=by_class)
        found = made.coverage_test(labels(p[2000:]), ones[2000:])
        assert len(found.cells) == (6 if by_class else 3)
        assert found.holds
        assert made.set(labels(p[:7])).shape == (7, 3, 2)


def test_the_distribution_of_the_coverage_is_that_of_scipy():
    for m, a, b in ((1, 1, 1), (20, 9, 2), (300, 90, 11), (2000, 901, 100)):
        np.testing.assert_allclose(
            beta_binomial_cdf(m, a, b), stats.betabinom(m, a, b).cdf(np.arange(m + 1)), atol=1e-9
        )


def test_the_coverage_test_finds_examples_that_are_not_like_the_calibration_examples():
    mean, std, y = random_regression(600)
    made = from_predictions(regression(mean[:300], std[:300]), y[:300], 0.9)
    like = made.coverage_test(regression(mean[300:], std[300:]), y[300:])
    other = made.coverage_test(regression(mean[300:], std[300:]), y[300:] + 2)
    assert like.holds
    assert "holds." in str(like)
    assert not other.holds
    assert other.p_value < 1e-6
    assert "does not hold" in str(other)
    (cell,) = like.cells
    k = rank_of(300, 0.9)
    assert cell.p_value == pytest.approx(stats.betabinom(300, k, 301 - k).cdf(cell.covered))
    assert cell.expected == pytest.approx([q / 300 for q in stats.betabinom(300, k, 301 - k).ppf([0.025, 0.975])])
