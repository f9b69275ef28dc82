"""Learning over time: shards add to the whole, tasks follow each other, and every number is the oracle's."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import oracle
from exact import assert_close
from laplace import Laplace, marglik_training
from laplace.errors import InputError, NumericalError, OptionError, StaleWarning, UnsupportedError
from networks import cut, make

pytestmark = pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
STRUCTURES = ["full", "diag", "kron", "block"]


def fitted(model, x, y, task="classification", structure="kron", subset="all", **options):
    return Laplace(model, task, subset, structure, **options).fit(cut(x, y, 6))


# ---- shards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_shards_add_to_the_whole_and_can_be_taken_out_again(task, structure, subset):
    model, x, y = make("mlp", task)
    a, b = (fitted(model, x[part], y[part], task, structure, subset) for part in (slice(9), slice(9, None)))
    whole = fitted(model, x, y, task, structure, subset)
    for other, expected in ((a + b, whole), (whole - b, a)):
        assert_close(other.posterior_covariance, expected.posterior_covariance)
        assert_close(other.log_marginal_likelihood(), expected.log_marginal_likelihood())
        assert other.n_data == expected.n_data
        assert_close(other.predict(x[:3]).outputs.mean, expected.predict(x[:3]).outputs.mean)
    assert a.n_data == 9


def test_a_sum_keeps_the_left_ones_prior_and_leaves_both_as_they_were():
    model, x, y = make("mlp", "classification")
    a, b = fitted(model, x[:9], y[:9], prior_precision=3.0), fitted(model, x[9:], y[9:], prior_precision=2.0)
    before = a.log_marginal_likelihood(), b.log_marginal_likelihood()
    assert float((a + b).prior_precision) == 3
    assert (a.log_marginal_likelihood(), b.log_marginal_likelihood()) == before


def test_what_was_not_in_is_taken_out_only_while_the_precision_stays_positive():
    model, x, y = make("mlp", "regression")
    small, other = (
        fitted(model, x[:9], y[:9], "regression", "full"),
        fitted(model, x[15:], y[15:], "regression", "full"),
    )
    with pytest.raises(NumericalError, match="not positive definite"):
        small - other
    small.prior_precision = 1e4
    difference = small - other
    expected = small.H - other.H + 1e4 * torch.eye(small.n_params, dtype=torch.float64)
    assert_close(difference.posterior_precision, expected)
    again = Laplace(model, "regression", "all", "full")
    again.load_state_dict(difference.state_dict())
    assert_close(again.posterior_precision, expected)
    kron = fitted(model, x[:9], y[:9], "regression"), fitted(model, x[15:], y[15:], "regression")
    with pytest.raises(NumericalError, match="some of the data that is taken out was not in the fit"):
        kron[0] - kron[1]
    with pytest.raises(InputError, match="9 examples cannot be taken out of 9"):
        small - small


def test_posteriors_of_different_kinds_are_refused_with_what_differs():
    model, x, y = make("mlp", "classification")
    a = fitted(model, x, y)
    with pytest.raises(InputError, match=r"structure \(kron and diag\)"):
        a + fitted(model, x, y, structure="diag")
    with pytest.raises(InputError, match=r"structure \(kron and kron, damping=True\); curvature \(ggn and ef\)"):
        a + fitted(model, x, y, damping=True, curvature="ef")
    with pytest.raises(InputError, match="subset of weights"):
        a - fitted(model, x, y, subset="last_layer")
    moved = copy.deepcopy(model)
    assert_close((a + fitted(moved, x, y)).mean, a.mean)
    with torch.no_grad():
        moved[0].weight += 1e-3
    with pytest.raises(InputError, match="the weights of the network"):
        a + fitted(moved, x, y)
    last = [fitted(m, x, y, subset="last_layer") for m in (model, moved)]
    with pytest.raises(InputError, match="the weights of the network"):
        last[0] + last[1]
    with pytest.raises(InputError, match="likelihood"):
        a + fitted(model, x, torch.randn(len(x), 3, dtype=torch.float64), "regression")
    with pytest.raises(TypeError):
        a + 1


# ---- tasks -------------------------------------------------------------------------------------------------------


class Tasks:
    """Three small tasks at three different weights, as a chain of posteriors and as dense matrices."""

    def __init__(self, structure: str, subset: str, task: str, sigmas=(1.0, 1.0, 1.0), temperature=1.0, **options):
        model, x, y = make("mlp", task, n=30)
        self.names = [k for k, _ in model.named_parameters() if subset == "all" or k.startswith("2.")]
        self.parts, self.models, self.data, self.h = [], [], [], []
        self.task, self.temperature, self.sigmas, prior = task, temperature, sigmas, None
        for number, sigma in enumerate(sigmas):
            model = copy.deepcopy(model)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.3 * torch.randn_like(p))
            part = slice(10 * number, 10 * number + 10)
            start = {"prior_precision": 0.7} if prior is None else {"prior": prior}
            if task == "regression":
                start["sigma_noise"] = sigma
            self.la = fitted(
                model, x[part], y[part], task, structure, subset, temperature=temperature, **start, **options
            )
            scale = (sigma**-2 if task == "regression" else 1.0) / temperature
            lam, full = oracle.curvature_all(model, self.names, x[part], y[part], task)
            self.parts.append((model, x[part], lam, scale))
            sizes = [model.get_parameter(name).numel() for name in self.names]
            sides = {"full": [len(full)], "block": sizes}.get(structure, [1] * len(full))
            self.h.append(scale * full * torch.block_diag(*[torch.ones(k, k) for k in sides]))
            self.data.append((x[part], y[part]))
            self.models.append(model)
            self.prior, prior = prior, self.la.as_prior()
        self.next = prior
        self.structure = structure

    def curvature(self, n: int) -> Tensor:
        """Of the first n tasks."""
        if self.structure == "kron":
            return oracle.kron_over_time(self.parts[:n], self.names)
        return torch.stack(self.h[:n]).sum(0)

    def theta(self, number: int) -> Tensor:
        named = dict(self.models[number].named_parameters())
        return torch.cat([named[k].detach().flatten() for k in self.names])

    def evidence(self, delta: Tensor) -> Tensor:
        """Of the last task given the others."""
        (x, y), sigma = self.data[-1], self.sigmas[-1]
        f = self.models[-1](x).detach()
        loglik = torch.stack([oracle.log_prob(self.task, a, b, sigma) for a, b in zip(f, y, strict=True)]).sum()
        n = len(self.models)
        args = loglik / self.temperature, self.theta(n - 1), self.theta(n - 2), self.curvature(n), self.curvature(n - 1)
        return oracle.evidence_after(*args, delta)

    def expand(self, delta: Tensor) -> Tensor:
        sizes = self.la.posterior.fit.layout.sizes
        return delta.expand(sum(sizes)) if delta.numel() == 1 else torch.repeat_interleave(delta, torch.tensor(sizes))


CASES = [
    ("full", "all"),
    ("diag", "all"),
    ("block", "all"),
    ("kron", "all"),
    ("full", "last_layer"),
    ("kron", "last_layer"),
]


@pytest.mark.parametrize(("structure", "subset"), CASES)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_chain_of_tasks_is_the_oracles(structure, subset, task):
    tasks = Tasks(structure, subset, task, sigmas=(0.5, 2.0, 0.8), temperature=0.6)
    la, p = tasks.la, len(tasks.theta(0))
    precision = tasks.curvature(3) + 0.7 * torch.eye(p, dtype=torch.float64)
    assert_close(la.posterior_covariance, torch.linalg.inv(precision))
    assert_close(la.prior_mean, tasks.theta(1))
    for size in (1, la.n_layers):
        delta = torch.linspace(0.3, 1.4, size, dtype=torch.float64).requires_grad_()
        value, expected = la.log_marginal_likelihood(delta), tasks.evidence(tasks.expand(delta))
        assert_close(value, expected, 1e-9)
        slopes = [torch.autograd.grad(v, delta)[0] for v in (value, expected)]
        assert_close(*slopes)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_prior_is_a_differentiable_density_of_the_network(structure):
    tasks = Tasks(structure, "all", "classification")
    model, prior = copy.deepcopy(tasks.models[0]), tasks.next
    precision = tasks.curvature(3) + 0.7 * torch.eye(tasks.la.n_params, dtype=torch.float64)
    expected = torch.distributions.MultivariateNormal(tasks.theta(2), precision_matrix=precision)
    assert_close(prior.log_prob(model), expected.log_prob(tasks.theta(0)))
    assert_close(prior.log_prob(tasks.theta(0)), prior.log_prob(model))
    prior.log_prob(model, normalized=False).backward()
    slope = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert_close(slope, -precision @ (tasks.theta(0) - tasks.theta(2)))
    with pytest.raises(InputError, match="the prior is over"):
        prior.log_prob(torch.zeros(3))
    with pytest.raises(InputError, match=r"no parameter '0\.weight'"):
        prior.log_prob(nn.Linear(2, 2))


@pytest.mark.parametrize(("structure", "options"), [*((s, {}) for s in STRUCTURES), ("kron", {"damping": True})])
@pytest.mark.parametrize("groups", ["scalar", "layerwise"])
def test_delta_is_tuned_to_an_optimum_of_the_evidence_given_the_earlier_tasks(structure, options, groups):
    la = Tasks(structure, "all", "classification", **options).la
    start = float(la.log_marginal_likelihood())
    la.optimize_prior_precision(prior_structure=groups)
    delta = la.prior_precision.clone().requires_grad_()
    value = la.log_marginal_likelihood(delta)
    (slope,) = torch.autograd.grad(value, delta)
    inside = (delta > 1.1e-8) & (delta < 0.9e8)
    assert float(value.detach()) > start
    assert float((slope * delta.detach() * inside).abs().max()) < 1e-3


@pytest.mark.parametrize("structure", STRUCTURES)
def test_noise_is_tuned_beside_delta(structure):
    la = Tasks(structure, "all", "regression", sigmas=(0.5, 0.7, 3.0)).la
    la.optimize_prior_precision(prior_structure="scalar", tune_sigma_noise=True)
    delta, sigma = la.prior_precision.clone().requires_grad_(), la.sigma_noise.clone().requires_grad_()
    value = la.log_marginal_likelihood(delta, sigma)
    slopes = torch.autograd.grad(value, (delta, sigma))
    assert abs(float(slopes[0] * delta)) < 1e-3
    assert abs(float(slopes[1] * sigma)) < 1e-3


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_chain_of_tasks_survives_a_file_and_a_grid_search(structure, tmp_path):
    tasks = Tasks(structure, "all", "classification")
    la, (x, y) = tasks.la, tasks.data[-1]
    torch.save(la.state_dict(), tmp_path / "la.pt")
    again = Laplace(la.model, "classification", "all", structure)
    again.load_state_dict(torch.load(tmp_path / "la.pt", weights_only=True))
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    assert_close(again.as_prior().log_prob(tasks.theta(0)), la.as_prior().log_prob(tasks.theta(0)))
    assert "30 examples" not in repr(again)
    assert "20 examples of earlier tasks" in repr(again)
    for one in (la, again):
        one.optimize_prior_precision(method="gridsearch", val_loader=[(x, y)], grid_size=5)
    assert torch.equal(la.prior_precision, again.prior_precision)
    assert_close(la(x), la.to("cpu")(x))


@pytest.mark.parametrize("name", ["prior_precision", "temperature"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_grid_search_scores_the_predictions_that_the_posterior_makes(structure, name):
    """The temperature changes what the last task weighs beside the earlier ones, and so all eigenvectors."""
    tasks = Tasks(structure, "all", "classification")
    la, (x, y) = tasks.la, tasks.data[0]
    tuned = la.tune(name, method="validation", val_loader=[(x, y)], grid_size=4)
    assert len(tuned.points) >= 4
    for point in tuned.points:
        la.prior_precision, la.temperature = point.prior_precision, point.temperature
        assert_close(torch.tensor(point.score).double(), -la.predict(x).mean.gather(1, y.unsqueeze(1)).log().mean())


def test_what_does_not_fit_the_earlier_tasks_is_refused():
    model, x, y = make("mlp", "classification")
    prior = fitted(model, x, y).as_prior()
    wider = nn.Sequential(*model[:2], nn.Linear(7, 5)).double()
    with pytest.raises(OptionError, match=r"2.weight \(5, 7\).*another number of outputs needs its own head"):
        Laplace(wider, "classification", "all", prior=prior).fit(cut(x, y, 6))
    with pytest.raises(OptionError, match="the prior of the earlier tasks, which is 'kron'"):
        Laplace(model, "classification", "all", "diag", prior=prior)
    with pytest.raises(OptionError, match="leave prior_precision"):
        Laplace(model, "classification", "all", prior=prior, prior_precision=2.0)
    with pytest.raises(OptionError, match=r"la.as_prior\(\) of an earlier task"):
        Laplace(model, "classification", "all", prior=1.0)
    la = Laplace(model, "classification", "all", prior=prior)
    with pytest.raises(OptionError, match="cannot be set"):
        la.prior_mean = 0.0
    la.prior_precision = 2.0
    assert float(la.prior.precision) == 2


@pytest.mark.parametrize("structure", ["ekfac", "inf", "lowrank", "gp"])
def test_structures_whose_sums_do_not_add_are_refused(structure):
    model, x, y = make("mlp", "classification")
    a = fitted(model, x, y, structure=structure)
    with pytest.raises(UnsupportedError, match="they cannot be added"):
        a + a
    with pytest.raises(UnsupportedError, match="another task cannot be added"):
        a.as_prior()


# ---- forgetting --------------------------------------------------------------------------------------------------


def accuracy_after_permuted_digits(method: str, tasks: int = 3) -> float:
    """Mean accuracy over all tasks after the last: scikit-learn's digits with their pixels in a new order each time."""
    digits, generator = load_digits(), torch.Generator().manual_seed(0)
    order = torch.randperm(len(digits.target), generator=generator)
    x, y = (torch.tensor(digits.data / 16, dtype=torch.float32)[order], torch.tensor(digits.target)[order])
    permutations = [torch.randperm(64, generator=generator) for _ in range(tasks)]
    torch.manual_seed(0)
    model, start = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)), {"prior_prec_init": 1e-3}
    options = {"optimizer_kwargs": {"lr": 1e-2}, "n_epochs": 15, "prior_structure": "scalar", "marglik_frequency": 5}
    for permutation in permutations:
        batches = cut(x[:1200, permutation], y[:1200], 100)
        if method == "map":
            marglik_training(model, batches, hessian_structure="diag", n_epochs_burnin=15, **start, **options)
        else:
            la, *_ = marglik_training(model, batches, hessian_structure=method, **start, **options)
            start = {"prior": la.as_prior()}
    with torch.no_grad():
        found = [model(x[1200:, permutation]).argmax(1) == y[1200:] for permutation in permutations]
    return float(torch.stack(found).float().mean())


