"""hessian_structure='gp': the oracle's dense Gaussian process, and the full posterior where all points are kept."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

import oracle
from exact import assert_close
from laplace import Laplace
from laplace.backprop.asked import EACH_OUTPUT
from laplace.network.inputs import Inputs
from networks import LogitsOnly, cut, head_names, make
from zoo import ZOO, build

TASKS = ["classification", "regression"]
SUBSETS = ["last_layer", "all"]
KINDS = ["ggn", "ef", "mc", "sketch"]
M = 6


def new_inputs(n: int = 4, width: int = 4) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@functools.cache
def pair(task: str, subset: str, kind: str) -> tuple[Laplace, Laplace]:
    """The full posterior and the Gaussian process on all points."""
    model, x, y = make("mlp", task, n=13)
    fits = (Laplace(model, task, subset, structure, curvature=kind, temperature=0.7) for structure in ("full", "gp"))
    full, gp = (la.fit(cut(x, y, [5, 1, 4]), generator=torch.Generator().manual_seed(3)) for la in fits)
    return full, gp


def priors(la: Laplace) -> list[Tensor]:
    return [torch.tensor(1.7), torch.linspace(0.4, 2.0, la.n_layers, dtype=torch.float64)]


@pytest.mark.parametrize(("task", "subset", "kind"), list(itertools.product(TASKS, SUBSETS, KINDS)))
def test_on_all_points_it_is_the_full_posterior(task, subset, kind):
    full, gp = pair(task, subset, kind)
    x = new_inputs()
    for prior, sigma in itertools.product(priors(full), (1.0, 0.3) if task == "regression" else (1.0,)):
        for la in (full, gp):
            la.prior_precision, la.sigma_noise = prior, sigma
        assert_close(gp.log_marginal_likelihood(), full.log_marginal_likelihood())
        assert_close(gp.log_det_ratio, full.log_det_ratio)
        assert_close(gp.log_det_posterior_precision, full.log_det_posterior_precision)
        a, b = full.predict(x).outputs, gp.predict(x).outputs
        assert_close(b.covariance, a.covariance)
        assert_close(gp.predict(x, diagonal_output=True).outputs.variance, a.variance)
        for link in full.likelihood.links:
            draws = (torch.Generator().manual_seed(0) for _ in range(2))
            p, q = (la(x, link_approx=link, generator=g) for la, g in zip((full, gp), draws, strict=True))
            assert_close(q, p)
        if task == "regression":
            assert_close(gp(x, joint=True)[1], full(x, joint=True)[1])
            assert_close(gp(x, joint=True, outputs=[1])[1], full(x, joint=True, outputs=[1])[1])
            assert_close(gp(x, outputs=[1])[1], full(x, outputs=[1])[1])


@pytest.mark.parametrize(("task", "prior"), list(itertools.product(TASKS, ["scalar", "layerwise"])))
def test_on_all_points_the_evidence_has_the_same_optimum(task, prior):
    full, gp = pair(task, "all", "ggn")
    for la in (full, gp):
        la.prior_precision, la.sigma_noise = 1.0, 1.0
        la.optimize_prior_precision(prior_structure=prior, tune_sigma_noise=task == "regression")
    assert_close(gp.prior_precision, full.prior_precision, 1e-6)
    assert_close(gp.sigma_noise, full.sigma_noise, 1e-6)


@pytest.mark.parametrize("groups", ["scalar", "layerwise"])
def test_traces_are_those_of_the_weights(groups):
    full, gp = pair("classification", "all", "ggn")
    for prior in priors(full):
        full.prior_precision = gp.prior_precision = prior
        for got, expected in zip(
            gp.posterior.gaussian.traces(groups), full.posterior.gaussian.traces(groups), strict=True
        ):
            assert_close(got.flatten(), expected.flatten())


@pytest.mark.parametrize("task", TASKS)
def test_evidence_and_variances_are_differentiable(task):
    _, gp = pair(task, "all", "ggn")
    x = new_inputs(2)
    (run,) = gp.runner.runs(gp.posterior.fit, Inputs(x), whole=True)

    def both(precision, scale):
        gaussian = gp.posterior.fit.curvature.gaussian(
            scale, list(precision) if len(precision) > 1 else [precision] * 4
        )
        return gaussian.logdet(), gaussian.variance(run.jacobian())

    for size in (1, 4):
        precision = torch.linspace(0.5, 1.5, size, dtype=torch.float64).requires_grad_()
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(both, (precision, scale))


@pytest.mark.parametrize(("task", "subset", "independent"), list(itertools.product(TASKS, SUBSETS, [False, True])))
def test_a_subset_gives_the_dense_gaussian_process_on_it(task, subset, independent):
    model, x, y = make("wrapped", task)
    la = Laplace(model, task, subset, "gp", n_subset=M, seed=4, independent_outputs=independent)
    la.fit(cut(x, y, 7))
    reference = LogitsOnly(model)
    names = [f"net.{k}" for k in (head_names(model) if subset == "last_layer" else dict(model.named_parameters()))]
    kept = torch.cat([part.inputs.x for part in la.posterior.fit.points.parts])
    assert len(kept) == M
    labels = torch.stack([y[(x == one).all(1)][0] for one in kept])  # every kept point is one of the data
    assert len({tuple(one.tolist()) for one in kept}) == M
    jac = oracle.jacobian_loop(reference, names, kept)
    lam = oracle.hessian_of_loss(task, reference(kept).detach(), labels)
    new = new_inputs()
    at = oracle.jacobian_loop(reference, names, new)
    oracle_all = oracle.fit(reference, names, x, y, task, "full")
    for prior, temperature in itertools.product(priors(la), (1.0, 0.5)):
        la.prior_precision, la.temperature = prior, temperature
        delta = oracle_all.expand(prior)
        expected = oracle.gp(jac, lam, at, delta, len(x) / M / temperature, independent)
        assert_close(la.log_det_ratio, expected.log_det_ratio)
        likelihood = oracle_all.loglik(1.0) / temperature  # over all data
        assert_close(
            la.log_marginal_likelihood(),
            likelihood - 0.5 * ((oracle_all.mean**2 * delta).sum() + expected.log_det_ratio),
        )
        assert_close(la.posterior.gaussian.joint(run_of(la, new)), expected.covariance)
        outputs = la.predict(new).outputs
        each = torch.stack([expected.covariance[i, :, i] for i in range(len(new))])
        assert_close(outputs.covariance, each)
        assert_close(outputs.mean, reference(new).detach())
        if task == "regression":
            assert_close(la(new, outputs=[1], diagonal_output=True)[1], each[:, [1], [1]])
            assert_close(la(new, outputs=[1], joint=True)[1], expected.covariance[:, 1, :, 1])


def run_of(la, x):
    (run,) = la.runner.runs(la.posterior.fit, Inputs(x), whole=True)
    return run.jacobian()


@pytest.mark.filterwarnings("ignore:the evidence sends")
@pytest.mark.parametrize("independent", [False, True])
def test_newton_finds_the_optimum_of_a_subsets_evidence(independent):
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression", "all", "gp", n_subset=9, independent_outputs=independent).fit(cut(x, y, 7))
    for groups in ("scalar", "layerwise"):
        la.optimize_prior_precision(prior_structure=groups, tune_sigma_noise=True)
        precision = la.prior_precision.clone().requires_grad_()
        sigma = la.sigma_noise.clone().requires_grad_()
        slopes = torch.autograd.grad(la.log_marginal_likelihood(precision, sigma), (precision, sigma))
        assert all(float(s.abs().max()) < 1e-3 for s in slopes)
        la.prior_precision, la.sigma_noise = precision.detach(), sigma.detach()


@pytest.mark.parametrize("network", [name for name in ZOO if name != "mlp"])
def test_every_kind_of_layer_has_its_kernel(network):
    model, x, y, _ = build(network, "classification", n=7)
    full = Laplace(model, "classification", "all", "full").fit(cut(x, y, [4, 1, 2]))
    gp = Laplace(model, "classification", "all", "gp").fit(cut(x, y, [4, 1, 2]))
    full.prior_precision = gp.prior_precision = torch.linspace(0.5, 2, full.n_layers, dtype=torch.float64)
    assert_close(gp.log_marginal_likelihood(), full.log_marginal_likelihood())
    assert_close(gp.predict(x[:3]).outputs.covariance, full.predict(x[:3]).outputs.covariance)


@pytest.mark.parametrize("network", ["conv", "residual"])
def test_independent_outputs_of_shared_weights(network):
    model, x, y, names = build(network, "regression", n=6)
    gp = Laplace(model, "regression", "all", "gp", independent_outputs=True).fit(cut(x, y, 4))
    jac = oracle.jacobian_loop(model, names, x)
    lam = torch.eye(2, dtype=torch.float64).expand(6, 2, 2)
    expected = oracle.gp(jac, lam, jac[:3], torch.ones(jac.shape[2], dtype=torch.float64), 1.0, True)
    assert_close(gp.log_det_ratio, expected.log_det_ratio)
    assert_close(gp.posterior.gaussian.joint(run_of(gp, x[:3])), expected.covariance)


def test_gradients_that_are_too_large_to_keep_are_had_again():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 200), torch.nn.Tanh(), torch.nn.Linear(200, 3)).double()
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.randint(3, (9,))
    one = Laplace(model, "classification", "all", "gp", n_subset=4).fit(cut(x, y, 9))
    two = Laplace(model, "classification", "all", "gp", n_subset=4, memory_budget=20_000).fit(cut(x, y, 9))
    expected, got = one(x), two(x)
    assert len(one.posterior.fit.points._held) == 1
    assert not two.posterior.fit.points._held
    assert_close(got, expected)
    assert_close(two.log_marginal_likelihood(), one.log_marginal_likelihood())


@pytest.mark.filterwarnings("ignore:the best prior precision")
@pytest.mark.parametrize("task", TASKS)
def test_a_grid_of_priors_is_scored_as_by_the_full_posterior(task):
    full, gp = pair(task, "all", "ggn")
    _, x, y = make("mlp", task, n=13)
    for la in (full, gp):
        la.sigma_noise = 1.0
        la.optimize_prior_precision(method="gridsearch", val_loader=cut(x[:7], y[:7], 4), grid_size=9)
    assert float(gp.prior_precision) == float(full.prior_precision)


@pytest.mark.parametrize("pred_type", ["glm", "gp"])
def test_draws_of_functions_have_the_joint_covariance(pred_type):
    _, gp = pair("regression", "all", "ggn")
    gp.prior_precision, gp.sigma_noise = 1.0, 1.0
    x = new_inputs(2)
    x = torch.cat([x, x[:1]])
    f = gp.functional_samples(x, pred_type, 20_000, generator=torch.Generator().manual_seed(0))
    assert f.shape == (20_000, 3, 2)
    torch.testing.assert_close(f[:, 0], f[:, 2], atol=1e-5, rtol=0)  # one function at equal inputs
    mean, covariance = gp(x, joint=True, pred_type=pred_type)
    torch.testing.assert_close(f.mean(0).flatten(), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(f.flatten(1).T.cov(), covariance, atol=0.1, rtol=0)
    again = gp.functional_samples(x, pred_type, 20_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(f, again)
    alone = gp.functional_samples(x, pred_type, 5_000, diagonal_output=True)
    assert abs(float(torch.corrcoef(alone[:, [0, 2], 0].T)[0, 1])) < 0.1


def test_predictions_are_differentiable_in_the_inputs():
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression", "all", "gp", n_subset=5, enable_backprop=True).fit(cut(x, y, 8))
    assert torch.autograd.gradcheck(lambda new: la(new)[1], (new_inputs(2).requires_grad_(),))


def test_float32_networks_lose_nothing_to_cancellation():
    """Posterior variances of a millionth of the prior's are differences of kernels: these are in float64."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    x, y = torch.randn(60, 3), torch.randn(60, 2)
    options = {"sigma_noise": 1e-3, "prior_precision": 1e-2}
    gp = Laplace(model, "regression", "all", "gp", **options).fit(cut(x, y, 20))
    variance = gp(x, diagonal_output=True)[1]
    assert variance.dtype == torch.float32
    assert float(gp.posterior.gaussian.solver.prior(run_of(gp, x), EACH_OUTPUT).min()) > 1e5 * float(variance.max())
    x, y = x.double(), y.double()
    full = Laplace(model.double(), "regression", "all", "full", **options).fit(cut(x, y, 20))
    torch.testing.assert_close(variance.double(), full(x, diagonal_output=True)[1], rtol=1e-3, atol=0)
