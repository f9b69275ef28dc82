"""Small priors under float32 networks: within a percent of float64, or warned of; and classes that are sure."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import LaplaceWarning
from laplace.linalg.symmetric import clip

PRIORS = (1e2, 1.0, 1e-3, 1e-5, 1e-8)
STRUCTURES = ["diag", "kron", "ekfac", "inf", "block", "full", "lowrank", "gp", "nystrom", "variational"]
CLOSE = 0.01  # of every variance, and of the evidence's terms


def fitted(
    widths: tuple[int, int, int], n: int, dtype: torch.dtype, structure: str, subset: str, task: str, **options: object
) -> tuple[Laplace, Tensor]:
    torch.manual_seed(0)
    i, hidden, o = widths
    model = nn.Sequential(nn.Linear(i, hidden), nn.Tanh(), nn.Linear(hidden, o)).to(dtype)
    x = torch.randn(n, i).to(dtype)
    y: Tensor = torch.arange(n) % o
    if task == "regression":
        y = nn.functional.one_hot(y, o).to(dtype)
    la = Laplace(model, task, subset, structure, **options)
    return la.fit([(x[s : s + 64], y[s : s + 64]) for s in range(0, n, 64)]), x


def furthest(single: Laplace, double: Laplace, x: Tensor) -> float:
    """The largest difference of a variance relative to itself, or of the evidence relative to its terms."""
    at = torch.cat([x[:10], 3 * x[:10].roll(1, 1)])
    pairs = [(single.predict(at.float()).outputs.variance, double.predict(at).outputs.variance)]
    if not double.structure.functional:
        pairs.append((single.posterior_variance, double.posterior_variance))
    terms = double.scatter + double.posterior.log_det_ratio.abs() + double.log_likelihood.abs() + 1
    evidence = (single.log_marginal_likelihood() - double.log_marginal_likelihood()).abs() / terms
    return max(float(evidence), *(float(((a - b).abs() / b).max()) for a, b in pairs))


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_variances_and_evidence_are_those_of_float64_at_every_prior(structure, subset, task):
    """3-20-3: narrow factors, with spectra that fall far below the rounding of float32."""
    options: dict[str, object] = {"rank": 63 if subset == "last_layer" else 120} if structure == "lowrank" else {}
    if structure == "nystrom":  # of regression's last layer, rank 10 is in the midst of eigenvalues that are equal
        structure, options = "gp", {"functional_approximation": "nystrom", "n_subset": 50, "rank": 10}
    if structure == "variational":
        structure, options = "gp", {"functional_approximation": "variational", "n_subset": 6}
    single, double = (
        fitted((3, 20, 3), 300, dtype, structure, subset, task, **options) for dtype in (torch.float32, torch.float64)
    )
    for prior in PRIORS:
        single[0].prior_precision = double[0].prior_precision = prior
        assert furthest(single[0], double[0], double[1]) <= CLOSE, prior


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_a_prior_near_the_rounding_of_wide_factors_is_warned_of(structure):
    """3-120-3: products of more than 64 columns are in float32."""
    single, _ = fitted((3, 120, 3), 600, torch.float32, structure, "all", "regression")
    double, x = fitted((3, 120, 3), 600, torch.float64, structure, "all", "regression")
    for la in (single, double):
        la.prior_precision = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", LaplaceWarning)
        assert furthest(single, double, x) <= CLOSE
        double.prior_precision = 1e-6
        double.log_marginal_likelihood()
    single.prior_precision = 1e-6
    with pytest.warns(LaplaceWarning, match=r"products in float32, .* fit with model\.double\(\)"):
        assert furthest(single, double, x) > CLOSE
    with warnings.catch_warnings():
        warnings.simplefilter("error", LaplaceWarning)  # once
        single(x.float())


@pytest.mark.parametrize("structure", ["full", "block"])
def test_sure_classes_leave_no_eigenvalues_below_rounding(structure):
    """diag(p) - p p^T is a small difference of large numbers where a class is sure; no warning says float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 8)).double()
    with torch.no_grad():
        model[2].weight.mul_(30)
    x, y = torch.randn(1000, 5).double() + 10, torch.arange(1000) % 8
    la = Laplace(model, "classification", "last_layer", structure).fit([(x, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", LaplaceWarning)
        assert la.clipped.lowest >= -1e-14
    p, phi = model(x).softmax(1).detach(), torch.tanh(model[0](x)).detach()
    off = -torch.einsum("nc,nd,ni,nj->cidj", p, p, phi, phi)
    for c in range(8):
        off[c, :, c] = 0
    for c in range(8):
        off[c, :, c] = -off[c].sum(1)
    expected = off.reshape(80, 80)
    found = la.posterior.fit.sums["H" if structure == "full" else f"{la.posterior.fit.layout.names[0]}/H"][:80, :80]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13 * float(expected.abs().max()))


def test_a_float64_network_is_not_told_to_become_one():
    with pytest.warns(LaplaceWarning, match="more than rounding in torch.float64") as caught:
        clip(torch.tensor([-1e-6, 1.0]).double(), torch.float64)
    assert "double" not in str(caught[0].message)
    with pytest.warns(LaplaceWarning, match=r"fit with model\.double\(\)"):
        clip(torch.tensor([-1e-2, 1.0]), torch.float32)
