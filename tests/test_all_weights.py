"""All weights: every structure, curvature and predictive against the dense oracle, on every network of the zoo."""

from __future__ import annotations

import itertools

import pytest
import torch

import oracle
from laplace import Laplace
from laplace.errors import LaplaceWarning, NumericalError, UnsupportedError
from laplace.network.inputs import Inputs
from networks import cut
from zoo import ZOO, build

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")
TASKS = ["classification", "regression"]
CASES = list(itertools.product(ZOO, TASKS))


def close(a, b, tol=1e-7):
    scale = max(float(b.abs().max()), 1e-20)
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tol * scale


def fit(network, task, structure, curvature="ggn", sizes=(5, 1, 9), **options):
    model, x, y, names = build(network, task)
    la = Laplace(model, task, "all", structure, curvature=curvature, **options)
    la.fit(cut(x, y, list(sizes)), generator=torch.Generator().manual_seed(0))
    return la, model, x, y, names


def expected_kron(model, names, x, lam, h, sharing):
    """Kronecker blocks where there are, exact dense blocks elsewhere."""
    parameters = dict(model.named_parameters())
    blocks, out, start = oracle.kron_all(model, names, x, lam, sharing), [], 0
    for name in names:
        size = parameters[name].numel()
        out.append(blocks.get(name, h[start : start + size, start : start + size]))
        start += size
    return torch.block_diag(*out)


@pytest.mark.parametrize("curvature", ["ggn", "ef"])
@pytest.mark.parametrize(("network", "task"), CASES)
def test_full_and_diagonal_curvature_are_exact(network, task, curvature):
    la, model, x, y, names = fit(network, task, "full", curvature)
    _, h = oracle.curvature_all(model, names, x, y, task, curvature)
    assert list(la.posterior.fit.layout.names) == names
    close(la.H, h)
    close(fit(network, task, "diag", curvature)[0].H, h.diag())


# The tied embedding of "tied" is Linear and Embedding at once: no Kronecker form, a dense block.
KRON = [(n, t, s) for n, t in CASES for s in ("expand", "reduce")]


@pytest.mark.parametrize(("network", "task", "sharing"), KRON)
def test_kronecker_blocks_are_their_formula(network, task, sharing):
    la, model, x, y, names = fit(network, task, "kron", weight_sharing=sharing)
    lam, h = oracle.curvature_all(model, names, x, y, task)
    start = 0
    expected = expected_kron(model, names, x, lam, h, sharing)
    if network == "tied":
        size = model.embed.weight.numel()
        expected[:size, :size] = h[:size, :size]
    got = la.H.to_matrix()
    inside = {row.name for row in la.coverage() if row.rule in ("attention", "recurrent")}  # opened: their own tests
    for name, size in zip(names, la.posterior.fit.layout.sizes, strict=True):
        part = slice(start, start + size)
        if name in inside and not name.endswith("bias"):
            assert float(got[part, part].norm()) > 0
            expected[part, part] = got[part, part]
        start += size
    start = 0
    for size in la.posterior.fit.layout.sizes:
        part = slice(start, start + size)
        if float(expected[part, part].abs().max()) > 1e-25:  # a bias before a normalisation has none
            close(got[part, part], expected[part, part])
        start += size
    assert float(got.norm()) == pytest.approx(float(expected.norm()), rel=1e-9)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize(("network", "task"), CASES)