def test_kron_forgets_less_than_diag_and_diag_less_than_no_prior():
    found = {method: accuracy_after_permuted_digits(method) for method in ("map", "diag", "kron")}
    assert found["map"] + 0.1 < found["diag"]
    assert found["diag"] + 0.05 < found["kron"]
    assert found["kron"] > 0.85


def test_kron_of_a_table_is_taken_out_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3)).double()
    x, y = torch.randint(5, (12, 2)), torch.randint(3, (12,))
    whole, part = fitted(model, x, y), fitted(model, x[:6], y[:6])
    assert_close((whole - part).posterior_covariance, fitted(model, x[6:], y[6:]).posterior_covariance)


def test_a_sum_notices_that_the_network_has_changed():
    model, x, y = make("mlp", "classification")
    both = fitted(model, x[:9], y[:9]) + fitted(model, x[9:], y[9:])
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.warns(StaleWarning, match="since fit"):
        both(x)


def test_sums_of_another_form_are_refused():
    model, x, y = make("mlp", "classification")
    la = fitted(model, x, y)
    sums = {key: value for key, value in la.posterior.fit.sums.items() if key != "2.weight/A"}
    other = replace(la.posterior.fit, sums=sums)
    with pytest.raises(InputError, match=r"sums of 2\.weight have different shapes.*Fit all data at once"):
        la.posterior.fit.plus(other)


