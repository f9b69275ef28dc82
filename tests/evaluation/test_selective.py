"""Risk against coverage, and bootstrap intervals of any score."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from laplace.errors import InputError, OptionError
from laplace.evaluation import (
    Bootstrap,
    accuracy,
    aurc,
    auroc,
    bootstrap,
    ece,
    excess_aurc,
    nll,
    risk_coverage,
    rmse,
    selective_accuracy,
)


def classified(n=200, c=4):
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(2 * torch.randn(n, c, generator=generator, dtype=torch.float64), -1)
    return probs, torch.randint(c, (n,), generator=generator)


def mean_over_orders(loss, doubt):
    """The risks, averaged over random orders of the examples that tie."""
    rng, found = np.random.default_rng(0), []
    for _ in range(4000):
        order = np.lexsort((rng.uniform(size=len(loss)), doubt))
        found.append(np.cumsum(np.array(loss)[order]) / np.arange(1, len(loss) + 1))
    return np.mean(found, 0)


def test_the_risk_is_that_of_the_most_certain_examples_averaged_over_the_order_of_ties():
    loss, doubt = [1.0, 0.0, 2.0, 0.0, 1.0, 3.0], [0.1, 0.5, 0.5, 0.5, 0.9, 0.9]
    curve = risk_coverage(loss, doubt)
    np.testing.assert_allclose(curve.risk, mean_over_orders(loss, doubt), atol=0.03)
    np.testing.assert_allclose(curve.coverage, np.arange(1, 7) / 6)
    np.testing.assert_allclose(curve.best_risk, np.cumsum(np.sort(loss)) / np.arange(1, 7))
    assert curve.threshold.tolist() == sorted(doubt)
    assert curve.aurc == aurc(loss, doubt) == pytest.approx(curve.risk.mean().item())
    assert curve.excess_aurc == excess_aurc(loss, doubt) == pytest.approx((curve.risk - curve.best_risk).mean().item())
    order = [5, 2, 0, 4, 1, 3]
    again = risk_coverage([loss[i] for i in order], [doubt[i] for i in order])
    torch.testing.assert_close(again.risk, curve.risk)


def test_an_uncertainty_that_is_the_loss_has_no_excess_and_one_that_knows_nothing_has_the_mean_loss():
    loss = np.random.default_rng(0).exponential(size=50)
    assert excess_aurc(loss, loss) == pytest.approx(0, abs=1e-12)
    assert aurc(loss, np.zeros(50)) == pytest.approx(loss.mean())
    assert excess_aurc(loss, -loss) > excess_aurc(loss, np.zeros(50)) > 0


def test_selective_accuracy_is_the_accuracy_on_the_most_certain_examples():
    probs, y = classified()
    for coverage in (0.1, 0.5, 0.8, 1.0):
        kept = probs.amax(-1).argsort(descending=True)[: math.ceil(200 * coverage)]
        assert selective_accuracy(probs, y, coverage) == pytest.approx(accuracy(probs[kept], y[kept]))
    doubt = torch.rand(200, generator=torch.Generator().manual_seed(0))
    kept = doubt.argsort()[:100]
    assert selective_accuracy(probs, y, 0.5, doubt) == pytest.approx(accuracy(probs[kept], y[kept]))
    for bad in (0, 1.1, -1, [0.5]):
        with pytest.raises(InputError, match="coverage="):
            selective_accuracy(probs, y, bad)
    with pytest.raises(InputError, match="loss has 200 examples, uncertainty 3"):
        selective_accuracy(probs, y, 0.5, [1.0, 2.0, 3.0])


def test_bootstrap_intervals_are_those_of_scipy():
    rng = np.random.default_rng(0)
    mean, y = rng.normal(size=80), rng.normal(size=80)
    theirs = stats.bootstrap(
        (mean, y), lambda m, t: np.sqrt(((m - t) ** 2).mean()), paired=True, vectorized=False, n_resamples=2000,
        method="percentile", confidence_level=0.9, random_state=1,
    )  # fmt: skip
    found = bootstrap(rmse, mean, y, level=0.9, n_resamples=2000)
    low, high = theirs.confidence_interval
    assert found.value == pytest.approx(rmse(mean, y))
    assert (found.lower, found.upper) == pytest.approx((low, high), abs=0.1 * (high - low))
    assert found.std == pytest.approx(theirs.standard_error, rel=0.1)
    assert (found.level, found.n_resamples) == (pytest.approx(0.9), 2000)


def test_bootstrap_intervals_hold_the_truth_as_often_as_they_say():
    held = []
    for seed in range(200):
        y = np.random.default_rng(seed).normal(size=60)
        found = bootstrap(rmse, np.zeros(60), y, level=0.9, n_resamples=100)
        held.append(found.lower <= 1 <= found.upper)
    assert 0.8 < np.mean(held) < 0.97


def test_bootstrap_draws_pairs_together_and_groups_apart():
    probs, y = classified(n=50)
    assert bootstrap(lambda p, q: float((p - q).abs().max()), probs, probs, n_resamples=20).upper == 0
    apart = bootstrap(auroc, torch.arange(30.0), torch.arange(7.0) + 12, paired=False, n_resamples=200)
    assert 0 < apart.lower < apart.value < apart.upper < 1
    assert bootstrap(ece, probs, y, n_bins=3, n_resamples=20) == bootstrap(ece, probs, y, n_bins=3, n_resamples=20)
    one, other = (bootstrap(nll, probs, y, generator=torch.Generator().manual_seed(s), n_resamples=20) for s in (1, 2))
    assert one != other
    assert str(Bootstrap(0.5, 0.25, 0.75, 0.95, 0.1, 100)) == "0.5 [0.25, 0.75]"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((rmse, [1.0], [1.0, 2.0]), {}, InputError, "paired=False"),
        ((rmse, [], []), {}, InputError, "at least one array"),
        ((rmse,), {}, InputError, "at least one array"),
        ((rmse, [1.0], [math.nan]), {}, InputError, "nan"),
        (("rmse", [1.0], [1.0]), {}, OptionError, "must be a function"),
        ((lambda x: None, [1.0]), {}, OptionError, "returned None"),
        ((rmse, [1.0], [1.0]), {"level": 1.0}, InputError, "level=1.0"),
        ((rmse, [1.0], [1.0]), {"n_resamples": 1}, OptionError, "n_resamples=1"),
    ],
)
def test_bad_bootstraps_are_refused(arguments, options, error, match):
    with pytest.raises(error, match=match):
        bootstrap(*arguments, **options)
