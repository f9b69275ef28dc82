"""Block-diagonal structures against the oracle's exact blocks: block, ekfac, inf."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import oracle
from laplace import Laplace
from laplace.budget import in_bytes
from laplace.errors import InputError, LaplaceWarning, MemoryBudgetError, OptionError, UnsupportedError
from networks import cut, make
from zoo import build

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")
NETWORKS = ["mlp", "conv", "residual", "tied"]
SHARINGS = ["expand", "reduce"]


def seeded():
    return torch.Generator().manual_seed(4)


def fit(network, structure, task="classification", curvature="ggn", sizes=(5, 1, 9), **options):
    model, x, y, names = build(network, task)
    la = Laplace(model, task, "all", structure, curvature=curvature, **options)
    return la.fit(cut(x, y, list(sizes)), generator=seeded()), model, x, y, names


def split(h, sizes):
    """The diagonal blocks of a matrix."""
    return [rows.split(list(sizes), 1)[i] for i, rows in enumerate(h.split(list(sizes)))]


def blocks(la):
    """Name, shape, sums and curvature of every tensor."""
    layout, sums = la.posterior.fit.layout, la.posterior.fit.sums
    own = [{k.rpartition("/")[2]: v for k, v in sums.items() if k.rpartition("/")[0] == n} for n in layout.names]
    matrices = [block.matrix() for block in la.posterior.fit.curvature.blocks]
    return list(zip(layout.names, layout.shapes, own, matrices, strict=True))


def basis(sums):
    """Q_B (x) Q_A of all groups, dense."""
    return torch.block_diag(*[torch.kron(b, a) for b, a in zip(sums["left"], sums["right"], strict=True)])


def close(a, b, tolerance=1e-9):
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tolerance * max(float(b.abs().max()), 1e-20)


# ---- block ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ["ggn", "ef"])
@pytest.mark.parametrize("network", NETWORKS)
def test_blocks_are_those_of_the_full_curvature(network, curvature):
    la, model, x, y, names = fit(network, "block", curvature=curvature)
    _, h = oracle.curvature_all(model, names, x, y, "classification", curvature)
    expected = split(h, la.posterior.fit.layout.sizes)
    for (_, shape, _, matrix), block in zip(blocks(la), expected, strict=True):
        assert len(matrix) == torch.Size(shape).numel()
        if float(block.abs().max()) > 1e-25:  # a bias before a normalisation has none
            close(matrix, block, 1e-7)
    assert {row.kept for row in la.coverage()} == {f"dense {size}" for size in la.posterior.fit.layout.sizes}


def test_the_exact_hessian_has_blocks():
    model, x, y, _ = build("mlp", "regression")
    la = Laplace(model, "regression", "all", "block", curvature="hessian", prior_precision=50.0).fit(cut(x, y, 5))
    full = Laplace(model, "regression", "all", "full", curvature="hessian").fit(cut(x, y, 4))
    sizes = la.posterior.fit.layout.sizes
    close(la.H.to_matrix(), torch.block_diag(*split(full.H, sizes)))
    assert float(torch.linalg.eigvalsh(la.H.to_matrix()).min()) < -1e-3  # no sum of squares


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_blocks_that_cannot_fit_are_refused_with_the_bytes(subset):
    model = nn.Sequential(nn.Linear(20, 3000), nn.ReLU(), nn.Linear(3000, 3))
    sizes = [9000, 3] if subset == "last_layer" else [60_000, 3000, 9000, 3]
    la = Laplace(model, "classification", subset, "block", memory_budget=10**9)
    with pytest.raises(MemoryBudgetError) as error:
        la.fit([(torch.randn(8, 20), torch.arange(8) % 3)])
    assert in_bytes(24 * sum(size**2 for size in sizes)) in str(error.value)
    assert "hessian_structure='block'" in str(error.value)
    assert "'ekfac' (" in str(error.value)


# ---- ekfac ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("network", NETWORKS)
def test_ekfac_is_the_exact_blocks_diagonal_in_the_eigenbasis_of_kron(network, sharing):
    la, model, x, y, names = fit(network, "ekfac", weight_sharing=sharing)
    lam, h = oracle.curvature_all(model, names, x, y, "classification")
    krons = oracle.kron_all(model, names, x, lam, sharing)
    eigenbases = 0
    for (name, _, sums, matrix), exact in zip(blocks(la), split(h, la.posterior.fit.layout.sizes), strict=True):
        if float(exact.abs().max()) < 1e-25:
            continue
        if "E" not in sums:  # no Kronecker form: dense
            close(matrix, exact, 1e-7)
            continue
        q = basis(sums)
        turned = q.T @ krons[name] @ q
        close(turned, turned.diagonal().diag(), 1e-6)
        close(matrix, oracle.in_basis(exact, q), 1e-7)
        close(matrix.trace(), exact.trace(), 1e-7)
        distances = [float((m - exact).norm()) for m in (matrix, krons[name])]
        assert distances[0] <= distances[1] + 1e-7 * float(exact.norm())
        eigenbases += 1
    assert eigenbases >= 3


def test_ekfac_is_nearer_to_the_exact_block_than_kron_where_these_differ():
    la, model, x, y, names = fit("conv", "ekfac")
    lam, h = oracle.curvature_all(model, names, x, y, "classification")
    start = la.posterior.fit.layout.sizes[0]
    name, _, _, matrix = blocks(la)[1]
    assert name == "b.weight"
    exact = h[start : start + len(matrix), start : start + len(matrix)]
    kron = oracle.kron_all(model, names, x, lam)[name]
    assert float((matrix - exact).norm()) < 0.9 * float((kron - exact).norm())


@pytest.mark.parametrize("curvature", ["mc", "sketch"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_the_same_vectors_are_drawn_in_both_runs(subset, curvature):
    model, x, y, _ = build("mlp", "classification")
    options = {"curvature": curvature, "curvature_samples": 2}
    fits = [
        Laplace(model, "classification", subset, s, **options).fit(cut(x, y, 4), generator=seeded())
        for s in ("ekfac", "block")
    ]
    for (*_, ekfac), (*_, exact) in zip(*map(blocks, fits), strict=True):
        close(ekfac.trace(), exact.trace())


@pytest.mark.parametrize("curvature", ["ggn", "mc"])
@pytest.mark.parametrize("structure", ["ekfac", "inf"])
def test_the_second_run_does_not_depend_on_how_the_data_is_cut(structure, curvature):
    whole, *_ = fit("conv", structure, curvature=curvature, sizes=(11,))
    for sizes in ((1,), (4, 3)):
        parts, *_ = fit("conv", structure, curvature=curvature, sizes=sizes)
        close(parts.H.to_matrix(), whole.H.to_matrix(), 1e-7)


@pytest.mark.parametrize("structure", ["ekfac", "inf"])
def test_data_that_can_be_read_once_is_refused(structure):
    model, x, y, _ = build("mlp", "classification")
    la = Laplace(model, "classification", "all", structure)
    for once in (iter(cut(x, y, 4)), (batch for batch in cut(x, y, 4))):
        with pytest.raises(InputError, match=rf"'{structure}' reads the data 2 times.*DataLoader or a list"):
            la.fit(once)
    assert not la.is_fitted


@pytest.mark.parametrize("structure", ["ekfac", "inf"])
def test_data_that_differs_when_read_again_is_refused(structure):
    model, x, y, _ = build("mlp", "classification")

    class Shrinking:
        n = 11

        def __iter__(self):
            self.n -= 1
            yield from cut(x[: self.n], y[: self.n], 4)

    la = Laplace(model, "classification", "all", structure)
    with pytest.raises(InputError, match="10 examples at first and 9 when read again"):
        la.fit(Shrinking())
    assert not la.is_fitted


@pytest.mark.parametrize("structure", ["block", "ekfac", "inf"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_a_round_trip_gives_the_same_bits(structure, subset, monkeypatch):
    model, x, y, _ = build("residual", "classification")
    options = {"rank": 3} if structure == "inf" else {}
    la = Laplace(model, "classification", subset, structure, **options).fit(cut(x, y, 4))
    if structure != "block":  # eigenvectors may differ elsewhere: these are in the state
        monkeypatch.setattr("laplace.structures.dealing.eigh", None)
    other = Laplace(model, "classification", subset, structure, **options)
    other.load_state_dict(la.state_dict())
    assert torch.equal(other(x), la(x))
    assert torch.equal(other.predict(x).outputs.covariance, la.predict(x).outputs.covariance)
    assert torch.equal(other.sample(3, generator=seeded()), la.sample(3, generator=seeded()))
    assert torch.equal(other.log_marginal_likelihood(), la.log_marginal_likelihood())
    assert repr(other.coverage()).splitlines()[0] == repr(la.coverage()).splitlines()[0]


@pytest.mark.parametrize("structure", ["ekfac", "inf"])
def test_float32_is_close_to_float64_for_confident_classes(structure):
    """Curvature along the direction that softmax does not see is zero, and must not be rounded to more."""
    model, x, y = make("mlp", "classification", n=200)
    with torch.no_grad():
        model[2].weight.mul_(20)
    variances, logdets = [], []
    for dtype in (torch.float64, torch.float32):
        la = Laplace(model.to(dtype), "classification", hessian_structure=structure, prior_precision=1e-2)
        la.fit(cut(x.to(dtype), y, 50))
        variances.append(la.predict(x.to(dtype)).outputs.variance.double())
        logdets.append(la.log_det_posterior_precision)
    torch.testing.assert_close(logdets[1], logdets[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(variances[1], variances[0], rtol=1e-2, atol=0)


def test_tensors_without_a_kronecker_form_are_warned_of():
    model, x, y, _ = build("residual", "classification")
    for structure in ("ekfac", "inf"):
        with pytest.warns(
            LaplaceWarning, match=rf"{structure} keeps 6 of 14 tensors in another form.*bn.weight \(dense 4\)"
        ):
            Laplace(model, "classification", "all", structure).fit(cut(x, y, 5))


# ---- inf -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3, 10])
@pytest.mark.parametrize("network", NETWORKS)
def test_inf_is_the_largest_eigenpairs_and_the_exact_diagonal(network, rank):
    la, model, x, y, names = fit(network, "inf", rank=rank)
    ekfac, *_ = fit(network, "ekfac")
    _, h = oracle.curvature_all(model, names, x, y, "classification")
    exacts = split(h, la.posterior.fit.layout.sizes)
    for (_, _, sums, matrix), (_, _, of_ekfac, _), exact in zip(blocks(la), blocks(ekfac), exacts, strict=True):
        if float(exact.abs().max()) < 1e-25:
            continue
        close(matrix.diagonal(), exact.diagonal(), 1e-7)
        assert float(torch.linalg.eigvalsh(matrix).min()) > -1e-10 * float(matrix.diagonal().max())
        if "values" in sums:
            k = len(sums["values"])
            assert k <= rank
            close(matrix, oracle.low_rank_plus_diagonal(exact, basis(of_ekfac), k), 1e-6)
    shrinks = [b.columns.shrink for b in la.posterior.fit.curvature.blocks if hasattr(b, "columns")]
    assert min(float(r.min()) for r in shrinks) < 0.999  # rows are shrunk somewhere,
    assert max(float(r.max()) for r in shrinks) == 1.0  # not everywhere


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
def test_a_share_of_the_trace_takes_as_few_eigenpairs_as_it_needs(share):
    la, *_ = fit("conv", "inf", rank=share)
    ekfac, *_ = fit("conv", "ekfac")
    for (_, _, sums, _), (_, _, of_ekfac, _) in zip(blocks(la), blocks(ekfac), strict=True):
        e, kept = of_ekfac["E"].sum(), sums["values"]
        assert float(kept.sum()) >= share * float(e) * (1 - 1e-12)
        assert float(kept[:-1].sum()) < share * float(e) or share == 1.0
        close(kept, of_ekfac["E"].flatten().sort(descending=True).values[: len(kept)])


def test_coverage_says_what_is_kept():
    kept = {
        s: [row.kept for row in fit("conv", s, **o)[0].coverage()] for s, o in (("ekfac", {}), ("inf", {"rank": 5}))
    }
    assert kept["ekfac"] == ["ekfac 4 x 18", "2 groups of ekfac 3 x 12", "ekfac 6 x 1", "ekfac 3 x 6",
                             "ekfac 3 x 3", "ekfac 3 x 1"]  # fmt: skip
    assert kept["inf"][:2] == ["inf, rank 5", "inf, rank 5"]
    assert kept["inf"][-1] == "inf, rank 3"


@pytest.mark.parametrize("bad", [0, -1, 0.0, -0.5, 1.5, float("nan"), True, "10", None.__class__])
def test_a_rank_is_a_number_of_eigenpairs_or_a_share(bad):
    with pytest.raises(OptionError, match=r"rank=.*whole number of at least 1.*float above 0 and up to 1\.0"):
        Laplace(build("mlp", "classification")[0], "classification", hessian_structure="inf", rank=bad)


def test_a_rank_beyond_every_block_is_refused_with_the_largest():
    model, x, y, _ = build("mlp", "classification")
    la = Laplace(model, "classification", "all", "inf", rank=31)
    with pytest.raises(OptionError, match=r"rank=31 .*largest is '2\.weight' with 30.*rank=0\.95"):
        la.fit(cut(x, y, 4))
    Laplace(model, "classification", "all", "inf", rank=30).fit(cut(x, y, 4))
    Laplace(model, "classification", "all", "inf").fit(cut(x, y, 4))  # the default is never too large


@pytest.mark.parametrize("structure", ["full", "diag", "block", "ekfac"])
def test_a_rank_for_another_structure_is_refused(structure):
    with pytest.raises(OptionError, match=r"rank=5 belongs to hessian_structure=.*'inf'"):
        Laplace(build("mlp", "classification")[0], "classification", hessian_structure=structure, rank=5)


def test_another_rank_does_not_load():
    model, x, y, _ = build("mlp", "classification")
    la = Laplace(model, "classification", "all", "inf", rank=3).fit(cut(x, y, 4))
    with pytest.raises(InputError, match=r"rank=3.*rank=4"):
        Laplace(model, "classification", "all", "inf", rank=4).load_state_dict(la.state_dict())


def test_a_share_that_cannot_fit_the_users_budget_is_refused():
    model, x, y, _ = build("mlp", "classification")
    with pytest.raises(MemoryBudgetError, match=r"rank=1\.0 keeps \d+ of \d+ eigenpairs of '.*weight'.*smaller rank="):
        Laplace(model, "classification", "all", "inf", rank=1.0, memory_budget=10_000).fit(cut(x, y, 4))


@pytest.mark.parametrize("structure", ["block", "inf"])
def test_tuning_each_weight_is_refused_where_it_cannot_fit_the_users_budget(structure):
    model, x, y, _ = build("mlp", "classification")
    la = Laplace(model, "classification", "all", structure, memory_budget=10**5).fit(cut(x, y, 4))
    with pytest.raises(
        MemoryBudgetError, match=r"prior precision for each of 83 weights.*100 kB are allowed.*'layerwise'"
    ):
        la.optimize_prior_precision(prior_structure="diag")


def test_per_weight_priors_are_refused_by_ekfac():
    model, x, y, _ = build("mlp", "classification")
    la = Laplace(model, "classification", "all", "ekfac").fit(cut(x, y, 4))
    with pytest.raises(OptionError, match="per weight"):
        la.prior_precision = torch.ones(la.n_params)
    with pytest.raises(UnsupportedError, match="no form for prior_structure='diag'"):
        la.optimize_prior_precision(prior_structure="diag")


@pytest.mark.parametrize("chunk", [1, 7, 200])
def test_inf_does_not_depend_on_its_pieces(chunk, monkeypatch):
    la, _, x, *_ = fit("conv", "inf", "regression", rank=7)
    asked = [lambda: la(x), lambda: la.sample(3, generator=seeded()), lambda: la.posterior_variance,
             lambda: la.log_marginal_likelihood(), lambda: la(x, joint=True)]  # fmt: skip
    expected = [ask() for ask in asked]
    monkeypatch.setattr("laplace.structures.inf._CHUNK", chunk)
    la.prior_precision = 1.0
    for ask, value in zip(asked, expected, strict=True):
        torch.testing.assert_close(ask(), value)


@pytest.mark.slow
def test_a_large_layer_fits_samples_and_predicts_in_a_gigabyte():
    program = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from laplace import Laplace
from peak import peak
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 1000), torch.nn.ReLU(),
                            torch.nn.Linear(1000, 10))
x, y = torch.randn(256, 20), torch.arange(256) % 10
la = Laplace(model, "classification", "all", "inf", rank=100).fit([(x[:128], y[:128]), (x[128:], y[128:])])
numbers = [la.log_marginal_likelihood(), la.sample(5), la.predict(x[:64]).outputs.covariance, la.posterior_variance]
assert all(n.isfinite().all() for n in numbers)
print(peak())
"""
    run = [sys.executable, "-c", program, *sys.path]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert 1024 * int(done.stdout) < 1e9
