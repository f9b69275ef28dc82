"""la.tune by validation: every score is recomputed from predictions, and nothing better lies nearby."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.budget import Budget
from laplace.errors import BoundaryWarning, InputError, ModelError, NumericalError, OptionError, UnsupportedError
from networks import CLOSED, split_task

pytestmark = [
    pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning"),
    pytest.mark.filterwarnings("ignore:the delta approximation:laplace.errors.LaplaceWarning"),
]


def problem(task, subset="last_layer", structure="kron", seed=1, **options):
    model, training, validation = split_task(task, seed)
    return Laplace(model, task, subset, structure, **options).fit(training), validation


def at(la, point):
    la.prior_precision, la.temperature = point.prior_precision, point.temperature
    if la.likelihood.has_noise:
        la.sigma_noise = point.sigma_noise
    return la


def predicted(la, x, link=None):
    """What la predicts: class probabilities, or a distribution."""
    prediction = la.predict(x, link_approx=link, n_samples=50, generator=torch.Generator().manual_seed(0))
    return prediction.distribution if la.likelihood.has_noise else torch.distributions.Categorical(prediction.mean)


def nll(la, batches, link=None):
    total = sum(float(predicted(la, x, link).log_prob(y).sum()) for x, y in batches)
    return -total / sum(len(y) for _, y in batches)


@pytest.mark.parametrize("structure", CLOSED)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_score_of_every_point_is_the_predictives(task, subset, structure):
    la, validation = problem(task, subset, structure)
    tuned = la.tune(method="validation", val_loader=validation, grid_size=5)
    assert float(la.prior_precision) == float(tuned.prior_precision)
    assert tuned.score == pytest.approx(min(point.score for point in tuned.points), rel=1e-9)
    for point in [tuned.best, *tuned.points[::3]]:
        assert point.score == pytest.approx(nll(at(la, point), validation), rel=1e-9)


@pytest.mark.parametrize("link", ["probit", "mc", "bridge", "bridge_norm", "delta"])
def test_every_link_is_scored_as_it_predicts(link):
    la, validation = problem("classification")
    options = {"link_approx": link, "n_samples": 50, "grid_size": 5}
    tuned = la.tune(method="validation", val_loader=validation, **options)
    for point in [tuned.best, *tuned.points[::3]]:
        assert point.score == pytest.approx(nll(at(la, point), validation, link), rel=1e-9)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_nothing_better_lies_between_the_values_of_the_grid(task, subset):
    la, validation = problem(task, subset)
    tuned = la.tune(method="validation", val_loader=validation)
    scores = []
    for value in torch.logspace(-4, 4, 65):
        la.prior_precision = value
        scores.append(nll(la, validation))
    assert tuned.score <= min(scores) + 1e-4
    assert len(tuned.points) > 21


@pytest.mark.parametrize("names", [("temperature",), ("sigma_noise",), ("prior_precision", "sigma_noise")])
def test_noise_and_temperature_are_tuned_alone_or_together(names):
    la, validation = problem("regression", prior_precision=3.0, sigma_noise=0.7)
    tuned = la.tune(*names, method="validation", val_loader=validation)
    assert tuned.score == pytest.approx(nll(la, validation), rel=1e-9)
    for kind, before in (("prior_precision", 3.0), ("sigma_noise", 0.7), ("temperature", 1.0)):
        assert (float(getattr(la, kind)) == pytest.approx(before)) is (kind not in names)
        if kind in names:
            best, score = float(getattr(la, kind)), math.inf
            for factor in (0.8, 1.25):
                setattr(la, kind, best * factor)
                score = min(score, nll(la, validation))
                setattr(la, kind, best)
            at_edge = any(kind.replace("_", " ") in note or kind in note for note in tuned.notes)
            assert at_edge or tuned.score <= score + 1e-5


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_no_tensors_precision_alone_can_be_improved(subset):
    la, validation = problem("classification", subset)
    options = {"method": "validation", "val_loader": validation, "grid_size": 9, "link_approx": "probit"}
    scalar = la.tune(**options)
    tuned = la.tune(**options, prior_structure="layerwise")
    assert tuned.score < scalar.score
    assert len(la.prior_precision) == (2 if subset == "last_layer" else 4)
    for i in range(len(la.prior_precision)):
        for value in torch.logspace(-4, 4, 9):
            moved = tuned.prior_precision.clone()
            moved[i] = value
            la.prior_precision = moved
            assert nll(la, validation, "probit") >= tuned.score - 1e-3


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_inputs_from_outside_add_their_entropy(task, pred_type):
    la, validation = problem(task, sigma_noise=0.5) if task == "regression" else problem(task)
    outside = [8 * x for x, _ in validation[:2]]
    options = {"method": "validation", "val_loader": validation, "grid_size": 5, "pred_type": pred_type}
    plain = la.tune(**options)
    tuned = la.tune(**options, ood_loader=outside, ood_weight=0.3)
    assert float(tuned.prior_precision) <= float(plain.prior_precision)
    if pred_type == "nn":
        return
    for point in [tuned.best, *tuned.points[::3]]:
        at(la, point)
        entropies = torch.cat([predicted(la, x).entropy() for x in outside])
        assert point.score == pytest.approx(nll(la, validation) - 0.3 * float(entropies.mean()), rel=1e-9)


def test_a_last_layer_is_run_once_for_all_rounds_and_a_network_once_for_each():
    calls = []
    for subset in ("last_layer", "all"):
        la, validation = problem("classification", subset)
        calls.clear()
        la.model.register_forward_hook(lambda *_: calls.append(1))
        tuned = la.tune(method="validation", val_loader=validation)
        assert tuned.steps > 1
        assert len(calls) == len(validation) * (1 if subset == "last_layer" else tuned.steps)


def test_drawn_weights_are_the_same_at_every_point_and_every_time():
    la, validation = problem("classification", "all")
    options = {"method": "validation", "val_loader": validation, "pred_type": "nn", "n_samples": 5, "grid_size": 5}
    first, second = la.tune(**options), la.tune(**options)
    assert [p.score for p in first.points] == [p.score for p in second.points]
    at(la, first.best)
    by_hand = 0.0
    for x, y in validation:
        p = la(x, pred_type="nn", n_samples=5, generator=torch.Generator().manual_seed(0))
        by_hand -= float(p.log().gather(1, y[:, None]).sum())
    assert first.score == pytest.approx(by_hand / sum(len(y) for _, y in validation), rel=1e-9)


@pytest.mark.parametrize("structure", CLOSED)
def test_little_memory_changes_no_score(structure):
    scores = []
    for budget in (None, 1):
        la, validation = problem("classification", structure=structure)
        la.runner.spec = replace(la.runner.spec, budget=Budget(budget))
        tuned = la.tune(method="validation", val_loader=validation, grid_size=7)
        scores.append(torch.tensor([p.score for p in tuned.points]))
    torch.testing.assert_close(*scores)


def test_edges_are_warned_of_and_noted_by_name():
    la, validation = problem("classification")
    with pytest.warns(BoundaryWarning, match=r"temperature.*bounds=\{'temperature': \(low, high\)\}"):
        tuned = la.tune(
            "temperature", method="CV", val_loader=validation, bounds={"temperature": (1e3, 1e4)}, grid_size=3
        )
    assert len(tuned.notes) == 1
    la, validation = problem("classification", "all")
    with pytest.warns(BoundaryWarning, match=r"prior precision of .*2\.bias.* 10000 is the upper edge"):
        la.tune(
            method="validation",
            val_loader=validation,
            prior_structure="layerwise",
            grid_size=9,
            link_approx="probit",
        )


BAD = [
    ({"val_loader": None}, OptionError, "needs val_loader="),
    ({"val_loader": []}, InputError, "the validation loader gave no batch"),
    ({"val_loader": 3}, InputError, "the loader is a int"),
    ({"val_loader": iter([])}, InputError, "val_loader is a list_iterator, which can be read once"),
    ({"ood_loader": iter([])}, InputError, "ood_loader is a list_iterator"),
    ({"ood_loader": []}, InputError, "the out-of-distribution loader gave no batch"),
    ({"ood_loader": 3}, InputError, "ood_loader is a int"),
    ({"ood_weight": 0}, OptionError, r"ood_weight=0 must be a number in \(0, 1\]"),
    ({"ood_weight": 1.5}, OptionError, r"ood_weight=1.5"),
    ({"ood_weight": True}, OptionError, r"ood_weight=True"),
    ({"ood_weight": "a"}, OptionError, r"ood_weight='a'"),
    ({"loss": "nll"}, OptionError, "neither callable nor a metric"),
    ({"loss": lambda p, y: p.sum() * torch.nan}, NumericalError, r"NaN or infinite at prior precision 0\.0001 .*21 of"),
    ({"loss": lambda p, y: p}, OptionError, "returns one number"),
    ({"pred_type": "gp"}, UnsupportedError, "'glm' or 'nn'"),
    ({"link_approx": "logit"}, OptionError, "link_approx='logit'"),
    ({"n_samples": 1}, OptionError, "n_samples=1"),
    ({"grid_size": 1}, OptionError, "grid_size=1 must be a whole number of at least 2"),
    ({"bounds": (1, 2)}, OptionError, "a mapping such as"),
    ({"bounds": {"sigma": (1, 2)}}, OptionError, "'sigma_noise'"),
    ({"bounds": {"prior_precision": (2, 1)}}, OptionError, r"bounds of prior_precision are \(2, 1\).*0 < low < high"),
    ({"bounds": {"prior_precision": ("a", 1)}}, OptionError, "bounds of prior_precision"),
    ({"bounds": {"temperature": (1, 2)}}, OptionError, r"which is not tuned: .*'prior_precision', 'temperature'"),
    ({"ood_weight": 0.7}, OptionError, "ood_weight=0.7 goes with ood_loader="),
    ({"loss": lambda p, y: torch.ones(())}, NumericalError, r"score is 1 at all 21 values of prior precision.*nothing"),
    ({"prior_structure": "diag"}, UnsupportedError, "'scalar' or 'layerwise'"),
    ({"method": "adam"}, OptionError, "'auto', 'evidence', 'loo', 'validation', 'bayesian'"),
    ({"method": "evidence"}, OptionError, "val_loader= goes with method='validation' or 'bayesian'"),
    (
        {"method": "evidence", "val_loader": None, "bounds": {}},
        OptionError,
        "bounds= goes with method='loo' or 'validation'",
    ),
    ({"method": "evidence", "val_loader": None, "grid_size": 7}, OptionError, "grid_size= goes with"),
    ({"method": "evidence", "val_loader": None, "pred_type": "nn"}, OptionError, "pred_type= goes with"),
    ({"n_steps": 3}, OptionError, "n_steps= goes with method='auto' or 'evidence'; 'validation' has no use for it"),
    ({"evaluations": 3}, OptionError, "evaluations= goes with method='bayesian'"),
    ({"seed": 3}, OptionError, "seed= goes with method='auto' or 'loo' or 'bayesian'"),
]


@pytest.mark.parametrize(("options", "error", "match"), BAD)
def test_bad_calls_are_refused_and_nothing_changes(options, error, match):
    la, validation = problem("classification", prior_precision=2.0, temperature=0.5)
    with pytest.raises(error, match=match):
        la.tune(**{"method": "validation", "val_loader": validation} | options)
    assert (float(la.prior_precision), la.temperature) == (2.0, 0.5)


def test_unknown_and_repeated_names_are_refused():
    la, _ = problem("classification")
    with pytest.raises(OptionError, match=r"'prior_mean'.*'prior_precision', 'sigma_noise', 'temperature'"):
        la.tune("prior_mean")
    with pytest.raises(OptionError, match="named once"):
        la.tune("temperature", "temperature")
    with pytest.raises(OptionError, match="for regression"):
        la.tune("sigma_noise")


class Larger:
    """A metric of which larger values are better, as torchmetrics' accuracy."""

    higher_is_better = True

    def reset(self):
        self.total = 0.0

    def update(self, p, y):
        self.total += float(p.gather(1, y[:, None]).log().sum())

    def compute(self):
        return self.total


