"""`la.calibrate`: the lowest validation score over prior precision and scale, never worse than the network."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits, load_iris
from torch import nn

import oracle
from laplace import Laplace
from laplace.tuning.held_out import Scored
from laplace.tuning.line import Line
from laplace.tuning.profile import Candidate, paired, widest_of
from networks import cut, head_names, split_task

pytestmark = pytest.mark.filterwarnings("ignore:.*validation examples are few:laplace.errors.LaplaceWarning")
STRUCTURES = ["full", "kron", "diag", "block", "ekfac", "inf", "lowrank", "gp"]
QUIET = pytest.mark.filterwarnings("ignore::laplace.errors.LaplaceWarning")


def trained(data, hidden: int = 12, steps: int = 150, dtype=torch.float64, seed: int = 0):
    """A network trained on the first half, the training data, and the other half."""
    torch.manual_seed(seed)
    x = torch.tensor(data.data, dtype=dtype)
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    y = torch.tensor(data.target)
    classes = y.dtype == torch.int64
    y = y if classes else ((y - y.mean()) / y.std()).to(dtype).unsqueeze(1)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    model = nn.Sequential(nn.Linear(x.shape[1], hidden), nn.Tanh(), nn.Linear(hidden, 10 if classes else 1)).to(dtype)
    if classes:
        model[2] = nn.Linear(hidden, int(y.max()) + 1).to(dtype)
    half = len(x) // 2
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    loss = nn.functional.cross_entropy if classes else nn.functional.mse_loss
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x[:half]), y[:half]).backward()
        optimizer.step()
    return model, cut(x[:half], y[:half], 64), cut(x[half:], y[half:], [13, 40])


def problem(task: str, **options):
    if task == "regression":
        model, training, validation = trained(load_diabetes())
    else:
        model, training, validation = trained(load_iris(), steps=300, seed=1)
    return Laplace(model, task, **{"sigma_noise": 0.5} if task == "regression" else {}, **options).fit(
        training
    ), validation


def nll(la, batches, **how) -> float:
    losses = [-la.predict(x, **how).distribution.log_prob(y).reshape(len(x), -1).sum(1) for x, y in batches]
    return float(torch.cat(losses).mean())


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("hyperprior", [False, True])
@QUIET
def test_the_best_is_no_worse_than_a_brute_force_grid(task, structure, hyperprior):
    model, training, validation = split_task(task)
    la = Laplace(model, task, hessian_structure=structure, prior_precision=0.7).fit(training)
    x, y = (torch.cat(part) for part in zip(*training, strict=True))
    v, w = (torch.cat(part) for part in zip(*validation, strict=True))
    dense = oracle.fit(model, head_names(model), x, y, task, structure)
    jac, f = oracle.jacobian(model, head_names(model), v), model(v).detach()
    deltas = [0.7 * 10 ** (k / 2) for k in range(-8, 9)]
    fine = 0.7 * torch.logspace(-4, 4, 801, dtype=torch.float64)
    evidences = torch.stack([dense.evidence(dense.expand(float(d))) for d in fine])
    centre = float(fine[evidences.argmax()])
    residual = float((model(x).detach() - y).square().mean().sqrt()) if task == "regression" else 0.0

    def penalty(delta: float | None, scale: float) -> float:
        away = 3.0 if delta is None else min(3.0, abs(math.log10(delta / centre)))
        if task == "classification":
            held_back = math.log1p((math.log(scale) / 0.3) ** 2)
        else:
            held_back = 0.0 if delta is None else max(0.0, math.log(residual / scale) / 0.1) ** 2 / 2
        return hyperprior * (away**2 / 2 + held_back) / len(v)

    def total(delta: float | None, scale: float) -> float:  # delta: at unit noise
        here = delta if delta is None or task == "classification" else delta / scale**2
        prior = None if here is None else dense.expand(here)
        return float(oracle.rescaled_losses(dense, jac, f, w, prior, scale).mean()) + penalty(here, scale)

    result = la.calibrate(validation, rule="best", hyperprior=hyperprior, link_approx="probit")
    rows = {round(math.log10(_at_unit_noise(row) / 0.7) * 2): row for row in result.profile} | {None: result.rescaled}
    for key, delta in [*enumerate(deltas, -8), (None, None)]:
        grid = [total(delta, scale) for scale in torch.logspace(-1, 1, 41, dtype=torch.float64).tolist()]
        if key not in rows:  # hopeless at every scale
            assert min(grid) > result.rescaled.nll + 0.05
            continue
        row = rows[key]
        scale = row.softmax_temperature if task == "classification" else float(row.sigma_noise)
        precision = None if row.prior_precision is None else float(row.prior_precision)
        found = row.nll + penalty(precision, scale)
        if min(grid) < min(result.network.nll, result.rescaled.nll) + 0.05:  # others are not searched to the end
            assert found <= min(grid) + (1e-3 if hyperprior else 3e-5)  # the evidence's optimum is a parabola's
    allowed = [row for row in [*rows.values(), result.network] if row.nll <= result.rescaled.nll]
    if hyperprior:
        assert result.best.nll in [row.nll for row in allowed]
    else:
        assert result.best.nll == min(row.nll for row in allowed)


@QUIET
def test_more_examples_than_the_search_begins_with_change_nothing():
    """The scales of 899 examples are first looked for on 200 of them: the result is that of all."""
    model, training, validation = trained(load_digits(), steps=60)
    la = Laplace(model, "classification").fit(training)
    result = la.calibrate(validation, rule="best", hyperprior=False)
    x, y = (torch.cat(part) for part in zip(*validation, strict=True))
    best = min(range(len(result.profile)), key=lambda i: result.profile[i].nll)
    for row in (result.profile[best], result.profile[max(0, best - 1)], result.profile[-1]):
        la.prior_precision, found = row.prior_precision, []
        for step in torch.linspace(-0.3, 0.3, 7).tolist():
            la.softmax_temperature = row.softmax_temperature * math.exp(step)
            p = la(x, link_approx="one_vs_rest")
            found.append(-float(p[torch.arange(len(y)), y].log().mean()))
        assert row.nll <= min(found) + 1e-5


def _candidate(factor: float, losses: list[float], total: float) -> Candidate:
    return Candidate((factor, 1.0), Scored(torch.tensor(losses, dtype=torch.float64)), total, 0.0)


def _difference(one: Candidate, other: Candidate) -> tuple[float, float]:
    mean, variance = paired(one.scored.losses - other.scored.losses, None)
    return mean, math.sqrt(variance)


@pytest.mark.parametrize(
    ("mean", "spread", "taken"),
    [
        (-0.004, 0.004, False),  # a gain of one standard error: it may be luck
        (-0.020, 0.008, True),  # a certain one
        (0.0005, 0.001, True),  # it costs little for sure
        (0.0005, 0.004, False),  # it may cost more
    ],
)
def test_a_wide_posterior_is_taken_only_if_it_surely_costs_little(mean, spread, taken):
    """The standard error of 100 differences mean ± 10 spread is spread."""
    noise = 10 * spread * torch.tensor([1.0, -1.0] * 50, dtype=torch.float64) * math.sqrt(0.99)
    network = _candidate(math.inf, [0.3] * 100, 0.3)
    wide = _candidate(1.0, (0.3 + mean + noise).tolist(), 0.3 + mean)
    best = min(network, wide, key=lambda each: each.total)
    narrow = _candidate(1e3, [0.3] * 100, 0.3)
    assert _difference(wide, network)[1] == pytest.approx(spread)
    chosen = widest_of([wide, narrow, network], best, [network], _difference)
    assert (chosen is wide) == taken or best is wide
    if best is not wide and not taken:
        assert chosen is narrow


def test_a_gain_that_may_be_luck_gives_way_to_a_narrower_posterior():
    noise = 0.05 * torch.tensor([1.0, -1.0] * 50, dtype=torch.float64)
    network = _candidate(math.inf, [0.3] * 100, 0.3)
    wide = _candidate(1.0, (0.2965 + noise).tolist(), 0.2965)
    narrow = _candidate(100.0, (0.298 + 0.01 * noise).tolist(), 0.298)
    assert widest_of([wide, narrow, network], wide, [network], _difference) is narrow


def _at_unit_noise(row) -> float:
    return float(row.prior_precision) * (1.0 if row.sigma_noise is None else float(row.sigma_noise) ** 2)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("hyperprior", [False, True])
@pytest.mark.parametrize("seed", range(4))
@QUIET
def test_the_promise(task, hyperprior, seed):
    model, training, validation = split_task(task, seed)
    la = Laplace(model, task).fit(training)
    best = la.calibrate(validation, rule="best", hyperprior=hyperprior)
    assert best.chosen.nll <= best.network.nll
    assert best.chosen.nll <= best.rescaled.nll
    assert best.rescaled.nll <= best.network.nll
    assert nll(la, validation) <= min(best.network.nll, best.rescaled.nll) + 1e-7
    la = Laplace(model, task).fit(training)
    wide = la.calibrate(validation, hyperprior=hyperprior)
    reference = wide.rescaled if wide.rescaled.nll <= wide.network.nll else wide.network
    gain = wide.chosen.gain_on_rescaled if reference is wide.rescaled else wide.chosen.gain
    assert -gain.mean <= max(gain.error, 0.001)
    assert wide.chosen.nll <= reference.nll + 0.005


@QUIET
def test_without_a_hyperprior_the_rescaled_network_is_the_best_of_all_temperatures():
    la, validation = problem("classification")
    result = la.calibrate(validation, hyperprior=False)
    f, y = (torch.cat(part) for part in zip(*[(la.model(x).detach(), y) for x, y in validation], strict=True))
    grid = torch.logspace(-1.3, 1.3, 2001, dtype=torch.float64)
    losses = torch.stack([nn.functional.cross_entropy(f / t, y) for t in grid])
    assert result.rescaled.nll <= float(losses.min()) + 1e-12
    assert abs(math.log(result.rescaled.softmax_temperature) - float(grid[losses.argmin()].log())) < 3e-3


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("structure", STRUCTURES)
@QUIET
def test_the_reported_scores_are_those_of_predict(task, subset, structure):
    la, validation = problem(task, subset_of_weights=subset, hessian_structure=structure)
    before = nll(la, validation)
    result = la.calibrate(validation)
    assert result.before.nll == pytest.approx(before, abs=1e-8)
    assert result.chosen.nll == pytest.approx(nll(la, validation), abs=1e-8)
    for row in (result.best, result.profile[0], result.profile[-1]):
        if row.prior_precision is None:
            continue
        la.prior_precision = row.prior_precision
        if task == "regression":
            la.sigma_noise = row.sigma_noise
        else:
            la.softmax_temperature = row.softmax_temperature
        assert row.nll == pytest.approx(nll(la, validation), abs=1e-8)


@QUIET
def test_ratios_between_prior_precisions_stay():
    la, validation = problem("classification", hessian_structure="full")
    la.prior_precision = torch.tensor([0.1, 3.0], dtype=torch.float64)
    result = la.calibrate(validation)
    assert float(la.prior_precision[1] / la.prior_precision[0]) == pytest.approx(30)
    assert result.chosen.nll == pytest.approx(nll(la, validation), abs=1e-8)


@QUIET
def test_batches_and_memory_do_not_matter():
    found = []
    for sizes, budget in (([5, 31], None), (75, None), ([9], 200_000)):
        la, validation = problem("classification", subset_of_weights="all", memory_budget=budget)
        x, y = (torch.cat(part) for part in zip(*validation, strict=True))
        result = la.calibrate(cut(x, y, sizes))
        found.append((float(la.prior_precision), la.softmax_temperature, result.chosen.nll, result.chosen.gain.error))
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@QUIET
def test_the_network_runs_once_over_the_data(subset):
    la, validation = problem("classification", subset_of_weights=subset)
    la.predict(validation[0][0])
    counted = Counted(validation)
    la.calibrate(counted)
    assert counted.readings == 1


class Counted:
    """A loader that counts how often it is read."""

    def __init__(self, batches) -> None:
        self.batches, self.readings = batches, 0

    def __iter__(self):
        self.readings += 1
        yield from self.batches


@QUIET
def test_shuffled_batches_are_paired():
    la, validation = problem("classification", subset_of_weights="all", memory_budget=200_000)
    x, y = (torch.cat(part) for part in zip(*validation, strict=True))
    data = torch.utils.data.TensorDataset(x, y)
    errors = []
    for shuffle in (False, True):
        la.prior_precision, la.softmax_temperature = 1.0, 1.0
        loader = torch.utils.data.DataLoader(data, batch_size=11, shuffle=shuffle)
        errors.append(la.calibrate(loader, rule="best").best.gain_on_rescaled.error)
    assert errors[1] == pytest.approx(errors[0], rel=1e-6)


@QUIET
def test_examples_of_weight_zero_do_not_count():
    la, validation = problem("classification")
    x, y = (torch.cat(part) for part in zip(*validation, strict=True))
    first = la.calibrate([(x[:50], y[:50])])
    la.prior_precision, la.softmax_temperature = 1.0, 1.0
    weights = (torch.arange(len(x)) < 50).double()
    second = la.calibrate([(x, y, weights)])
    assert second.chosen.nll == pytest.approx(first.chosen.nll)
    assert second.chosen.gain.error == pytest.approx(first.chosen.gain.error)
    assert second.n_data == first.n_data == 50


@QUIET
def test_few_examples_are_held_back_and_many_are_not():
    model, _, validation = trained(load_digits(), hidden=20, dtype=torch.float32)
    x, y = (torch.cat(part) for part in zip(*validation, strict=True))
    la = Laplace(model, "classification").fit([(x, y)])  # any posterior: only temperatures are compared
    held, free = (
        [la.calibrate([(x[:n], y[:n])], hyperprior=given).rescaled.softmax_temperature for n in (40, 800)]
        for given in (True, False)
    )
    assert abs(math.log(held[0])) < 0.8 * abs(math.log(free[0]))
    assert held[1] == pytest.approx(free[1], rel=0.03)


@QUIET
def test_outside_inputs_are_scored_by_their_entropy():
    la, validation = problem("classification")
    outside = 4 * torch.randn(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = la.calibrate(validation, rule="best", ood_loader=[outside], ood_weight=1.0, hyperprior=False)
    entropy = float(la.predict(outside).distribution.entropy().mean())
    assert result.chosen.score == pytest.approx(nll(la, validation) - entropy, abs=1e-7)
    assert result.chosen.score <= min(result.network.score, result.rescaled.score)


@QUIET
def test_files_keep_what_was_calibrated(tmp_path):
    for task in ("classification", "regression"):
        la, validation = problem(task)
        la.calibrate(validation)
        la.save(tmp_path / task)
        loaded = Laplace.load(tmp_path / task, la.model)
        assert nll(loaded, validation) == pytest.approx(nll(la, validation))
        assert loaded.softmax_temperature == la.softmax_temperature


@QUIET
def test_it_prints_as_a_table():
    la, validation = problem("classification")
    text = repr(la.calibrate(validation))
    header = next(line for line in text.splitlines() if "NLL" in line)
    assert header.split() == ["NLL", "gain", "on", "network", "gain", "on", "rescaled", "ECE", "accuracy", "prior", "T"]
    assert [line.split()[0] for line in text.splitlines()[4:9]] == ["network", "rescaled", "before", "best", "chosen"]
    assert max(map(len, text.splitlines())) <= 100
    la, validation = problem("regression")
    text = repr(la.calibrate(validation))
    assert "in 90 %  " in text
    assert "noise" in text


@pytest.mark.parametrize("at", [-2.2, 0.0, 0.37, 2.9])
@pytest.mark.parametrize("shape", [lambda d: d**2, lambda d: math.cosh(3 * d), lambda d: d**4, abs])
def test_a_line_finds_the_minimum(at, shape):
    line = Line([k / 2 for k in range(-6, 7)], -3.0, 3.0)
    while points := line.ask():
        line.take(points, [shape(x - at) for x in points])
    assert abs(line.best - at) <= 1e-3
    assert line.rounds <= 12


def test_a_line_goes_beyond_its_grid_and_stops_at_its_ends():
    for at, expected in ((7.0, 7.0), (300.0, 20.0)):
        line = Line([-1.0, 0.0, 1.0], -20.0, 20.0)
        while points := line.ask():
            line.take(points, [(x - at) ** 2 for x in points])
        assert abs(line.best - expected) <= 1e-3
        assert line.at_edge == (at > 20)
