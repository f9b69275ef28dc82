"""Low rank: its eigenpairs are those of the dense curvature, found without it, and its report says what was left."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, labels
from laplace import Laplace
from laplace.errors import (
    InputError,
    LaplaceWarning,
    MemoryBudgetError,
    OptionError,
    UnsupportedError,
)
from networks import cut, make
from zoo import ZOO, build

WARNING = "ignore:lowrank dropped:laplace.errors.LaplaceWarning"


@functools.cache
def problem() -> tuple[nn.Module, Tensor, Tensor]:
    """A convolutional network of 553 weights, more than are taken at once, and 40 examples."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 6), nn.Linear(6, 3)
    ).double()
    return model, torch.randn(40, 1, 8, 8, dtype=torch.float64), labels("classification", 40, 3)


def fit(structure: str, curvature: str = "ggn", sizes: list[int] | int = 16, **options) -> Laplace:
    model, x, y = problem()
    la = Laplace(model, "classification", "all", structure, curvature=curvature, **options)
    return la.fit(cut(x, y, sizes), generator=torch.Generator().manual_seed(5))


@functools.cache
def dense(curvature: str) -> Tensor:
    """H of `problem`, by the structure that the oracle has tested."""
    return fit("full", curvature, prior_precision=1e6).H


@pytest.mark.parametrize("options", [{"rank": 5}, {}, {"tol": 0.05}, {"tol": 1e-3}], ids=str)
@pytest.mark.parametrize("curvature", ["ggn", "ef", "mc", "sketch"])
def test_the_eigenpairs_are_those_of_the_dense_curvature(curvature, options):
    la, h = fit("lowrank", curvature, **options), dense(curvature)
    values, expected = oracle.top_eigenpairs(h, **(options or {"rank": 20}))
    spectrum = la.spectrum
    assert_close(spectrum.eigenvalues / values, torch.ones_like(values), 1e-8)
    assert_close(la.H, expected, 1e-6)
    assert spectrum.trace == pytest.approx(float(h.trace()), rel=1e-12)
    assert spectrum.share == pytest.approx(float(values.sum() / h.trace()), rel=1e-8)
    following = torch.linalg.eigvalsh(h).flip(0)[len(values)]
    assert spectrum.cut == pytest.approx(float(following), rel=1e-4, abs=1e-12 * float(values[0]))
    assert float(spectrum.residuals.max()) <= 1e-6 * float(values[0])
    assert spectrum.passes > 1


def test_residuals_are_those_of_the_pairs():
    la, h = fit("lowrank", rank=5), dense("ggn")
    u = la.posterior.fit.sums["vectors"]
    found = (u @ h - la.spectrum.eigenvalues.unsqueeze(1) * u).norm(dim=1)
    assert float((found - la.spectrum.residuals).abs().max()) < 1e-10 * float(h.trace())
    assert float(found.max()) > 1e-12 * float(h.trace())


def test_a_restart_of_the_basis_finds_the_same(monkeypatch):
    monkeypatch.setattr("laplace.structures.lowrank._BLOCKS", 3)
    values, expected = oracle.top_eigenpairs(dense("ggn"), 5)
    la = fit("lowrank", rank=5)
    assert la.spectrum.passes > 3
    assert_close(la.spectrum.eigenvalues, values)
    assert_close(la.H, expected, 1e-6)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("network", ZOO)
def test_full_rank_is_full(network, task):
    model, x, y, names = build(network, task)
    _, h = oracle.curvature_all(model, names, x, y, task)
    la = Laplace(model, task, "all", "lowrank", rank=len(h), memory_budget=2**25).fit(cut(x, y, [5, 2, 4]))
    assert_close(la.H, h, 1e-8)
    assert la.spectrum.passes == 1
    full = Laplace(model, task, "all", "full").fit(cut(x, y, [5, 2, 4]))
    assert_close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), 1e-8)
    for mine, others in zip(la(x), full(x), strict=True):
        assert_close(mine, others, 1e-8)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_full_rank_of_a_last_layer_is_full(task):
    model, x, y = make("conv", task)
    size = 19 * {"classification": 3, "regression": 2}[task]
    la = Laplace(model, task, hessian_structure="lowrank", rank=size).fit(cut(x, y, 6))
    assert_close(la.H, Laplace(model, task, hessian_structure="full").fit(cut(x, y, 6)).H, 1e-8)


