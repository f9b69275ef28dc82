"""The exact posterior over all weights without its matrix: equal to the dense one where that can be had."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

import oracle
from laplace import Laplace
from laplace.distributed import Reduce
from laplace.errors import InputError, LaplaceWarning, OptionError, UnsupportedError
from laplace.inference.fit import fit as sums_of
from laplace.structures import MatrixFree
from networks import cut, make
from zoo import build

EXACT = {"residual": 1e-10, "probes": 1000}  # a probe for every weight
RAGGED = [7, 1, 11]
N_DRAWS = 2000
NETWORKS = ["mlp", "conv"]


def fit(network: str, task: str, structure: MatrixFree | str, sizes=RAGGED, **options) -> tuple[Laplace, Tensor]:
    """A posterior over all weights of a small network, and new inputs."""
    model, x, y, *_ = make(network, task)
    la = Laplace(model, task, "all", structure, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)  # of tensors in a fallback form
        la.fit(cut(x, y, sizes), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(9)
    return la, torch.randn(3, x.shape[1], dtype=torch.float64)


@functools.cache
def dense(network: str, task: str) -> tuple[oracle.Dense, nn.Module, list[str]]:
    """The dense posterior of the same network and data, from its Jacobian by autograd."""
    model, x, y, *_ = make(network, task)
    names = [name for name, _ in model.named_parameters()]
    return oracle.fit(model, names, x, y, task, "full"), model, names


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-7) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def deltas_of(prior: str, count: int) -> Tensor:
    return torch.linspace(0.3, 2.0, count, dtype=torch.float64) if prior == "layerwise" else torch.tensor(0.4).double()


# ---- equal to the dense posterior ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("network", NETWORKS)
def test_outputs_and_evidence_are_those_of_the_dense_posterior(network, task, prior):
    reference, model, names = dense(network, task)
    noise = {"sigma_noise": 0.7} if task == "regression" else {}
    la, new = fit(network, task, MatrixFree(**EXACT), prior_precision=deltas_of(prior, len(names)), **noise)
    delta = reference.expand(deltas_of(prior, len(names)))
    sigma = reference.covariance(delta, **({"sigma": 0.7} if noise else {}))
    jac = oracle.jacobian(model, names, new)
    covariance, rows = jac @ sigma @ jac.mT, jac.flatten(0, 1)
    gaussian = la.posterior.gaussian
    (run,) = la.runner.runs(la.posterior.fit, _inputs(new), whole=True)
    engine = run.jacobian()
    close(gaussian.variance(engine), covariance.diagonal(dim1=1, dim2=2))
    close(gaussian.covariance(engine), covariance)
    close(gaussian.joint(engine).flatten(2).flatten(0, 1), rows @ sigma @ rows.T)
    assert la.solves.residual <= 1e-10
    expected = reference.evidence(delta, sigma=0.7 if noise else 1.0)
    assert float(la.log_marginal_likelihood()) == pytest.approx(float(expected), abs=1e-6)
    assert la.solves.evidence_error == 0.0


@pytest.mark.parametrize("preconditioner", ["lowrank", "kron", "ekfac", "diag", "none"])
def test_every_preconditioner_leads_to_the_same_posterior(preconditioner):
    reference, model, names = dense("conv", "classification")
    rank = {"rank": 7} if preconditioner == "lowrank" else {}
    la, new = fit("conv", "classification", MatrixFree(**EXACT, preconditioner=preconditioner, **rank))
    jac = oracle.jacobian(model, names, new)
    sigma = reference.covariance(reference.expand(1.0))
    close(la.functional_variance(jac), jac @ sigma @ jac.mT)
    assert float(la.log_marginal_likelihood()) == pytest.approx(
        float(reference.evidence(reference.expand(1.0))), abs=1e-6
    )


@pytest.mark.parametrize("preconditioner", ["lowrank", "kron"])
def test_the_estimated_evidence_lies_within_its_standard_error(preconditioner):
    reference, _, _ = dense("mlp", "classification")
    expected = float(reference.evidence(reference.expand(0.4)))
    rank = {"rank": 5} if preconditioner == "lowrank" else {}
    scores = []
    for seed in range(8):
        structure = MatrixFree(probes=8, seed=seed, preconditioner=preconditioner, **rank)
        la, _ = fit("mlp", "classification", structure, prior_precision=0.4)
        error = float(la.log_marginal_likelihood()) - expected
        assert la.solves.evidence_error > 0
        scores.append(error / la.solves.evidence_error)
    assert max(map(abs, scores)) < 6  # t with 7 degrees of freedom
    assert 0.2 < float(torch.tensor(scores).square().mean()) < 4


def test_the_preconditioner_saves_products_and_variance():
    plain, new = fit("conv", "classification", MatrixFree(preconditioner="none"), prior_precision=0.01)
    better, _ = fit("conv", "classification", MatrixFree(rank=40), prior_precision=0.01)
    for la in (plain, better):
        la(new)
    assert better.solves.products < 0.7 * plain.solves.products
    for la in (plain, better):
        la.log_marginal_likelihood()
    assert better.solves.evidence_error < 0.5 * plain.solves.evidence_error


def test_draws_have_the_covariance_of_the_dense_posterior():
    reference, _, names = dense("mlp", "regression")
    delta = deltas_of("layerwise", len(names))
    la, _ = fit("mlp", "regression", MatrixFree(residual=1e-6), prior_precision=delta, sigma_noise=0.7)
    draws = la.sample(N_DRAWS, generator=torch.Generator().manual_seed(1)) - la.mean
    sigma = reference.covariance(reference.expand(delta), sigma=0.7)
    inside = torch.linalg.solve_triangular(torch.linalg.cholesky(sigma), draws.T, upper=False)  # standard normal
    p = len(sigma)
    assert float(inside.mean(1).abs().max()) < 6 / N_DRAWS**0.5
    covariance = inside @ inside.T / N_DRAWS
    assert float((covariance - torch.eye(p, dtype=torch.float64)).abs().max()) < 6 * (2 / N_DRAWS) ** 0.5


def test_draws_depend_on_the_generator_alone():
    draws = []
    for sizes in (RAGGED, 5, 23):
        la, new = fit("conv", "classification", MatrixFree(residual=1e-10), sizes)
        draws.append(la.sample(3, generator=torch.Generator().manual_seed(4)))
        one, two = (
            la.functional_samples(new, n_samples=2, generator=torch.Generator().manual_seed(8)) for _ in range(2)
        )
        assert torch.allclose(one, two, atol=1e-7)
    close(draws[1], draws[0], 1e-6)
    close(draws[2], draws[0], 1e-6)


def test_predictions_are_those_of_full():
    for task in ("classification", "regression"):
        exact, new = fit("mlp", task, "full")
        la, _ = fit("mlp", task, MatrixFree(residual=1e-10))
        for found, expected in zip(_tensors(la(new)), _tensors(exact(new)), strict=True):
            close(found, expected, 1e-8)
        pairs = [(p.mean, p.epistemic) for p in (la.predict(new), exact.predict(new))]
        for found, expected in zip(*pairs, strict=True):
            close(found, expected, 1e-6)


def test_the_last_layer_alone_is_that_of_full():
    model, x, y = make("mlp", "classification")
    pair = [
        Laplace(model, "classification", "last_layer", s).fit(cut(x, y, RAGGED)) for s in ("full", MatrixFree(**EXACT))
    ]
    close(pair[1](x[:4]), pair[0](x[:4]))
    assert float(pair[1].log_marginal_likelihood()) == pytest.approx(float(pair[0].log_marginal_likelihood()), abs=1e-7)


# ---- hyperparameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_gradients_of_the_evidence_are_those_of_full(prior):
    found = []
    for structure in ("full", MatrixFree(**EXACT)):
        la, _ = fit("mlp", "regression", structure)
        delta = deltas_of(prior, la.n_layers).requires_grad_()
        noise = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
        la.log_marginal_likelihood(delta, noise).backward()
        found.append((delta.grad, noise.grad))
    for exact, own in zip(*found, strict=True):
        close(own, exact, 1e-6)


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
@pytest.mark.filterwarnings("ignore::laplace.errors.LaplaceWarning")
def test_tuning_by_the_evidence_ends_where_full_does(prior):
    found = []
    for structure in ("full", MatrixFree(**EXACT)):
        la, _ = fit("mlp", "regression", structure)
        la.tune(method="evidence", prior_structure=prior)
        found.append(torch.cat([la.prior_precision.reshape(-1), la.sigma_noise.reshape(-1)]))
    assert torch.allclose(found[0].log(), found[1].log(), atol=1e-3)


@pytest.mark.filterwarnings("ignore::laplace.errors.LaplaceWarning")
def test_tuning_with_few_probes_gains_nearly_all_of_the_evidence():
    exact, _ = fit("mlp", "classification", "full", prior_precision=30.0)
    before = float(exact.log_marginal_likelihood())
    exact.tune(method="evidence", prior_structure="layerwise")
    best = float(exact.log_marginal_likelihood())
    la, _ = fit("mlp", "classification", MatrixFree(probes=8, rank=10), prior_precision=30.0)
    la.tune(method="evidence", prior_structure="layerwise")
    exact.prior_precision = la.prior_precision
    assert float(exact.log_marginal_likelihood()) > best - 0.05 * (best - before)


def test_estimated_traces_are_near_those_of_full():
    exact, _ = fit("mlp", "classification", "full", prior_precision=0.4)
    la, _ = fit("mlp", "classification", MatrixFree(probes=30, rank=10), prior_precision=0.4)
    for groups in ("scalar", "layerwise"):
        expected, _ = exact.posterior.gaussian.traces(groups)
        assert torch.allclose(la.posterior.gaussian.traces(groups)[0], expected, rtol=0.05)


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["conv", "residual", "tied", "recurrent", "functional"])
def test_forward_mode_and_the_engine_multiply_alike(network):
    from laplace.backprop.forward_mode import by_moments, by_tangents, may_use_tangents

    model, x, y, names = build(network, "classification")
    la = Laplace(model, "classification", names, MatrixFree()).fit([(x, y)])
    weights = la.runner.weights
    forward = la.runner.engine(weights, la.runner.plan).forward(_inputs(x))
    curvature = la.likelihood.fisher(forward.outputs, y)
    vectors = torch.randn(3, la.n_params, dtype=torch.float64)
    assert may_use_tangents(forward, curvature)
    close(by_tangents(forward, curvature, vectors), by_moments(forward, curvature, vectors), 1e-9)


class _NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class _Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _NoForwardMode.apply(x)


def test_an_operation_without_a_forward_derivative_is_multiplied_by_the_engine():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), _Sine(), nn.Linear(4, 2)).double()
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randint(2, (12,))
    exact, la = (
        Laplace(model, "classification", "all", s).fit(cut(x, y, 5)) for s in ("full", MatrixFree(residual=1e-9))
    )
    close(la(x[:3]), exact(x[:3]))
    assert la.posterior.fit.training._tangents is False


def test_weighted_examples_count_as_often_as_their_weights_say():
    model, x, y = make("mlp", "classification")
    w = torch.rand(len(x), dtype=torch.float64)
    batches = [(x[:9], y[:9], w[:9]), (x[9:], y[9:], w[9:])]
    exact, la = (Laplace(model, "classification", "all", s).fit(batches) for s in ("full", MatrixFree(residual=1e-9)))
    close(la(x[:3]), exact(x[:3]))


@pytest.mark.parametrize("curvature", ["ef", "sketch", "mc"])
def test_other_curvatures_are_what_the_structures_seed_draws(curvature):
    first, new = fit("mlp", "classification", MatrixFree(residual=1e-9), curvature=curvature)
    again, _ = fit("mlp", "classification", MatrixFree(residual=1e-9), [4], curvature=curvature)
    close(first(new), again(new), 1e-8)
    if curvature == "ef":
        close(first(new), fit("mlp", "classification", "full", curvature="ef")[0](new), 1e-8)


# ---- like any structure ---------------------------------------------------------------------------------------------


class Counted:
    """A loader that counts how often it is read."""

    def __init__(self, batches) -> None:
        self.batches, self.reads = batches, 0

    def __iter__(self):
        self.reads += 1
        return iter(self.batches)


def test_printing_reads_no_data_and_shows_the_evidence_once_it_is_known():
    model, x, y = make("mlp", "classification")
    loader = Counted(cut(x, y, RAGGED))
    la = Laplace(model, "classification", "all", "matrix_free").fit(loader)
    reads = loader.reads
    assert "evidence not computed yet" in repr(la)
    assert "no matrix; rank" in str(la.coverage())
    assert loader.reads == reads
    la.log_marginal_likelihood()
    assert loader.reads > reads
    assert "log evidence" in repr(la)


def test_a_file_holds_no_data_and_asks_for_it(tmp_path):
    model, x, y = make("mlp", "classification")
    batches = cut(x, y, RAGGED)
    la = Laplace(model, "classification", "all", MatrixFree(residual=1e-9, rank=11)).fit(batches)
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    assert loaded.structure == la.structure
    assert "evidence not computed yet" in repr(loaded)
    with pytest.raises(UnsupportedError, match=r"la\.attach_data\(train_loader\)"):
        loaded(x[:2])
    loaded.attach_data(batches)
    close(loaded(x[:2]), la(x[:2]), 1e-8)
    close(Laplace.load(tmp_path / "posterior.safetensors", model, data=batches)(x[:2]), la(x[:2]), 1e-8)
    assert len(x) not in {len(value) for value in la.state_dict().values() if isinstance(value, Tensor) and value.dim()}


def test_pickles_and_copies_hold_no_data():
    la, new = fit("mlp", "classification", MatrixFree(residual=1e-9))
    expected = la(new)
    buffer = io.BytesIO()
    pickle.dump(la, buffer)
    buffer.seek(0)
    for other in (pickle.load(buffer), copy.copy(la), copy.deepcopy(la)):  # noqa: S301 - its own bytes
        with pytest.raises(UnsupportedError, match="does not have it"):
            other(new)
        _, x, y = make("mlp", "classification")
        other.attach_data(x, y)
        close(other(new), expected, 1e-8)


def test_a_residual_that_is_not_reached_is_warned_of():
    la, new = fit("conv", "classification", MatrixFree(most_iterations=3, preconditioner="none"), prior_precision=1e-4)
    with pytest.warns(LaplaceWarning, match="conjugate gradients stopped at a residual of"):
        la(new)
    assert la.solves.residual > la.solves.wanted


def test_gradients_flow_to_the_inputs():
    found = []
    for structure in ("full", MatrixFree(residual=1e-11)):
        la, new = fit("mlp", "regression", structure, enable_backprop=True)
        new = new.requires_grad_()
        la(new)[1].sum().backward()
        found.append(new.grad)
    close(found[1], found[0], 1e-6)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_an_iterator_is_refused():
    model, x, y = make("mlp", "classification")
    with pytest.raises(InputError, match="can be read once"):
        Laplace(model, "classification", "all", "matrix_free").fit(iter(cut(x, y, 5)))
    la = Laplace(model, "classification", "all", "matrix_free").fit(cut(x, y, 5))
    with pytest.raises(InputError, match="can be read once"):
        la.attach_data(iter(cut(x, y, 5)))


def test_many_processes_are_refused():
    class Two(Reduce):
        size = 2

    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification", "all", "matrix_free")
    with pytest.raises(UnsupportedError, match="in one process"):
        sums_of(la.runner, cut(x, y, 5), la.prior, reduce=Two())


def test_the_users_random_numbers_are_left_alone():
    la, new = fit("mlp", "classification", MatrixFree(), curvature="sketch")
    state = torch.get_rng_state()
    la(new)
    la.log_marginal_likelihood()
    la.sample(2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_exact_hessian_is_refused():
    model, _, _ = make("mlp", "classification")
    with pytest.raises(UnsupportedError, match="'matrix_free' cannot hold an exact Hessian"):
        Laplace(model, "classification", "all", "matrix_free", curvature="hessian")


@pytest.mark.filterwarnings("ignore::laplace.errors.StaleWarning")
def test_changed_weights_are_refused():
    la, new = fit("mlp", "classification", "matrix_free")
    with torch.no_grad():
        next(la.model.parameters()).add_(1.0)
    with pytest.raises(UnsupportedError, match="since fit, and hessian_structure='matrix_free' reads the data at"):
        la(new)


def test_other_data_is_refused():
    model, x, y = make("mlp", "classification")
    batches = cut(x, y, 5)
    la = Laplace(model, "classification", "all", "matrix_free").fit(batches)
    saved = list(batches)
    batches.pop()
    with pytest.raises(InputError, match="examples; the fit has read 23"):
        la(x[:2])
    batches[:] = [(x + 0.1, y) for x, y in saved]
    with pytest.raises(InputError, match="is not what the fit has read"):
        la(x[:2])
    batches[:] = saved[::-1]  # the order does not matter to the exact curvature
    la(x[:2])


def test_another_order_is_refused_where_the_curvature_is_drawn():
    model, x, y = make("mlp", "classification")
    batches = cut(x, y, 5)
    la = Laplace(model, "classification", "all", "matrix_free", curvature="sketch").fit(batches)
    la(x[:2])
    batches.reverse()
    with pytest.raises(InputError, match="came in another order"):
        la(x[:2])


def test_data_cannot_be_added_or_joined():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification", "all", "matrix_free").fit(cut(x, y, 5))
    with pytest.raises(UnsupportedError, match="cannot be added to"):
        la.fit(cut(x, y, 5), override=False)
    with pytest.raises(UnsupportedError, match="cannot be added"):
        la + la
    with pytest.raises(UnsupportedError):
        la.as_prior()


def test_values_outside_their_range_are_refused():
    for options, told in (
        ({"residual": 0}, "residual=0 must lie between 0 and 1"),
        ({"most_iterations": 1}, "most_iterations"),
        ({"preconditioner": "full"}, "preconditioner"),
        ({"probes": 1}, "probes"),
        ({"preconditioner": "kron", "rank": 5}, "rank=5 belongs to preconditioner='lowrank'"),
    ):
        with pytest.raises(OptionError, match=told):
            MatrixFree(**options)


def test_attaching_data_to_another_structure_is_refused():
    la, _ = fit("mlp", "classification", "kron")
    with pytest.raises(UnsupportedError, match="nothing to attach"):
        la.attach_data([])
    with pytest.raises(UnsupportedError, match="solves nothing by iteration"):
        _ = la.solves


def test_variances_of_many_weights_are_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(90, 100), nn.Tanh(), nn.Linear(100, 2))
    la = Laplace(model, "classification", "all", MatrixFree(rank=3)).fit(
        [(torch.randn(4, 90), torch.tensor([0, 1, 0, 1]))]
    )
    with pytest.raises(UnsupportedError, match=r"Take la\.sample\(n\)\.var\(0\)"):
        _ = la.posterior_variance


def _inputs(x: Tensor):
    from laplace.network.inputs import Inputs

    return Inputs(x)


def _tensors(answer) -> tuple[Tensor, ...]:
    return answer if isinstance(answer, tuple) else (answer,)