def test_evidence_and_predictions_are_the_oracles(network, task, structure):
    la, model, x, y, names = fit(network, task, structure, temperature=1.3)
    if task == "regression":
        la.sigma_noise = 0.6
    torch.manual_seed(1)
    la.prior_precision = torch.rand(len(names), dtype=torch.float64) + 0.5
    h = la.H.to_matrix() if structure == "kron" else la.H.diag() if structure == "diag" else la.H
    sigma = float(la.sigma_noise)
    precision = h / sigma**2 / 1.3 + la.prior_precision_diag.diag()
    covariance = torch.linalg.inv(precision)
    f = model(x).detach()
    loglik = torch.stack([oracle.log_prob(task, a, b, sigma) for a, b in zip(f, y, strict=True)]).sum()
    delta = la.prior_precision_diag
    terms = (la.mean.square() * delta).sum() + torch.logdet(precision) - delta.log().sum()
    close(la.log_marginal_likelihood(), loglik / 1.3 - 0.5 * terms)

    new = x[:7]
    jac = oracle.jacobian_loop(model, names, new)
    expected = jac @ covariance @ jac.mT
    close(la.functional_variance(jac), expected)
    variance = expected.diagonal(dim1=1, dim2=2)
    f = model(new).detach()
    if task == "regression":
        mean, cov = la(new)
        close(mean, f)
        close(cov, expected)
        close(la(new, diagonal_output=True)[1], variance)
        rows = jac.flatten(0, 1)
        close(la(new, joint=True)[1], rows @ covariance @ rows.T)
        close(la(new, outputs=[1])[1], expected[:, 1:, 1:])
        close(
            la(new, outputs=[1, 0], joint=True)[1],
            (jac[:, [1, 0]].flatten(0, 1) @ covariance @ jac[:, [1, 0]].flatten(0, 1).T),
        )
    else:
        close(la(new), torch.softmax(f / torch.sqrt(1 + torch.pi / 8 * variance), -1))
        close(la.predict(new).outputs.covariance, expected)
        p = f.softmax(-1)
        product = (expected @ p.unsqueeze(-1)).squeeze(-1)
        (run,) = la.runner.runs(la.posterior.fit, Inputs(new), whole=True)
        close(la.posterior.gaussian.product(run.jacobian(), p), product)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("network", list(ZOO))
def test_linearised_draws_are_the_jacobian_times_weight_draws(network, structure):
    la, model, x, _, names = fit(network, "regression", structure)
    weights = la.sample(4, generator=torch.Generator().manual_seed(5)) - la.mean
    draws = la.functional_samples(x, n_samples=4, generator=torch.Generator().manual_seed(5))
    jac = oracle.jacobian_loop(model, names, x)
    close(draws, model(x).detach() + torch.einsum("ncp,sp->snc", jac, weights))


@pytest.mark.parametrize("network", list(ZOO))
def test_network_draws_run_the_network_with_drawn_weights(network):
    la, model, x, _, names = fit(network, "regression", "diag")
    weights = la.sample(3, generator=torch.Generator().manual_seed(5))
    draws = la.functional_samples(x, "nn", 3, generator=torch.Generator().manual_seed(5))
    parts = la.posterior.fit.layout
    for s in range(3):
        tensors = {
            k: w.reshape(shape) for k, w, shape in zip(names, parts.split(weights[s]), parts.shapes, strict=True)
        }
        close(draws[s], torch.func.functional_call(model, tensors, (x,)).detach())


@pytest.mark.parametrize("kind", ["mc", "sketch"])
@pytest.mark.parametrize("network", ["mlp", "conv", "residual"])
def test_estimated_curvature_is_unbiased(network, kind):
    model, x, y, names = build(network, "classification", n=4)
    _, h = oracle.curvature_all(model, names, x, y, "classification")
    la = Laplace(model, "classification", "all", "full", curvature=kind, curvature_samples=3000)
    la.fit([(x, y)], generator=torch.Generator().manual_seed(0))
    assert float((la.H - h).norm()) < 0.15 * float(h.norm())


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("network", list(ZOO))
@pytest.mark.parametrize("kind", ["ggn", "sketch"])
def test_batches_and_chunks_do_not_matter(network, structure, kind, monkeypatch):
    one, *_, x, _, _ = fit(network, "classification", structure, kind, sizes=(11,))
    monkeypatch.setattr("laplace.budget.CHUNK", 4096)
    many, *_ = fit(network, "classification", structure, kind, sizes=(1, 3, 2))
    close(many.log_marginal_likelihood(), one.log_marginal_likelihood())
    close(many(x), one(x))
    close(many.posterior_variance, one.posterior_variance)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_tuning_finds_a_stationary_point(structure):
    la, *_ = fit("residual", "regression", structure)
    la.optimize_prior_precision(prior_structure="layerwise", tune_sigma_noise=True)
    precision, sigma = la.prior_precision.log().requires_grad_(), la.sigma_noise.log().requires_grad_()
    value = la.log_marginal_likelihood(precision.exp(), sigma.exp())
    g_precision, g_sigma = torch.autograd.grad(value, (precision, sigma))
    inside = precision.detach().abs() < 18
    assert float((g_precision * inside).abs().max()) < 1e-5
    assert float(g_sigma.abs()) < 1e-5