def test_threads_with_one_prior_of_earlier_tasks_get_their_own_curvature():
    tasks = Tasks("full", "all", "regression")
    x, _ = tasks.data[-1]
    sigmas = [0.5, 1.0, 2.0, 4.0]
    others = [copy.copy(tasks.la) for _ in sigmas]
    expected = []
    for la, sigma in zip(others, sigmas, strict=True):
        la.sigma_noise = sigma
        expected.append(la(x)[1])

    def again(index):
        la, found = others[index], []
        for step in range(10):
            la.prior_precision = 1.0 + step % 2  # nothing is kept from the time before
            found.append(la(x)[1])
        la.prior_precision = tasks.la.prior_precision
        return la(x)[1]

    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(again, range(4)), expected, strict=True):
            assert_close(got, want)


def test_shards_can_be_summed_as_numbers_are():
    model, x, y = make("mlp", "classification")
    parts = [fitted(model, x[i::3], y[i::3]) for i in range(3)]
    assert_close(sum(parts).posterior_covariance, (parts[0] + parts[1] + parts[2]).posterior_covariance)
    with pytest.raises(TypeError):
        _ = 1 + parts[0]


def test_data_at_other_weights_cannot_be_added():
    model, x, y = make("mlp", "classification")
    la = fitted(model, x[:9], y[:9])
    before = la.log_marginal_likelihood()
    with torch.no_grad():
        model[0].weight.mul_(3.0)
    with pytest.raises(UnsupportedError, match=r"since fit, and data at other weights cannot be added.*as_prior"):
        la.fit(cut(x[9:], y[9:], 6), override=False)
    assert la.n_data == 9
    assert la.log_marginal_likelihood() == before


def test_a_prior_of_earlier_tasks_says_what_it_is():
    assert repr(Tasks("kron", "all", "classification").la.as_prior()).startswith("CurvedPrior(kron of ")
