"""functional_approximation='nystrom': the dense one of the oracle, and the full posterior in all directions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import oracle
from exact import assert_close
from laplace import Laplace
from laplace.errors import InputError, LaplaceWarning
from laplace.network.inputs import Inputs
from networks import cut, head_names, make
from zoo import build

TASKS = ["classification", "regression"]
SUBSETS = ["last_layer", "all"]
OPTIONS = {"hessian_structure": "gp", "functional_approximation": "nystrom"}


def small(task: str) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """Fewer weights than points times outputs."""
    torch.manual_seed(0)
    c = 3 if task == "classification" else 2
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, c)).double()
    x = 2 * torch.randn(40, 2, dtype=torch.float64)
    return model, x, torch.randint(c, (40,)) if c == 3 else torch.randn(40, c, dtype=torch.float64)


@pytest.mark.parametrize(
    ("task", "subset", "kind"), [*itertools.product(TASKS, SUBSETS, ["ggn"]), ("classification", "all", "mc")]
)
def test_in_all_directions_it_is_the_full_posterior(task, subset, kind):
    model, x, y = small(task)
    full = Laplace(model, task, subset, "full", curvature=kind)
    some = Laplace(model, task, subset, curvature=kind, n_subset=30, **OPTIONS)
    for la in (full, some):
        la.fit(cut(x, y, [9, 1, 12]), generator=torch.Generator().manual_seed(3))
    new = torch.randn(4, 2, dtype=torch.float64)
    for prior in (torch.tensor(1.7), torch.linspace(0.4, 2.0, full.n_layers, dtype=torch.float64)):
        full.prior_precision = some.prior_precision = prior
        assert_close(some.log_marginal_likelihood(), full.log_marginal_likelihood())
        assert_close(some.predict(new).outputs.covariance, full.predict(new).outputs.covariance)
        if task == "classification":
            assert_close(some(new, link_approx="delta"), full(new, link_approx="delta"))
        else:
            assert_close(some(new, joint=True)[1], full(new, joint=True)[1])
    for groups in ("scalar", "layerwise"):
        for la in (full, some):
            la.optimize_prior_precision(prior_structure=groups)
        assert_close(some.prior_precision, full.prior_precision, 1e-5)


@pytest.mark.parametrize(("task", "subset"), list(itertools.product(TASKS, SUBSETS)))
def test_some_directions_are_those_of_the_oracle(task, subset):
    model, x, y = make("mlp", task)  # rank 6: a last layer has its eigenvalues once for every output
    names = head_names(model) if subset == "last_layer" else [k for k, _ in model.named_parameters()]
    la = Laplace(model, task, subset, n_subset=len(x), rank=6, temperature=0.6, **OPTIONS).fit(cut(x, y, 7))
    dense = oracle.fit(model, names, x, y, task, "full")
    new = torch.randn(4, 4, dtype=torch.float64)
    jac, at = (oracle.jacobian_loop(model, names, inputs) for inputs in (x, new))
    for prior in (torch.tensor(1.7), torch.linspace(0.4, 2.0, la.n_layers, dtype=torch.float64)):
        la.prior_precision = prior
        expected = oracle.nystrom(jac, dense.h, at, dense.expand(prior), 1 / 0.6, 6)
        (run,) = la.runner.runs(la.posterior.fit, Inputs(new), whole=True)
        assert_close(la.posterior.gaussian.joint(run.jacobian()), expected.covariance)
        assert_close(la.log_det_ratio, expected.log_det_ratio)
        each = torch.stack([expected.covariance[i, :, i] for i in range(4)])
        assert_close(la.predict(new).outputs.covariance, each)
        assert_close(la.predict(new, diagonal_output=True).outputs.variance, each.diagonal(dim1=1, dim2=2))
    if task == "regression":
        assert_close(la(new, outputs=[1])[1], each[:, [1]][..., [1]])


@pytest.mark.parametrize("network", ["conv", "transformer", "functional"])
def test_every_kind_of_layer_has_its_directions(network):
    model, x, y, names = build(network, "regression", n=6)
    la = Laplace(model, "regression", "all", rank=4, **OPTIONS).fit(cut(x, y, [4, 1, 1]))
    jac = oracle.jacobian_loop(model, names, x)
    h = torch.einsum("ncp,ncq->pq", jac, jac)
    expected = oracle.nystrom(jac, h, jac[:2], torch.ones(len(h), dtype=torch.float64), 1.0, 4)
    assert_close(la.log_det_ratio, expected.log_det_ratio)
    (run,) = la.runner.runs(la.posterior.fit, Inputs(x[:2]), whole=True)
    assert_close(la.posterior.gaussian.joint(run.jacobian()), expected.covariance)


def test_the_rank_is_what_there_is():
    model, x, y = make("mlp", "regression")
    with pytest.warns(LaplaceWarning, match=r"rank=46 is more than the rank of .* kernel: 16 directions are kept"):
        la = Laplace(model, "regression", rank=46, **OPTIONS).fit(cut(x, y, 7))
    assert {row.kept for row in la.coverage()} == {"16 directions"}
    with pytest.raises(InputError, match=r"rank=47 is more than the 46 gradients.*rank of at most 46"):
        Laplace(model, "regression", rank=47, **OPTIONS).fit(cut(x, y, 7))


@pytest.mark.filterwarnings("ignore:the best prior precision")
def test_draws_grid_and_round_trip(tmp_path):
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression", "all", n_subset=10, rank=7, **OPTIONS).fit(cut(x, y, 7))
    la.optimize_prior_precision(method="gridsearch", val_loader=cut(x[:9], y[:9], 4), grid_size=5)
    f = la.functional_samples(x[:3], n_samples=20_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(f.flatten(1).T.cov(), la(x[:3], joint=True)[1], atol=0.1, rtol=0.05)
    torch.save(la.state_dict(), tmp_path / "la.pt")  # it holds no points
    again = Laplace(model, "regression", "all", n_subset=10, rank=7, **OPTIONS)
    again.load_state_dict(torch.load(tmp_path / "la.pt", weights_only=True))
    assert torch.equal(again(x)[1], la(x)[1])
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())


def test_a_loader_that_can_be_read_once_is_refused():
    model, x, y = make("mlp", "regression")
    with pytest.raises(InputError, match=r"reads the data 2 times or more, and a generator can be read once"):
        Laplace(model, "regression", **OPTIONS).fit(b for b in cut(x, y, 7))
