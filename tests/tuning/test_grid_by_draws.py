"""Grid search with pred_type='nn': what a loss is given is the network under drawn weights, recomputed by hand."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from laplace import Laplace
from networks import cut
from zoo import build

pytestmark = pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
GRID = torch.logspace(-1, 3, 5, dtype=torch.float64)
OPTIONS = {"method": "gridsearch", "grid_size": 5, "log_prior_prec_min": -1, "log_prior_prec_max": 3, "n_samples": 9}


def problem(task, subset, structure):
    model, x, y, _ = build("mlp", task, n=16)
    noise = {"sigma_noise": 0.6} if task == "regression" else {}
    la = Laplace(model, task, subset, structure, **noise).fit(cut(x[:9], y[:9], 4))
    return la, cut(x[9:], y[9:], [3, 4])


def drawn_outputs(la, precision, x):
    """The network under nine draws of the weights at a prior precision, (9, N, C)."""
    la.prior_precision = precision
    layout, out = la.posterior.fit.layout, []
    for weights in la.sample(9, generator=torch.Generator().manual_seed(0)):
        parts = zip(layout.names, layout.split(weights), layout.shapes, strict=True)
        out.append(functional_call(la.model, {k: w.reshape(shape) for k, w, shape in parts}, (x,)))
    return torch.stack(out).detach()


def expected_arguments(la, precision, x, task):
    f = drawn_outputs(la, precision, x)
    return (f.softmax(-1).mean(0),) if task == "classification" else (f.mean(0), f.var(0) + 0.36)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_loss_gets_the_mean_over_drawn_weights(task, subset, structure):
    la, validation = problem(task, subset, structure)
    seen = []

    def loss(*arguments):
        seen.append(arguments)
        return arguments[0].square().sum(-1).mean() - 0.1 * len(arguments) * arguments[-2].mean()

    la.optimize_prior_precision(pred_type="nn", val_loader=validation, loss=loss, **OPTIONS)
    chosen = float(la.prior_precision)
    assert len(seen) == 2 * len(GRID)
    totals = torch.zeros(len(GRID), dtype=torch.float64)
    for index, precision in enumerate(GRID):
        for batch, (x, y) in enumerate(validation):
            given = seen[batch * len(GRID) + index]
            by_hand = (*expected_arguments(la, precision, x, task), y)
            assert len(given) == len(by_hand)
            for one, other in zip(given, by_hand, strict=True):
                torch.testing.assert_close(one, other)
            totals[index] += len(y) * (by_hand[0].square().sum(-1).mean() - 0.1 * len(by_hand) * by_hand[-2].mean())
    assert chosen == pytest.approx(float(GRID[totals.argmin()]))


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_score_is_the_negative_log_likelihood_under_drawn_weights(task, subset):
    la, validation = problem(task, subset, "kron")
    la.optimize_prior_precision(pred_type="nn", val_loader=validation, **OPTIONS)
    chosen, scores = float(la.prior_precision), []
    for precision in GRID:
        total = 0.0
        for x, y in validation:
            arguments = expected_arguments(la, precision, x, task)
            if task == "classification":
                total -= float(arguments[0].log().gather(1, y[:, None]).sum())
            else:
                mean, variance = arguments
                total -= float(torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum())
        scores.append(total)
    assert chosen == pytest.approx(float(GRID[torch.tensor(scores).argmin()]))


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_a_metric_object_gets_the_mean_over_drawn_weights_too(subset):
    la, validation = problem("classification", subset, "kron")
    values = []

    class Metric:
        def reset(self):
            self.total = 0.0

        def update(self, p, y):
            self.total += float(p.gather(1, y[:, None]).sum())

        def compute(self):
            values.append(self.total)
            return self.total

    la.optimize_prior_precision(pred_type="nn", val_loader=validation, loss=Metric(), **OPTIONS)
    for value, precision in zip(values, GRID, strict=True):
        by_hand = sum(
            float(expected_arguments(la, precision, x, "classification")[0].gather(1, y[:, None]).sum())
            for x, y in validation
        )
        assert value == pytest.approx(by_hand)