def test_per_tensor_blocks_are_exact_for_one_example_without_shared_weights():
    model, x, y, names = build("mlp", "classification")
    la = Laplace(model, "classification", "all", "kron").fit([(x[:1], y[:1])])
    _, h = oracle.curvature_all(model, names, x[:1], y[:1], "classification")
    start = 0
    for size in la.posterior.fit.layout.sizes:
        part = slice(start, start + size)
        close(la.H.to_matrix()[part, part], h[part, part])
        start += size


def test_expand_is_exact_for_a_deep_linear_network_with_squared_loss():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
    x, y = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    la = Laplace(model, "regression", "all", "kron").fit(cut(x, y, 4))
    _, h = oracle.curvature_all(model, list(la.posterior.fit.layout.names), x, y, "regression")
    start = 0
    for size in la.posterior.fit.layout.sizes:
        part = slice(start, start + size)
        close(la.H.to_matrix()[part, part], h[part, part])
        start += size


def test_reduce_is_exact_for_a_convolution_with_sum_pooling_and_squared_loss():
    torch.manual_seed(0)

    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(2, 3, 3, padding=1)

        def forward(self, x):
            return self.conv(x).sum((2, 3))

    model = Pooled().double()
    x, y = torch.randn(6, 2, 4, 4).double(), torch.randn(6, 3).double()
    la = Laplace(model, "regression", "all", "kron", weight_sharing="reduce").fit(cut(x, y, 4))
    _, h = oracle.curvature_all(model, ["conv.weight", "conv.bias"], x, y, "regression")
    size = la.posterior.fit.layout.sizes[0]
    close(la.H.to_matrix()[:size, :size], h[:size, :size])
    close(la.H.to_matrix()[size:, size:], h[size:, size:])


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("network", ["mlp", "conv", "residual", "recurrent"])
def test_gradients_of_the_predictive_in_the_inputs(network, structure):
    la, _, x, *_ = fit(network, "regression", structure, enable_backprop=True)
    new = x[:2].clone().requires_grad_()

    def variance(inputs):
        return la(inputs)[1].diagonal(dim1=1, dim2=2)

    assert torch.autograd.gradcheck(variance, (new,), atol=1e-6)


def hessian_oracle(model, names, x, y, task):
    parameters = dict(model.named_parameters())
    sizes = [parameters[k].numel() for k in names]

    def loss(theta):
        parts = zip(names, theta.split(sizes), strict=True)
        f = torch.func.functional_call(model, {k: t.reshape(parameters[k].shape) for k, t in parts}, (x,))
        return -torch.stack([oracle.log_prob(task, a, b) for a, b in zip(f, y, strict=True)]).sum()

    theta = torch.cat([parameters[k].detach().flatten() for k in names])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.autograd.functional.hessian(loss, theta)


@pytest.mark.parametrize("network", ["mlp", "conv", "residual", "transformer", "tied", "recurrent"])
@pytest.mark.parametrize("task", TASKS)
def test_the_hessian_is_exact(network, task):
    la, model, x, y, names = fit(network, task, "full", "hessian", prior_precision=1e4)
    h = hessian_oracle(model, names, x, y, task)
    close(la.H, h)
    close(fit(network, task, "diag", "hessian", prior_precision=1e4)[0].H, h.diag())
    assert la(x) is not None


