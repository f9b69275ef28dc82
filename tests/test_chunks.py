"""Work is cut into pieces so that it fits into memory; what comes out does not depend on the pieces."""

from __future__ import annotations

import pytest
import torch

import oracle
from laplace import Laplace
from networks import CLOSED, cut, head_names, make
from zoo import build

TASKS = ["classification", "regression"]
KINDS = ["ggn", "ef", "mc", "sketch"]
HELD = "laplace.inference.accumulate._HELD"
pytestmark = [
    pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning"),
    pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning"),
]


def seeded():
    return torch.Generator().manual_seed(3)


def fitted(task, structure, curvature="ggn", sizes=(4, 1, 3), **options):
    model, x, y = make("mlp", task)
    la = Laplace(model, task, hessian_structure=structure, curvature=curvature, **options)
    return la.fit(cut(x, y, list(sizes)), generator=seeded()), x, y


@pytest.mark.parametrize("held", [1, 100, 300])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("curvature", KINDS)
@pytest.mark.parametrize("structure", CLOSED)
def test_taking_moments_in_the_middle_of_the_data_loses_none(structure, curvature, task, held, monkeypatch):
    whole, x, _ = fitted(task, structure, curvature)
    monkeypatch.setattr(HELD, held)
    parts, *_ = fitted(task, structure, curvature)
    assert set(parts.posterior.fit.sums) == set(whole.posterior.fit.sums)
    for key, value in whole.posterior.fit.sums.items():
        if key != "vectors":  # of equal eigenvalues, any basis will do
            torch.testing.assert_close(parts.posterior.fit.sums[key], value)
    torch.testing.assert_close(parts.posterior.fit.curvature.matrix(), whole.posterior.fit.curvature.matrix())
    torch.testing.assert_close(parts.log_marginal_likelihood(), whole.log_marginal_likelihood())
    assert parts.n_data == whole.n_data == len(x)


@pytest.mark.parametrize("held", [1, 100, 2**22])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_sums_are_the_oracles_however_much_is_held_back(structure, task, held, monkeypatch):
    monkeypatch.setattr(HELD, held)
    la, x, y = fitted(task, structure)
    dense = oracle.fit(la.model, head_names(la.model), x, y, task, structure)
    torch.testing.assert_close(la.posterior.fit.curvature.matrix(), dense.h)


@pytest.mark.parametrize("task", TASKS)
def test_a_constant_input_stays_one_when_single_examples_are_merged(task, monkeypatch):
    """The bias's input is (1, 1) for any batch; batches of one must not be mistaken for it."""
    for held in (1, 50, 2**22):
        monkeypatch.setattr(HELD, held)
        for sizes in ((1,), (1, 5), (5, 1)):
            la, x, y = fitted(task, "kron", sizes=sizes)
            dense = oracle.fit(la.model, head_names(la.model), x, y, task, "kron")
            torch.testing.assert_close(la.posterior.fit.curvature.matrix(), dense.h)


@pytest.mark.parametrize("chunk", [1, 40, 200])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("structure", CLOSED)
def test_predictions_do_not_depend_on_the_chunks_of_the_last_layer(structure, task, chunk, monkeypatch):
    la, x, y = fitted(task, structure)
    calls = [
        lambda: la(x, diagonal_output=True),
        lambda: la(x),
        lambda: la.predict(x).epistemic,
        lambda: _scores(la, x, y, task),
    ]
    expected = [call() for call in calls]
    monkeypatch.setattr("laplace.backprop.head_moments._CHUNK", chunk)
    monkeypatch.setattr("laplace.backprop.head_jacobian._CHUNK", chunk)
    for call, value in zip(calls, expected, strict=True):
        la.prior_precision = 1.0
        torch.testing.assert_close(call(), value)


def _scores(la, x, y, task):
    """The predictions that a search over a grid looks at, all in one tensor."""
    seen = []

    def loss(*prediction):
        seen.append(torch.cat([part.flatten() for part in prediction[:-1]]))
        return seen[-1].square().sum()

    la.optimize_prior_precision(method="gridsearch", val_loader=[(x, y)], loss=loss, grid_size=4)
    return torch.stack(seen)


