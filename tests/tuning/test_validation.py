"""Grid search: the score is the predictive NLL, one run of the network serves the grid, edges are warned of."""

from __future__ import annotations

import pytest
import torch

from laplace import Laplace
from laplace.errors import BoundaryWarning, InputError, NumericalError, OptionError, UnsupportedError
from networks import split_task

GRID = {"log_prior_prec_min": -2, "log_prior_prec_max": 3, "grid_size": 11}
VALUES = torch.logspace(-2, 3, 11, dtype=torch.float64)


def problem(task, structure, seed=0, **options):
    model, training, validation = split_task(task, seed)
    return Laplace(model, task, hessian_structure=structure, **options).fit(training), validation


def nll(la, batches, **how):
    total = 0.0
    for x, y in batches:
        total -= float(la.predict(x, **how).distribution.log_prob(y).sum())
    return total


@pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
@pytest.mark.filterwarnings("ignore:the delta approximation:laplace.errors.LaplaceWarning")
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize(
    ("task", "link"), [("classification", "probit"), ("classification", "delta"), ("regression", "-")]
)
def test_the_best_of_the_grid_is_the_one_that_predicts_best(structure, task, link):
    how = {} if task == "regression" else {"link_approx": link}
    inside = 0
    for seed in range(4):
        la, validation = problem(task, structure, seed)
        scores = []
        for value in VALUES:
            la.prior_precision = value
            scores.append(nll(la, validation, **how))
        la.optimize_prior_precision(method="gridsearch", val_loader=validation, **GRID, **how)
        best = min(range(11), key=scores.__getitem__)
        inside += best not in (0, 10)
        assert float(la.prior_precision) == pytest.approx(float(VALUES[best]))
    assert inside


@pytest.mark.parametrize(("pred_type", "link"), [("nn", "probit"), ("glm", "mc")])
@pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
def test_sampled_predictives_are_searched_with_the_same_noise_everywhere(pred_type, link):
    la, validation = problem("classification", "kron")
    found = set()
    for _ in range(2):
        la.optimize_prior_precision(pred_type, "gridsearch", val_loader=validation, link_approx=link, **GRID)
        found.add(float(la.prior_precision))
    assert len(found) == 1


@pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
def test_cv_is_another_name_and_the_network_runs_once_per_batch():
    la, validation = problem("classification", "kron")
    calls = []
    la.model.register_forward_hook(lambda *_: calls.append(1))
    la.optimize_prior_precision(method="CV", val_loader=validation, log_prior_prec_min=-6, log_prior_prec_max=6)
    assert len(calls) == len(validation)


def test_the_edge_of_the_grid_is_warned_of():
    la, validation = problem("classification", "kron")
    with pytest.warns(BoundaryWarning, match="log_prior_prec_m"):
        la.optimize_prior_precision(
            method="gridsearch", val_loader=validation, log_prior_prec_min=7, log_prior_prec_max=8, grid_size=3
        )


@pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
def test_a_loss_of_ones_own_and_a_metric_object_are_minimised():
    la, validation = problem("classification", "kron")

    def brier(p, y):
        return (p - torch.nn.functional.one_hot(y, 3)).square().sum(-1).mean()

    class Metric:
        """As in torchmetrics, with a state that must not leak from one grid value to the next."""

        def __init__(self):
            self.values = [1e9]

        def reset(self):
            self.values = []

        def update(self, p, y):
            self.values.append((brier(p, y) * len(y), len(y)))

        def compute(self):
            return sum(v for v, _ in self.values) / sum(n for _, n in self.values)

    scores = []
    for value in VALUES:
        la.prior_precision = value
        scores.append(sum(float(brier(la(x), y)) * len(y) for x, y in validation))
    best = float(VALUES[min(range(11), key=scores.__getitem__)])
    metric = Metric()
    for loss in (brier, metric):
        la.optimize_prior_precision(method="gridsearch", val_loader=validation, loss=loss, **GRID)
        assert float(la.prior_precision) == pytest.approx(best)
    assert metric.values == [1e9]


def test_a_regression_loss_gets_mean_and_variance_with_noise():
    la, validation = problem("regression", "kron", sigma_noise=0.5)
    seen = []

    def loss(mean, variance, y):
        seen.append(float(variance.min()))
        return (mean - y).square().mean() + (variance - 0.6).abs().mean()

    la.optimize_prior_precision(method="gridsearch", val_loader=validation, loss=loss, **GRID)
    assert min(seen) > 0.25


def test_bad_calls_are_refused_and_nothing_changes():
    la, validation = problem("classification", "kron")
    with pytest.raises(OptionError, match="needs val_loader"):
        la.optimize_prior_precision(method="gridsearch")
    with pytest.raises(InputError, match="gave no batch"):
        la.optimize_prior_precision(method="gridsearch", val_loader=[])
    with pytest.raises(UnsupportedError, match="marglik"):
        la.optimize_prior_precision(method="gridsearch", val_loader=validation, prior_structure="diag")
    with pytest.raises(OptionError, match="grid_size"):
        la.optimize_prior_precision(method="gridsearch", val_loader=validation, grid_size=0)
    with pytest.raises(OptionError, match="log_prior_prec_min < log_prior_prec_max"):
        la.optimize_prior_precision(method="gridsearch", val_loader=validation, log_prior_prec_min=5)
    with pytest.raises(OptionError, match="neither callable nor a metric"):
        la.optimize_prior_precision(method="gridsearch", val_loader=validation, loss="nll")
    with pytest.raises(NumericalError, match=r"NaN or infinite at prior precision 0\.01"):
        la.optimize_prior_precision(
            method="gridsearch", val_loader=validation, loss=lambda p, y: torch.tensor(torch.nan), **GRID
        )
    with pytest.raises(InputError, match="validation batch 0"):
        la.optimize_prior_precision(method="gridsearch", val_loader=[(x, y + 5) for x, y in validation])
    assert float(la.prior_precision) == 1
