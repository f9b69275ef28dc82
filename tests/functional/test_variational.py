"""functional_approximation='variational': the best sparse posterior of the oracle, and exact where Z spans the data."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close
from laplace import Laplace
from laplace.errors import InputError, OptionError, UnsupportedError
from laplace.network.inputs import Inputs
from networks import cut, head_names, make
from zoo import build

TASKS = ["classification", "regression"]
SUBSETS = ["last_layer", "all"]
OPTIONS = {"hessian_structure": "gp", "functional_approximation": "variational"}


def sine(n: int = 60) -> tuple[nn.Module, Tensor, Tensor]:
    """A network that has learned a sine: few points do not explain it all."""
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, n, dtype=torch.float64).unsqueeze(1)
    y = x.sin() + 0.1 * torch.randn_like(x)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(200):
        adam.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        adam.step()
    return model, x, y


def share(la: Laplace) -> float:
    """How much of the curvature's trace the inducing points explain."""
    sums = la.posterior.fit.sums
    return float(sums["G"].diagonal().sum() / sums["trace"])


@pytest.mark.parametrize(
    ("task", "subset", "kind"), [*itertools.product(TASKS, SUBSETS, ["ggn"]), ("classification", "all", "ef")]
)
def test_it_is_the_best_posterior_of_the_oracle(task, subset, kind):
    model, x, y = make("mlp", task)
    names = head_names(model) if subset == "last_layer" else [k for k, _ in model.named_parameters()]
    la = Laplace(model, task, subset, n_subset=4, temperature=0.6, curvature=kind, **OPTIONS).fit(cut(x, y, [7, 1, 9]))
    full = Laplace(model, task, subset, "full", curvature=kind).fit(cut(x, y, 5))
    new = torch.randn(4, 4, dtype=torch.float64)
    assert la.structure.placed is not None
    z = torch.cat([part.inputs.x for part in la.structure.placed.parts])
    at, there = (oracle.jacobian_loop(model, names, inputs) for inputs in (z, new))
    for prior in (1.7, 0.01):
        la.prior_precision = prior
        expected = oracle.variational(at, full.H.double(), there, prior, 1 / 0.6)
        (run,) = la.runner.runs(la.posterior.fit, Inputs(new), whole=True)
        assert_close(la.posterior.gaussian.joint(run.jacobian()), expected.covariance, 1e-7)
        assert_close(la.log_det_ratio, expected.log_det_ratio)
        each = torch.stack([expected.covariance[i, :, i] for i in range(4)])
        assert_close(la.predict(new).outputs.covariance, each, 1e-7)
        assert_close(la.predict(new, diagonal_output=True).outputs.variance, each.diagonal(dim1=1, dim2=2), 1e-7)
    if task == "regression":
        assert_close(la(new, outputs=[1])[1], each[:, [1]][..., [1]], 1e-7)


def test_no_other_covariance_of_the_inducing_outputs_has_a_higher_bound():
    model, x, y = make("mlp", "regression")
    names = [k for k, _ in model.named_parameters()]
    la = Laplace(model, "regression", "all", n_subset=3, prior_precision=0.7, sigma_noise=0.5, **OPTIONS)
    la.fit(cut(x, y, 7))
    assert la.structure.placed is not None
    z = torch.cat([part.inputs.x for part in la.structure.placed.parts])
    jz, jx = (oracle.jacobian_loop(model, names, inputs).flatten(0, 1) for inputs in (z, x))
    kzz, kzx, kxx = jz @ jz.T / 0.7, jz @ jx.T / 0.7, jx @ jx.T / 0.7
    inverse, s = torch.linalg.inv(kzz), 1 / 0.5**2

    def twice_the_loss(covariance: Tensor) -> Tensor:
        """2 KL(q(u), p(u)) + s sum of tr(cov of f(x_n)), without the terms of the mean."""
        kl = (inverse @ covariance).trace() - len(kzz) + torch.logdet(kzz) - torch.logdet(covariance)
        along = inverse @ kzx
        return kl + s * (kxx.trace() - (kzx * along).sum() + (along * (covariance @ along)).sum())

    best = kzz @ torch.linalg.inv(kzz + s * kzx @ kzx.T) @ kzz
    assert_close(la.log_det_ratio, twice_the_loss(best))
    root = torch.linalg.cholesky(best)
    for seed in range(5):
        noise = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        other = root @ torch.linalg.matrix_exp(0.1 * (noise + noise.T)) @ root.T
        assert twice_the_loss(other) > la.log_det_ratio