@pytest.mark.parametrize("chunk", [1, 60, 1000])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_draws_of_the_outputs_do_not_depend_on_their_chunks(subset, chunk, monkeypatch):
    model, x, y, _ = build("mlp", "classification")
    la = Laplace(model, "classification", subset, "kron", prior_precision=0.3).fit(cut(x, y, 5))
    calls = [
        lambda: la(x, link_approx="mc", n_samples=20, generator=seeded()),
        lambda: la(x, link_approx="mc", n_samples=20, generator=seeded(), diagonal_output=True),
        lambda: la.functional_samples(x, n_samples=20, diagonal_output=True, generator=seeded()),
        lambda: la.predict(x, n_samples=20, generator=seeded()).epistemic,
        lambda: la.predict(x).quantile(0.3),
    ]
    expected = [call() for call in calls]
    monkeypatch.setattr("laplace.predictive.outputs._CHUNK", chunk)
    for call, value in zip(calls, expected, strict=True):
        torch.testing.assert_close(call(), value)


@pytest.mark.parametrize("draws_at_a_time", [1, 2, 3, 7])
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_draws_of_the_weights_do_not_depend_on_their_chunks(subset, pred_type, draws_at_a_time, monkeypatch):
    model, x, y, _ = build("mlp", "regression")
    la = Laplace(model, "regression", subset, "kron").fit(cut(x, y, 5))

    def draws():
        return la.functional_samples(x, pred_type, 10, generator=seeded())

    expected = draws()
    assert expected.shape == (10, len(x), 2)
    monkeypatch.setattr("laplace.inference.linearised._CHUNK", draws_at_a_time * la.n_params)
    torch.testing.assert_close(draws(), expected)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_draws_of_the_weights_in_chunks_have_the_posteriors_moments(subset, pred_type, monkeypatch):
    """Whatever numbers are drawn: every chunk is kept, none is drawn twice."""
    model, x, y, _ = build("mlp", "regression")
    la = Laplace(model, "regression", subset, "diag", prior_precision=50.0).fit(cut(x, y, 5))
    monkeypatch.setattr("laplace.inference.linearised._CHUNK", 300 * la.n_params)
    draws = la.functional_samples(x, pred_type, 2000, generator=seeded())
    assert len(draws) == 2000
    assert len(draws[:, 0, 0].unique()) == 2000
    mean, variance = la(x, diagonal_output=True)
    assert float(((draws.mean(0) - mean) / (variance / 2000).sqrt()).abs().max()) < (5 if pred_type == "glm" else 30)
    if pred_type == "glm":
        torch.testing.assert_close(draws.var(0), variance, rtol=0.2, atol=0)


@pytest.mark.parametrize("budget", [1, 10_000, 2**29])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("structure", CLOSED)
def test_chunks_by_memory_change_no_number(structure, task, budget, monkeypatch):
    model, x, y, _ = build("residual", task)
    one = Laplace(model, task, "all", structure).fit(cut(x, y, 11))
    monkeypatch.setattr("laplace.budget.CHUNK", budget)
    other = Laplace(model, task, "all", structure).fit(cut(x, y, 11))
    torch.testing.assert_close(other.posterior_covariance, one.posterior_covariance)
    for la in (one, other):
        la.prior_precision = 0.7
    a, b = (la(x, diagonal_output=True) for la in (one, other))
    torch.testing.assert_close(b, a)
    torch.testing.assert_close(other.predict(x).epistemic, one.predict(x).epistemic)
    if task == "regression":
        torch.testing.assert_close(other(x, joint=True), one(x, joint=True))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("structure", CLOSED)
def test_draws_are_the_generators_alone_whichever_way_the_sums_were_made(structure, task, monkeypatch):
    """The way is chosen by the clock; rounding must not choose the basis that equal eigenvalues are drawn in."""
    model, x, y, _ = build("residual", task)
    draws = []
    for budget in (2**29, 1):
        monkeypatch.setattr("laplace.budget.CHUNK", budget)
        la = Laplace(model, task, "all", structure).fit(cut(x, y, 11))
        draws.append((la.sample(6, generator=seeded()), la.functional_samples(x, n_samples=6, generator=seeded())))
    for one, other in zip(*draws, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("size", [1, 50, 2000])
@pytest.mark.parametrize(
    "constant",
    ["laplace.linalg.gram_sums._HELD", "laplace.backprop.layers.conv._CHUNK", "laplace.backprop.activations._PRODUCTS"],
)
@pytest.mark.parametrize("network", ["conv", "residual"])
@pytest.mark.parametrize("structure", CLOSED)
def test_sums_and_predictions_do_not_depend_on_the_pieces_of_the_products(
    structure, network, constant, size, monkeypatch
):
    model, x, y, _ = build(network, "classification")

    def numbers():
        la = Laplace(model, "classification", "all", structure).fit(cut(x, y, [4, 1, 3]))
        return la.posterior.fit.curvature.matrix(), la(x), la.predict(x).outputs.covariance

    expected = numbers()
    monkeypatch.setattr(constant, size)
    for got, want in zip(numbers(), expected, strict=True):
        torch.testing.assert_close(got, want)