def test_an_indefinite_hessian_names_the_prior_that_repairs_it():
    la, model, x, y, names = fit("residual", "regression", "full", "hessian", prior_precision=1e-3)
    smallest = float(torch.linalg.eigvalsh(hessian_oracle(model, names, x, y, "regression"))[0])
    assert smallest < 0
    with pytest.raises(NumericalError, match=f"smallest eigenvalue is {smallest + 1e-3:.3g}"):
        la(x)
    la.prior_precision = 1e-3 - 1.01 * smallest
    assert la(x)[1].isfinite().all()


def test_the_hessian_of_the_last_layer_is_its_ggn_in_every_structure():
    model, x, y, _ = build("mlp", "classification")
    for structure in ("full", "kron", "diag", "lowrank"):
        one, two = (
            Laplace(model, "classification", hessian_structure=structure, curvature=kind).fit(cut(x, y, 4))
            for kind in ("ggn", "hessian")
        )
        assert float(one.log_marginal_likelihood()) == float(two.log_marginal_likelihood())


def test_a_hessian_of_too_many_weights_is_refused_with_the_limit():
    model = torch.nn.Linear(2000, 6)
    with pytest.raises(UnsupportedError, match=r"12,006 weights.*limit is 10,000"):
        Laplace(model, "classification", "all", "diag", curvature="hessian").fit(
            [(torch.randn(2, 2000), torch.zeros(2, dtype=torch.long))]
        )


def test_coverage_names_rule_structure_and_bytes():
    model, x, y, names = build("residual", "classification")
    la = Laplace(model, "classification", "all", "kron")
    with pytest.warns(LaplaceWarning, match=r"kron keeps 6 of 14 tensors.*bn\.weight \(dense 4\).*la\.coverage"):
        la.fit(cut(x, y, 4))
    rows = {row.name: row for row in la.coverage()}
    assert list(rows) == names
    assert (rows["block.weight"].rule, rows["block.weight"].kept) == ("conv", "kron 4 x 12")
    assert (rows["bn.weight"].rule, rows["bn.weight"].kept) == ("norm", "dense 4")
    assert la.coverage().bytes == sum(v.nbytes for v in la.posterior.fit.sums.values())
    text = str(la.coverage())
    assert all(name in text for name in names)
    assert "total" in text
    functional, x, y, _ = build("functional", "classification")
    rules = {r.name: r.rule for r in Laplace(functional, "classification", "all", "diag").fit(cut(x, y, 4)).coverage()}
    assert rules["unused.weight"] == "unused"
    assert rules["bi.weight"] == "bilinear"
    assert rules["act.weight"] == "generic in 'act'"


def test_large_tensors_without_a_kronecker_form_are_kept_as_diagonals():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LayerNorm(1200), torch.nn.Linear(1200, 3)).double()
    for p in (model[0].bias, *model[1].parameters()):
        p.requires_grad_(False)
    x, y = torch.randn(9, 1200, dtype=torch.float64), torch.randint(3, (9,))
    la = Laplace(model, "classification", "all", "kron").fit(cut(x, y, 4))
    assert [row.kept for row in la.coverage()] == ["diag"]
    _, h = oracle.curvature_all(model, ["0.weight"], x, y, "classification")
    close(la.H, h.diag())


def test_the_papers_first_listing_runs():
    model, x, y, _ = build("mlp", "classification", n=40)
    train_loader, val_loader = cut(x[:30], y[:30], 8), cut(x[30:], y[30:], 8)
    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="diag")
    la.fit(train_loader)
    la.optimize_prior_precision(method="CV", val_loader=val_loader, log_prior_prec_max=8, log_prior_prec_min=-8)
    assert la(x, pred_type="glm", link_approx="probit").shape == (40, 3)