@pytest.mark.parametrize(("task", "subset"), list(itertools.product(TASKS, SUBSETS)))
def test_on_all_points_it_is_the_exact_posterior(task, subset):
    model, x, y = make("mlp", task, n=13)
    exact = Laplace(model, task, subset, "gp", n_subset=13).fit(cut(x, y, [5, 1, 4]))
    la = Laplace(model, task, subset, n_subset=13, **OPTIONS).fit(cut(x, y, 6))
    new = torch.randn(5, 4, dtype=torch.float64)
    for prior, sigma in itertools.product((1.7, 0.05), (1.0, 0.3) if task == "regression" else (1.0,)):
        for one in (exact, la):
            one.prior_precision, one.sigma_noise = prior, sigma
        assert_close(la.log_marginal_likelihood(), exact.log_marginal_likelihood())
        assert_close(la.predict(new).outputs.covariance, exact.predict(new).outputs.covariance, 1e-7)
    for one in (exact, la):
        one.optimize_prior_precision()
    assert_close(la.prior_precision, exact.prior_precision, 1e-5)


@pytest.mark.parametrize("subset", SUBSETS)
def test_with_more_points_bound_and_variances_become_the_exact_ones(subset):
    model, x, y = sine()
    exact = Laplace(model, "regression", subset, "full", sigma_noise=0.1).fit(cut(x, y, 20))
    new = torch.linspace(-4, 4, 9, dtype=torch.float64).unsqueeze(1)
    errors, bounds = [], []
    for m in (1, 2, 4, 8, 16):
        la = Laplace(model, "regression", subset, n_subset=m, sigma_noise=0.1, **OPTIONS).fit(cut(x, y, 20))
        errors.append(float((la(new)[1] - exact(new)[1]).abs().mean()))
        bounds.append(float(la.log_marginal_likelihood()))
    assert bounds == sorted(bounds)  # points are nested: with the same seed, more points hold the fewer
    assert bounds[-1] < exact.log_marginal_likelihood()
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 * errors[0]


@pytest.mark.parametrize("network", ["conv", "transformer", "functional"])
def test_every_kind_of_layer_is_served(network):
    model, x, y, names = build(network, "regression", n=6)
    la = Laplace(model, "regression", "all", n_subset=2, **OPTIONS).fit(cut(x, y, [4, 1, 1]))
    assert la.structure.placed is not None
    z = torch.cat([part.inputs.x for part in la.structure.placed.parts])
    jac, at = (oracle.jacobian_loop(model, names, inputs) for inputs in (x, z))
    expected = oracle.variational(at, torch.einsum("ncp,ncq->pq", jac, jac), jac[:2], 1.0, 1.0)
    assert_close(la.log_det_ratio, expected.log_det_ratio)
    (run,) = la.runner.runs(la.posterior.fit, Inputs(x[:2]), whole=True)
    assert_close(la.posterior.gaussian.joint(run.jacobian()), expected.covariance, 1e-7)


@pytest.mark.filterwarnings("ignore:after tuning by evidence")
def test_tuning_finds_the_top_of_the_bound_in_prior_and_noise():
    model, x, y = sine()
    la = Laplace(model, "regression", "all", n_subset=4, **OPTIONS).fit(cut(x, y, 20))
    la.tune("prior_precision", "sigma_noise", method="evidence")
    top = la.log_marginal_likelihood()
    prior, sigma = la.prior_precision, la.sigma_noise
    for a, b in itertools.product((0.97, 1.0, 1.03), repeat=2):
        assert la.log_marginal_likelihood(prior * a, sigma * b) <= top + 1e-9
    value = la.log_marginal_likelihood(prior.clone().requires_grad_(), sigma.clone().requires_grad_())
    assert value.requires_grad