def test_a_wide_last_layer_is_found_by_products():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 7)).double()
    x, y = 3 * torch.randn(50, 5, dtype=torch.float64), labels("classification", 50, 7)
    full, la = (
        Laplace(model, "classification", hessian_structure=s, **o).fit(cut(x, y, 20))
        for s, o in (("full", {}), ("lowrank", {"rank": 8}))
    )
    assert la.spectrum.passes > 1
    assert_close(la.H, oracle.top_eigenpairs(full.H, 8)[1], 1e-6)
    assert la.spectrum.trace == pytest.approx(float(full.H.trace()), rel=1e-10)


@pytest.mark.parametrize("curvature", ["ggn", "sketch"])
def test_the_posterior_does_not_depend_on_batches_and_is_the_same_again(curvature):
    once, again, other = fit("lowrank", curvature), fit("lowrank", curvature), fit("lowrank", curvature, [7, 1, 20])
    assert_close(again.H, once.H, 1e-12)  # vectors go back at once or one by one, whichever the clock prefers
    assert_close(other.H, once.H, 1e-9)


def test_equal_eigenvalues_are_kept_together():
    model, x, y = make("mlp", "regression")  # two outputs: every eigenvalue of the last layer is there twice
    la = Laplace(model, "regression", hessian_structure="lowrank", rank=3).fit(cut(x, y, 6))
    other = Laplace(model, "regression", hessian_structure="lowrank", rank=3).fit(cut(x, y, 5))
    assert len(la.spectrum.eigenvalues) == 4
    assert_close(la.H, other.H, 1e-10)


