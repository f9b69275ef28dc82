"""Leave-one-out tuning: the score is that of refits without each example."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import oracle
from laplace import Laplace
from laplace.errors import InputError, LaplaceWarning, OptionError
from laplace.likelihoods import Ordinal
from laplace.tuning import loo
from networks import cut, head_names, make, split_task

pytestmark = pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")


def linear(outputs=1, n=25, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(n, 4, dtype=torch.float64)
    y = x @ torch.randn(4, outputs, dtype=torch.float64) + 0.3 * torch.randn(n, outputs, dtype=torch.float64)
    return nn.Linear(4, outputs, bias=False).double(), x, y


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize(("delta", "sigma"), [(1e-3, 0.3), (2.0, 0.5), (30.0, 2.0)])
def test_linear_regression_is_scored_as_by_n_refits(outputs, delta, sigma):
    model, x, y = linear(outputs)
    with torch.no_grad():
        model.weight.copy_(oracle.linear_regression(x, y, delta, sigma)[0].T)
    la = Laplace(model, "regression", "all", "full", prior_precision=delta, sigma_noise=sigma).fit(cut(x, y, [7, 5]))
    mean, variance = oracle.refits(x, y, delta, sigma)
    nll = -Normal(mean, (variance[:, None] + sigma**2).sqrt()).log_prob(y).sum(1).mean()
    tuned = la.tune("prior_precision", method="loo", bounds={"prior_precision": (delta, 1.01 * delta)}, grid_size=2)
    assert tuned.points[0].score == pytest.approx(float(nll), rel=1e-9)


def dense_nll(la, names, x, y, task, sigma, temperature, weights):
    """The leave-one-out score of `la` as it is, from its own precision, by formula."""
    model = la.model
    f, jac = model(x).detach(), oracle.jacobian(model, names, x)
    count = (weights / temperature / (sigma**2 if task == "regression" else 1.0))[:, None]
    lam = oracle.fisher(task, f) * count[:, :, None]
    gradient = -oracle.score_rows(task, f, y) * count
    mean, covariance = oracle.without_example(jac, la.posterior.gaussian.precision_matrix(), f, lam, gradient)
    if task == "regression":
        noise = sigma**2 * torch.eye(2, dtype=f.dtype)
        scores = torch.distributions.MultivariateNormal(mean, covariance + noise).log_prob(y)
    else:
        scale = (1 + math.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt()
        scores = (mean / scale).log_softmax(-1).gather(1, y[:, None])[:, 0]
    return float(-(weights * scores).sum() / weights.sum())


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_every_structure_is_scored_by_a_newton_step_without_each_example(task, subset, structure):
    model, x, y = make("mlp", task, n=40)
    weights = torch.arange(40, dtype=torch.float64) % 3 + 0.5
    batches = [
        (a, b, w) for (a, b), (w, _) in zip(cut(x, y, [9, 14, 3]), cut(weights, weights, [9, 14, 3]), strict=True)
    ]
    sigma, temperature = (0.7, 1.3) if task == "regression" else (1.0, 0.8)
    options = {"sigma_noise": sigma} if task == "regression" else {}
    la = Laplace(model, task, subset, structure, prior_precision=60.0, temperature=temperature, **options).fit(batches)
    names = head_names(model) if subset == "last_layer" else [k for k, _ in model.named_parameters()]
    expected = dense_nll(la, names, x, y, task, sigma, temperature, weights)
    bounds = {"prior_precision": (60.0, 61.0)}
    tuned = la.tune("prior_precision", method="loo", bounds=bounds, grid_size=2, link_approx="probit")
    assert tuned.points[0].score == pytest.approx(expected, rel=1e-8)


def test_the_score_does_not_depend_on_batches():
    scores = []
    for sizes in ([30], [7, 1, 11], [4]):
        model, x, y = make("mlp", "classification", n=30)
        la = Laplace(model, "classification").fit(cut(x, y, sizes))
        scores.append(la.tune(method="loo", grid_size=5).score)
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-9)


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [("binary", 1), ("multilabel", 3), ("poisson", 2), ("heteroscedastic", 2), (Ordinal(oracle.CUTS), 1)],
)
@pytest.mark.parametrize("structure", ["full", "lowrank", "gp"])
def test_every_likelihood_has_a_leave_one_out_score(likelihood, outputs, structure):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    x = torch.randn(20, 4, dtype=torch.float64)
    labels = 1 if likelihood == "heteroscedastic" else outputs
    y = torch.randint(2, (20,) if isinstance(likelihood, Ordinal) else (20, labels))
    la = Laplace(model, likelihood, "all", structure).fit([(x, y if isinstance(likelihood, Ordinal) else y.double())])
    tuned = la.tune(method="loo", grid_size=5)
    assert math.isfinite(tuned.score)
    assert float(la.prior_precision) == float(tuned.prior_precision)


def test_a_leverage_of_one_is_clamped():
    """As many weights as examples, and hardly a prior: left out, an example is predicted by the prior alone."""
    model, x, y = linear(n=4)
    la = Laplace(model, "regression", "all", "full", prior_precision=1e-4, sigma_noise=1e-3).fit([(x, y)])
    tuned = la.tune("prior_precision", method="loo")
    assert all(math.isfinite(point.score) for point in tuned.points)
    f, s, root = torch.zeros(1, 1).double(), torch.full((1, 1, 1), 3.0).double(), torch.ones(1, 1, 1).double()
    left = loo.without(f, s, root, torch.zeros(1, 1).double(), torch.float64)
    assert float(left.variance) == pytest.approx(3 + 9 / (1 - loo.LARGEST_LEVERAGE))


def test_data_is_that_of_fit_or_as_given():
    model, training, validation = split_task("classification")
    la = Laplace(model, "classification").fit(training)
    assert la.training_data is training
    own, other = la.tune(method="loo").score, la.tune(method="loo", train_loader=validation).score
    assert own != other
    assert la.tune(method="loo", train_loader=training).score == pytest.approx(own)
    with pytest.raises(InputError, match="read once"):
        la.tune(method="loo", train_loader=iter(training))


def test_without_training_data_it_says_what_to_give():
    model, training, _ = split_task("classification")
    la = Laplace(model, "classification").fit(iter(training))
    assert la.training_data is None
    with pytest.raises(OptionError, match="train_loader="):
        la.tune(method="loo")
    assert la.fit(training).training_data is training
    assert la.fit(training, override=False).training_data is None
    with pytest.raises(OptionError, match="'loo'"):
        la.tune(method="validation", val_loader=training, train_loader=training)


def test_many_examples_are_sampled_and_said(monkeypatch):
    monkeypatch.setattr(loo, "MOST_EXAMPLES", 20)
    monkeypatch.setattr(loo, "FEWEST_EXAMPLES", 10)
    model, x, y = make("mlp", "classification", n=50)
    data = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    la = Laplace(model, "classification").fit(data)
    state = torch.random.get_rng_state()
    tuned = la.tune(method="loo", grid_size=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert "20 of 50" in tuned.notes[0]
    assert la.tune(method="loo", grid_size=3).points[0].score == tuned.points[0].score
    assert la.tune(method="loo", grid_size=3, seed=1).points[0].score != tuned.points[0].score


def test_a_wide_head_is_sampled_with_a_warning(monkeypatch):
    monkeypatch.setattr(loo, "MOST_WORK", 1.0)
    monkeypatch.setattr(loo, "FEWEST_EXAMPLES", 10)
    model, x, y = make("mlp", "classification", n=50)
    la = Laplace(model, "classification").fit(cut(x, y, 8))
    with pytest.warns(LaplaceWarning, match="10 of 50"):
        la.tune(method="loo", grid_size=3)


def test_a_loader_with_a_sampler_gives_its_own_examples_only(monkeypatch):
    monkeypatch.setattr(loo, "MOST_EXAMPLES", 10)
    monkeypatch.setattr(loo, "FEWEST_EXAMPLES", 10)
    model, x, y = make("mlp", "classification", n=50)
    x[20:] = math.nan
    data = DataLoader(TensorDataset(x, y), batch_size=8, sampler=SubsetRandomSampler(range(20)))
    assert math.isfinite(Laplace(model, "classification").fit(data).tune(method="loo", grid_size=3).score)