@pytest.mark.parametrize("subset", SUBSETS)
def test_moved_points_explain_more_than_those_that_were_drawn(subset):
    model, x, y = sine()
    drawn, moved, clusters = (
        Laplace(model, "regression", subset, n_subset=3, **OPTIONS, **options).fit(cut(x, y, 20))
        for options in ({}, {"inducing_steps": 60}, {"inducing": "kmeans"})
    )
    assert share(moved) > share(drawn)
    assert moved.log_marginal_likelihood() > drawn.log_marginal_likelihood()
    assert clusters.structure.placed is not None
    centres = clusters.structure.placed.parts[0].inputs.x
    nearest = torch.cdist(x, centres).argmin(1)
    for i, centre in enumerate(centres):
        assert_close(centre, x[nearest == i].mean(0))
    again = Laplace(model, "regression", subset, n_subset=3, inducing_steps=60, **OPTIONS).fit(cut(x, y, 7))
    assert_close(again.log_marginal_likelihood(), moved.log_marginal_likelihood())  # whatever the batches


def test_points_that_are_given_are_used():
    model, x, y = sine()
    z = torch.tensor([[-2.0], [0.5], [2.5]])  # in another dtype than the network
    la = Laplace(model, "regression", "all", inducing=z, **OPTIONS).fit(cut(x, y, 20))
    names = [k for k, _ in model.named_parameters()]
    jac, at, new = (oracle.jacobian_loop(model, names, inputs) for inputs in (x, z.double(), x[:2]))
    expected = oracle.variational(at, torch.einsum("ncp,ncq->pq", jac, jac), new, 1.0, 1.0)
    assert_close(la(x[:2], joint=True)[1], expected.covariance.reshape(2, 2))
    assert repr(la.structure) == "Variational(inducing='given')"
    moved = Laplace(model, "regression", "all", inducing=z, inducing_steps=20, **OPTIONS).fit(cut(x, y, 20))
    assert share(moved) > share(la)


@pytest.mark.filterwarnings("ignore:the best prior precision")
def test_it_samples_is_searched_saved_and_loaded_without_data(tmp_path):
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression", "all", n_subset=5, **OPTIONS).fit(cut(x, y, 7))
    la.optimize_prior_precision(method="gridsearch", val_loader=cut(x[:9], y[:9], 4), grid_size=5)
    f = la.functional_samples(x[:3], n_samples=20_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(f.flatten(1).T.cov(), la(x[:3], joint=True)[1], atol=0.1, rtol=0.05)
    torch.save(la.state_dict(), tmp_path / "la.pt")
    again = Laplace(model, "regression", "all", n_subset=5, **OPTIONS)
    again.load_state_dict(torch.load(tmp_path / "la.pt", weights_only=True))
    assert torch.equal(again(x)[1], la(x)[1])
    given = Laplace(model, "regression", "all", inducing=x[:2], **OPTIONS).fit(cut(x, y, 7))
    given.save(tmp_path / "given.safetensors")
    loaded = Laplace.load(tmp_path / "given.safetensors", model)
    assert torch.equal(loaded(x)[1], given(x)[1])
    with pytest.raises(InputError, match=r"a file does not hold them. Give inducing= again"):
        loaded.fit(cut(x, y, 7))


def test_what_cannot_be_done_says_what_can():
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression", "all", n_subset=5, **OPTIONS).fit(cut(x, y, 7))
    assert {row.kept for row in la.coverage()} == {f"10 directions, {share(la):.1%} of the trace"}
    with pytest.raises(OptionError, match="has 4 values, and this posterior over functions has one for all weights"):
        la.prior_precision = torch.ones(4)
    with pytest.raises(UnsupportedError, match="no form for prior_structure='layerwise'"):
        la.optimize_prior_precision(prior_structure="layerwise")
    with pytest.raises(InputError, match="n_subset=3, but 5 inducing points were given"):
        Laplace(model, "regression", inducing=x[:5], n_subset=3, **OPTIONS).fit(cut(x, y, 7))
    with pytest.raises(InputError, match="one row for each point"):
        Laplace(model, "regression", inducing=(x[:5], x[:4]), **OPTIONS).fit(cut(x, y, 7))
    words = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))
    ids, labels = torch.randint(9, (10, 3)), torch.randint(2, (10,))
    Laplace(words, "classification", n_subset=4, **OPTIONS).fit([(ids, labels)])
    for options in ({"inducing": "kmeans"}, {"inducing_steps": 5}):
        with pytest.raises(InputError, match=r"one tensor of real numbers.*Take inducing='random'"):
            Laplace(words, "classification", n_subset=4, **options, **OPTIONS).fit([(ids, labels)])