@pytest.mark.filterwarnings(WARNING)
def test_negative_eigenvalues_of_a_hessian_are_dropped_and_said_once():
    model, x, y, _ = build("residual", "regression")
    h = Laplace(model, "regression", "all", "full", curvature="hessian", prior_precision=1e4).fit(cut(x, y, 6)).H
    values = torch.linalg.eigvalsh(h)
    negative = int((values < -1e-9 * values[-1]).sum())
    la = Laplace(model, "regression", "all", "lowrank", curvature="hessian", tol=1e-9)
    with pytest.warns(LaplaceWarning, match=rf"dropped {negative} negative eigenvalues.*lowest {float(values[0]):.3g}"):
        la.fit(cut(x, y, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.fit(cut(x, y, 6))
    assert la.spectrum.negative == negative > 0
    assert la.spectrum.lowest == pytest.approx(float(values[0]))
    assert f"{negative} dropped" in repr(la.spectrum)
    vectors = torch.linalg.eigh(h)[1]
    assert_close(la.H, (vectors * values.clamp(min=0)) @ vectors.T, 1e-8)
    assert la(x)[1].isfinite().all()


@pytest.mark.filterwarnings(WARNING)
def test_a_hessian_is_found_by_products_alone(monkeypatch):
    h = dense("hessian")
    monkeypatch.setattr("laplace.backprop.hessian.LIMIT", 0)
    la = fit("lowrank", "hessian", rank=6)
    values, expected = oracle.top_eigenpairs(h, 6)
    assert_close(la.spectrum.eigenvalues, values, 1e-8)
    assert_close(la.H, expected, 1e-5)
    assert la.spectrum.negative > 0
    assert float(torch.linalg.eigvalsh(h)[0]) <= la.spectrum.lowest < 0
    assert la.spectrum.trace is la.spectrum.share is None


def test_what_has_not_converged_is_said(monkeypatch):
    monkeypatch.setattr("laplace.structures.lowrank.MOST_PASSES", 2)
    with pytest.warns(LaplaceWarning, match=r"not converged after 2 runs over the data: \|H u - l u\| is up to"):
        la = fit("lowrank")
    assert la.spectrum.passes == 2


def test_the_spectrum_reads_well():
    la = fit("lowrank", rank=5)
    values = la.spectrum.eigenvalues
    text = repr(la.spectrum)
    assert f"5, from {float(values[0]):.4g} to {float(values[-1]):.4g}" in text
    assert f"{la.spectrum.share:.1%} are kept" in text
    assert "lowrank 5" in repr(la.coverage())
    with pytest.raises(UnsupportedError, match=r"kron keeps no eigenvalues.*hessian_structure='lowrank'"):
        _ = fit("kron").spectrum


def test_a_network_in_single_precision_finds_nearly_the_same():
    model, x, y = problem()
    la = Laplace(copy.deepcopy(model).float(), "classification", "all", "lowrank").fit(cut(x.float(), y, 16))
    assert la.H.dtype == torch.float32
    assert la.spectrum.passes < 10
    assert_close(la.H.double(), oracle.top_eigenpairs(dense("ggn"), 20)[1], 1e-4)
    assert_close(la.spectrum.eigenvalues, oracle.top_eigenpairs(dense("ggn"), 20)[0], 1e-5)


@pytest.mark.parametrize("groups", ["scalar", "layerwise", "diag"])
def test_tuning_by_evidence_finds_a_stationary_point(groups):
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression", hessian_structure="lowrank", rank=6).fit(cut(x, y, 6))
    la.optimize_prior_precision(prior_structure=groups)
    x_log = la.prior_precision.log().requires_grad_()
    (slope,) = torch.autograd.grad(la.log_marginal_likelihood(x_log.exp()), x_log)
    inside = x_log.detach().abs() < 18
    assert inside.any()
    assert float((slope * inside).abs().max()) < 1e-3


def test_a_round_trip_through_a_file_is_exact(tmp_path):
    la, (model, x, _) = fit("lowrank", rank=5), problem()
    torch.save(la.state_dict(), tmp_path / "la.pt")
    state = torch.load(tmp_path / "la.pt", weights_only=True)
    again = Laplace(model, "classification", "all", "lowrank", rank=5)
    again.load_state_dict(state)
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    assert torch.equal(again(x), la(x))
    assert repr(again.spectrum) == repr(la.spectrum)
    with pytest.raises(InputError, match="structure='lowrank, rank=5', this object has 'lowrank, rank=6'"):
        Laplace(model, "classification", "all", "lowrank", rank=6).load_state_dict(state)


def test_what_cannot_be_is_refused_with_what_can():
    model, x, y = problem()
    batches = cut(x, y, 16)
    with pytest.raises(OptionError, match="rank=600 is more than the 553 uncertain weights"):
        Laplace(model, "classification", "all", "lowrank", rank=600).fit(batches)
    with pytest.raises(InputError, match=r"'lowrank' reads the data 2 times or more, and a list_iterator can be read"):
        Laplace(model, "classification", "all", "lowrank").fit(iter(batches))
    with pytest.raises(MemoryBudgetError, match=r"hessian_structure='lowrank' of 553 weights needs"):
        Laplace(model, "classification", "all", "lowrank", memory_budget=10**5).fit(batches)


def test_a_precision_per_weight_of_many_is_not_tuned():
    la = fit("lowrank", rank=5, memory_budget=4 * 10**6)
    with pytest.raises(MemoryBudgetError, match=r"each of 553 weights.*9\.79 MB.*4 MB are allowed.*'layerwise'"):
        la.optimize_prior_precision(prior_structure="diag")


def test_a_tolerance_that_keeps_more_than_fits_is_refused():
    model, *_ = problem()
    torch.manual_seed(1)
    x, y = torch.randn(300, 1, 8, 8, dtype=torch.float64), labels("classification", 300, 3)
    large, small = (
        Laplace(model, "classification", "all", "lowrank", tol=tol, memory_budget=5 * 10**6) for tol in (0.1, 1e-9)
    )
    assert len(large.fit(cut(x, y, 300)).spectrum.eigenvalues) < 20
    with pytest.raises(MemoryBudgetError, match=r"with \d+ eigenpairs of 553 weights so far.*larger tol="):
        small.fit(cut(x, y, 300))


def test_a_spectrum_without_curvature_is_readable():
    model = nn.Linear(3, 2).double()
    x = torch.zeros(4, 3, dtype=torch.float64)
    la = Laplace(model, "regression", lambda name, p: name == "weight", "lowrank", rank=2)
    la.fit([(x, torch.randn(4, 2, dtype=torch.float64))])
    assert "trace" in repr(la.spectrum)


@pytest.mark.parametrize("structure", ["lowrank", "inf"])
def test_variances_are_not_negative_in_float32(structure):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(500, 3)
    la = Laplace(model, "regression", "all", structure, prior_precision=1e-7).fit([(x, torch.randn(500, 2))])
    assert float(la(x, diagonal_output=True)[1].min()) >= 0