def test_a_metric_of_which_more_is_better_is_maximised():
    la, validation = problem("classification")
    tuned = la.tune(method="validation", val_loader=validation, loss=Larger())
    best = float(tuned.prior_precision)
    other, _ = problem("classification")
    by_loss = other.tune(method="validation", val_loader=validation)
    assert best == pytest.approx(float(by_loss.prior_precision), rel=1e-2)  # as far as scores differ
    assert all(point.score >= tuned.score for point in tuned.points)


@pytest.mark.parametrize("structure", ["diag", pytest.param("kron", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_noise_and_prior_together_are_no_worse_than_a_fine_grid_of_both(structure, seed):
    torch.manual_seed(seed)
    x = torch.randn(120, 3).double()
    y = x.sin().sum(1, keepdim=True) + 0.3 * torch.randn(120, 1).double()
    model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    la = Laplace(model, "regression", "all", structure).fit([(x[:80], y[:80])])
    names = ("prior_precision", "sigma_noise")
    both = la.tune(*names, method="validation", val_loader=[(x[80:], y[80:])])
    again = la.tune(*names, method="validation", val_loader=[(x[80:], y[80:])])
    assert again.score <= both.score
    three = la.tune(*names, "temperature", method="validation", val_loader=[(x[80:], y[80:])])
    assert three.score <= both.score + 1e-3
    la.temperature, scores = 1.0, []
    for precision in torch.logspace(-4, 4, 17):
        la.prior_precision = precision
        mean, variance = la(x[80:], diagonal_output=True)
        for sigma in torch.logspace(-1, 0.5, 16).double():
            la.sigma_noise = sigma
            mean, variance = la(x[80:], diagonal_output=True)
            spread = (variance + sigma**2).sqrt()
            scores.append(float(-torch.distributions.Normal(mean, spread).log_prob(y[80:]).mean()))
    assert both.score <= min(scores) + 1e-3


@pytest.mark.parametrize("which", ["val_loader", "ood_loader"])
def test_a_bad_batch_of_a_validation_loader_is_named(which):
    la, validation = problem("classification")
    (x, y), *_ = validation
    bad, wide = x.clone(), torch.cat([x, x], 1)
    bad[1] = torch.nan
    loaders = {"val_loader": [(x, y)], "ood_loader": [x]}
    word = {"val_loader": "validation", "ood_loader": "out-of-distribution"}[which]
    for other, error, words in (
        (bad, InputError, "the network's outputs hold NaN"),
        (wide, ModelError, "the network fai"),
    ):
        given = loaders | {which: [*loaders[which], (other, y) if which == "val_loader" else other]}
        with pytest.raises(error, match=f"{word} batch 1: {words}"):
            la.tune(method="validation", **given)


def test_curves_are_asked_for_by_number():
    la, validation = problem("classification")
    tuned = la.tune(method="validation", val_loader=validation)
    with pytest.raises(OptionError, match=r"index='0.weight': the number of a prior precision"):
        tuned.curve("prior_precision", "0.weight")
