"""Every subset of weights with every structure: the dense oracle's rows and columns, and nothing of the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import oracle
from laplace import Laplace
from laplace.spec import estimator_named
from networks import cut
from places import drawn_by_place
from subsets import close, options, scattered
from zoo import ZOO, build

pytestmark = pytest.mark.filterwarnings("ignore:kron keeps:laplace.errors.LaplaceWarning")
TASKS = ["classification", "regression"]


def kron_blocks(model, names, x, lam, h):
    """The Kronecker block of each tensor, or its exact one where there is none."""
    known, out, start = oracle.kron_all(model, names, x, lam), [], 0
    for name in names:
        size = dict(model.named_parameters())[name].numel()
        out.append(known.get(name, h[start : start + size, start : start + size]))
        start += size
    return torch.block_diag(*out)


CASES = [
    (s, w)
    for s in ("full", "diag", "kron")
    for w in ("globs", "predicate", "scattered")
    if (s, w) != ("kron", "scattered")
]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("curvature", ["ggn", "ef", "mc", "sketch"])
@pytest.mark.parametrize(("structure", "subset"), CASES)
def test_curvature_evidence_and_predictions_are_the_oracles_rows_and_columns(structure, subset, curvature, task):
    model, x, y, names = build("residual", task)
    told, index = options(subset, model)
    la = Laplace(model, task, hessian_structure=structure, curvature=curvature, **told)
    la.fit(cut(x, y, [5, 1, 9]), generator=torch.Generator().manual_seed(5))
    f = model(x).detach()
    lam = estimator_named(curvature, 1, None, None)(la.likelihood, f, y, drawn_by_place(5, len(x))).dense()
    jac = oracle.jacobian_loop(model, names, x)
    h = torch.einsum("ncp,ncd,ndq->pq", jac, lam, jac)
    h = {"full": h, "diag": h.diag().diag(), "kron": kron_blocks(model, names, x, lam, h)}[structure][index][:, index]
    close(la.posterior.fit.curvature.matrix(), h)
    assert torch.equal(la.mean, torch.cat([p.detach().flatten() for p in model.parameters()])[index])

    torch.manual_seed(1)
    la.prior_precision = delta = torch.rand(la.n_layers, dtype=torch.float64) + 0.5
    delta = torch.cat([d.expand(size) for d, size in zip(delta, la.posterior.fit.layout.sizes, strict=True)])
    precision = h + delta.diag()
    loglik = torch.stack([oracle.log_prob(task, a, b) for a, b in zip(f, y, strict=True)]).sum()
    terms = (la.mean.square() * delta).sum() + torch.logdet(precision) - delta.log().sum()
    close(la.log_marginal_likelihood(), loglik - 0.5 * terms)
    covariance, part = torch.linalg.inv(precision), jac[..., index]
    close(la.posterior_variance, covariance.diagonal())
    close(la.predict(x).outputs.covariance, part @ covariance @ part.mT)
    close(la.functional_variance(part), part @ covariance @ part.mT)
    if task == "regression":
        rows = part.flatten(0, 1)
        close(la(x, joint=True)[1], rows @ covariance @ rows.T)
        close(la(x, diagonal_output=True)[1], (part @ covariance @ part.mT).diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("network", list(ZOO))
@pytest.mark.parametrize("n", [None, 5])
def test_scattered_weights_of_any_network_are_exact(network, n):
    model, x, y, names = build(network, "regression")
    index = scattered(model, 2)
    index = index if n is None else index[torch.randperm(len(index))[:n]].sort().values
    _, h = oracle.curvature_all(model, names, x, y, "regression")
    for structure, expected in (("full", h[index][:, index]), ("diag", h.diagonal()[index])):
        la = Laplace(model, "regression", "subnetwork", structure, subnetwork_indices=index).fit(cut(x, y, [5, 1, 9]))
        close(la.H, expected)
        jac = oracle.jacobian_loop(model, names, x)[..., index]
        close(la.predict(x).outputs.covariance, jac @ la.posterior_covariance @ jac.mT)
        moves = la.sample(3, generator=torch.Generator().manual_seed(5)) - la.mean
        draws = la.functional_samples(x, n_samples=3, generator=torch.Generator().manual_seed(5))
        close(draws, model(x).detach() + torch.einsum("ncp,sp->snc", jac, moves))


@pytest.mark.parametrize("network", ["mlp", "conv", "tied", "transformer"])
def test_network_draws_scatter_the_step_and_leave_the_rest_alone(network):
    model, x, y, names = build(network, "regression")
    before = {k: p.clone() for k, p in model.named_parameters()}
    index = scattered(model)
    la = Laplace(model, "regression", "subnetwork", "full", subnetwork_indices=index).fit(cut(x, y, 4))
    weights = la.sample(3, generator=torch.Generator().manual_seed(5))
    draws = la.functional_samples(x, "nn", 3, generator=torch.Generator().manual_seed(5))
    for s in range(3):
        flat = torch.cat([before[k].detach().flatten() for k in names])
        flat[index] = weights[s]
        parts = flat.split([before[k].numel() for k in names])
        tensors = {k: part.reshape(before[k].shape) for k, part in zip(names, parts, strict=True)}
        close(draws[s], torch.func.functional_call(model, tensors, (x,)).detach())
    assert all(torch.equal(p, before[k]) for k, p in model.named_parameters())


@pytest.mark.parametrize("task", TASKS)
def test_the_hessian_of_scattered_weights_is_a_part_of_the_hessian(task):
    model, x, y, _ = build("mlp", task)
    index = scattered(model)
    given = {"curvature": "hessian", "prior_precision": 1e4}
    whole = Laplace(model, task, "all", "full", **given).fit([(x, y)])
    for structure in ("full", "diag"):
        la = Laplace(model, task, "subnetwork", structure, subnetwork_indices=index, **given).fit(cut(x, y, 4))
        h = whole.H[index][:, index]
        close(la.H, h if structure == "full" else h.diagonal())


@pytest.mark.parametrize("network", ["residual", "conv", "tied"])
@pytest.mark.parametrize("curvature", ["ggn", "sketch"])
def test_batches_and_chunks_do_not_matter(network, curvature, monkeypatch):
    model, x, y, _ = build(network, "classification")
    found = []
    for sizes, chunk in ((11, 2**29), ([1, 3, 2], 4096)):
        monkeypatch.setattr("laplace.budget.CHUNK", chunk)
        monkeypatch.setattr("laplace.backprop.uses.Use.chunk", chunk // 64)
        told = {"curvature": curvature, "subnetwork_indices": scattered(model)}
        la = Laplace(model, "classification", "subnetwork", "full", **told)
        la.fit(cut(x, y, sizes), generator=torch.Generator().manual_seed(0))
        found.append((la.H, la(x)))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])


def test_few_entries_of_a_large_shared_layer_are_summed_one_by_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(8, 20, 3), nn.Tanh(), nn.Flatten(), nn.Linear(80, 2)).double()
    x, y = torch.randn(7, 8, 6).double(), torch.randn(7, 2).double()
    names = [k for k, _ in model.named_parameters()]
    for index in (25 * torch.arange(19), torch.arange(480)[::2]):  # each at its own row and column; half of all
        _, h = oracle.curvature_all(model, names, x, y, "regression")
        la = Laplace(model, "regression", "subnetwork", "full", subnetwork_indices=index).fit(cut(x, y, 3))
        close(la.H, h[index][:, index])
