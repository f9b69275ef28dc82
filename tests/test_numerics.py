"""Ill-conditioned problems in float32 and in float64, eigenvalues below zero, and numbers that are none."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import oracle
from laplace import Laplace
from laplace.errors import InputError, LaplaceError, LaplaceWarning, NumericalError, OptionError
from laplace.linalg.symmetric import Clipped, cholesky, clip
from laplace.predictive.outputs import OutputGaussian, lower_root
from networks import cut
from traps import Net

HIDDEN = 6
QUICK, SLOW = ["full", "kron", "diag", "lowrank"], ["block", "ekfac", "inf", "gp"]
CASES = list(itertools.product(["last_layer", "all"], ["classification", "regression"]))
SHOWN = ("evidence", "outputs", "weights", "probabilities")


class Scaled(nn.Module):
    """A network with features of very different sizes, whose outputs are of size 1 all the same."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 3)
        self.register_buffer("sizes", 10 ** torch.linspace(-spread / 4, spread / 4, HIDDEN))
        with torch.no_grad():
            self.body.weight.div_(self.sizes)
            self.head.weight.div_(self.sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)) * self.sizes)


def _conditioned(spread: float) -> tuple[nn.Module, Tensor]:
    """Gram matrices of inputs and of features with condition numbers of about 10^spread."""
    model = Scaled(spread)
    return model, torch.randn(20, HIDDEN) * model.sizes


def _plain(n: int = 20, hidden: int = HIDDEN) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(HIDDEN, hidden), nn.Tanh(), nn.Linear(hidden, 3)), torch.randn(n, HIDDEN)


def _dead() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3))
    with torch.no_grad():
        model[0].bias[:3] = -100.0
    return model, torch.randn(20, HIDDEN)


def _duplicated() -> tuple[nn.Module, Tensor]:
    model, x = _plain()
    with torch.no_grad():
        model[0].weight[3:] = model[0].weight[:3]
        model[0].bias[3:] = model[0].bias[:3]
    return model, x[:, :3].repeat(1, 2)


def _constant() -> tuple[nn.Module, Tensor]:
    model, x = _plain()
    return model, x[:1].expand(20, -1).contiguous()


# Each problem with its prior precision and with the bounds of the float32 posterior's distance from the float64 one:
# of the log evidence relative to its terms, of the outputs' variances and of the weights' relative to the largest, of
# probabilities. They are ten times what was measured; docs/numerics.md has the table.
PROBLEMS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], float, tuple[float, float, float, float]]] = {
    "condition 1e4": (lambda: _conditioned(4), 1.0, (2e-7, 1e-5, 5e-6, 2e-6)),
    "condition 1e8": (lambda: _conditioned(8), 1.0, (4e-8, 5e-5, 2e-5, 2e-6)),
    "condition 1e12": (lambda: _conditioned(12), 1.0, (4e-10, 2e-4, 5e-6, 2e-6)),
    "dead units": (_dead, 1.0, (2e-7, 3e-6, 3e-6, 2e-6)),
    "duplicated features": (_duplicated, 1.0, (2e-7, 4e-6, 4e-6, 2e-6)),
    "one example": (lambda: _plain(1), 1.0, (3e-7, 2e-6, 3e-6, 8e-7)),
    "one class": (_plain, 1.0, (3e-7, 9e-6, 6e-6, 2e-6)),
    "fewer examples than weights": (lambda: _plain(3), 1.0, (4e-7, 3e-6, 3e-6, 2e-6)),
    "prior 1e8": (_plain, 1e8, (8e-14, 3e-6, 3e-6, 2e-6)),
    "prior 1e-8": (_plain, 1e-8, (2e-7, 3e-5, 4e-5, 1e-5)),
    "many weights, prior 1e-8": (lambda: _plain(20, 50), 1e-8, (1e-6, 4e-5, 4e-5, 1e-5)),
    "wide, prior 1e-8": (lambda: _plain(20, 300), 1e-8, (5e-5, 3e-4, 3e-4, 4e-5)),
    "constant inputs": (_constant, 1.0, (1e-6, 5e-6, 2e-5, 2e-6)),
}

NAMES = [pytest.param(name, marks=pytest.mark.slow) if name.startswith("wide") else name for name in PROBLEMS]


def problem(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return PROBLEMS[name][0]()


def fitted(name: str, dtype: torch.dtype, structure: str, subset: str, task: str) -> tuple[Laplace, Tensor, Tensor]:
    model, x = problem(name)
    x = x.to(dtype)
    y: Tensor = torch.arange(len(x)) % (1 if name == "one class" else 3)
    if task == "regression":
        y = torch.nn.functional.one_hot(y, 3).to(dtype)
    la = Laplace(model.to(dtype), task, subset, structure, prior_precision=PROBLEMS[name][1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)
        la.fit(cut(x, y, 7))
    return la, x, y


def differences(name: str, structure: str, subset: str, task: str) -> list[float]:
    """How far the float32 posterior is from the float64 one: evidence, outputs, weights, probabilities."""
    single, _, _ = fitted(name, torch.float32, structure, subset, task)
    double, x, _ = fitted(name, torch.float64, structure, subset, task)
    terms = double.posterior.scatter + double.posterior.log_det_ratio.abs() + double.log_likelihood.abs()
    evidence = (single.log_marginal_likelihood() - double.log_marginal_likelihood()).abs() / (terms + 1)
    at = torch.cat([x, 3 * x.roll(1, 1)])
    one, two = single.predict(at.float()), double.predict(at)
    spreads = one.outputs.variance, two.outputs.variance
    if structure == "gp":
        weights = spreads
    else:
        weights = single.posterior_variance, double.posterior_variance
    pairs = [(a - b).abs().max() / b.abs().max() for a, b in (spreads, weights)]
    p = (one.mean - two.mean).abs().max() if task == "classification" else torch.zeros(())
    out = [float(value) for value in (evidence, *pairs, p)]
    assert all(value == value for value in out)
    return out


@pytest.mark.parametrize("structures", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "others"])
@pytest.mark.parametrize("name", NAMES)
def test_float32_stays_near_float64(name, structures):
    bounds = PROBLEMS[name][2]
    found = {(s, *case): differences(name, s, *case) for s in structures for case in CASES}
    worst = [max(column) for column in zip(*found.values(), strict=True)]
    print(f"| {name} | " + " | ".join(f"{value:.1e}" for value in worst) + " |")  # noqa: T201
    for case, values in found.items():
        for value, bound, what in zip(values, bounds, SHOWN, strict=True):
            assert value <= bound, (case, what, value)


@pytest.mark.parametrize(("subset", "task"), CASES)
@pytest.mark.parametrize("name", NAMES)
def test_float64_is_the_oracles(name, subset, task):
    for structure in ("full", "diag"):
        la, x, y = fitted(name, torch.float64, structure, subset, task)
        names = list(la.posterior.fit.layout.names)
        _, h = oracle.curvature_all(la.model, names, x, y, task)
        h = h.diagonal().diag() if structure == "diag" else h
        delta = la.prior_precision_diag
        values = torch.linalg.eigvalsh(h).clamp(min=0) + PROBLEMS[name][1]
        loglik = torch.stack([oracle.log_prob(task, f, b) for f, b in zip(la.model(x).detach(), y, strict=True)]).sum()
        scatter = (la.mean.square() * delta).sum()
        ratio = values.log().sum() - delta.log().sum()
        size = float(loglik.abs() + scatter + ratio.abs())
        assert abs(float(la.log_marginal_likelihood() - loglik + 0.5 * (scatter + ratio))) <= 1e-6 * size
        jac = oracle.jacobian_loop(la.model, names, x)
        expected = (jac @ torch.linalg.inv(h + delta.diag()) @ jac.mT).diagonal(dim1=1, dim2=2)
        got = la.predict(x).outputs.variance
        tolerance = 1e-2 if "prior 1e-8" in name else 1e-5  # of the oracle: its inverse loses the prior to rounding
        assert float((got - expected).abs().max()) <= tolerance * float(expected.abs().max())


# ---- eigenvalues below zero ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "kron", "block", "gp"])
def test_clipped_eigenvalues_are_counted(structure):
    la, *_ = fitted("fewer examples than weights", torch.float64, structure, "all", "regression")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipped = la.clipped
    assert 0 <= clipped.count <= la.n_params
    assert -1e-13 <= clipped.lowest <= 0
    if structure == "full":  # 63 weights, rank 9: rounding leaves some of the others below zero
        below = torch.linalg.eigh(la.posterior.curvature.h)[0] < 0
        assert clipped.count == int(below.sum()) > 0
    assert (la.posterior_variance > 0).all() if structure != "gp" else True


def test_clipping_more_than_rounding_warns():
    values, clipped = clip(torch.tensor([-1e-16, 0.0, 1.0], dtype=torch.float64), torch.float64)
    assert values.min() == 0
    assert clipped == Clipped(1, -1e-16)
    with pytest.warns(LaplaceWarning, match=r"2 eigenvalues .* below zero, the lowest -0\.5 of the largest"):
        values, clipped = clip(torch.tensor([-1.0, -0.5, 2.0]), torch.float32)
    assert values.tolist() == [0, 0, 2]
    assert clipped == Clipped(2, -0.5)
    assert Clipped(2, -0.5) + Clipped(1, -0.1) == Clipped(3, -0.5)


@pytest.mark.parametrize("structure", ["full", "diag", "block"])
def test_an_indefinite_hessian_names_its_smallest_eigenvalue_and_the_prior_that_repairs_it(structure):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), 5 * torch.randn(6, 2, dtype=torch.float64)
    la = Laplace(model, "regression", "all", structure, curvature="hessian", prior_precision=1e-3).fit([(x, y)])
    for prior in (torch.tensor(1e-3), torch.full((la.n_layers,), 1e-3)):
        la.prior_precision = prior
        with pytest.raises(NumericalError, match="not positive definite: its smallest eigenvalue is -") as raised:
            la(x)
        assert "no evidence: the posterior precision is not positive definite" in " ".join(repr(la).split())
        said = re.search(r"smallest eigenvalue is (\S+), .*prior precision by (\S+) or more", str(raised.value))
        smallest, needed = float(said[1]), float(said[2])
        if structure == "full":
            exact = torch.linalg.eigvalsh(la.H + 1e-3 * torch.eye(la.n_params, dtype=torch.float64))[0]
            assert smallest == pytest.approx(float(exact), rel=1e-2)
        for _ in range(la.n_layers):  # a block-diagonal precision names one block at a time
            la.prior_precision = la.prior_precision + needed
            try:
                la.log_marginal_likelihood()
                break
            except NumericalError as error:
                assert structure != "full"
                needed = float(re.search(r"prior precision by (\S+) or more", str(error))[1])
        assert la(x)[1].isfinite().all()


def test_a_prior_lost_to_rounding_is_said():
    with pytest.raises(NumericalError, match="lost the prior to rounding"):
        cholesky(torch.tensor([[1e20, 1e20], [1e20, 1e20 - 1e5]], dtype=torch.float64))
    la, *_ = fitted("constant inputs", torch.float64, "full", "all", "regression")
    la.prior_precision = torch.full((la.n_params,), 1e-20, dtype=torch.float64)
    with pytest.raises(NumericalError, match=r"not positive definite.*Raise the prior precision by"):
        la.log_marginal_likelihood()


# ---- no NaN leaves silently ------------------------------------------------------------------------------------------

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
ASKED = {
    "call": lambda la, x: la(x),
    "predict": lambda la, x: la.predict(x),
    "nn": lambda la, x: la(x, pred_type="nn", n_samples=3),
    "samples": lambda la, x: la.functional_samples(x, n_samples=3),
    "predictive samples": lambda la, x: la.predictive_samples(x, n_samples=3),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("asked", list(ASKED))
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_input_that_is_no_number_is_named(asked, subset, bad):
    la = Laplace(nn.Sequential(nn.Linear(4, 3)), "classification", subset).fit([(X, Y)])
    x = X.clone()
    x[4, 1] = bad
    with pytest.raises(InputError, match="NaN or infinite values for 1 example, the first is number 4"):
        ASKED[asked](la, x)


def test_the_number_of_an_example_counts_all_chunks(monkeypatch):
    la = Laplace(net(), "classification", "all").fit([(X, Y)])
    monkeypatch.setattr("laplace.backprop.network.Network.chunks", lambda self, inputs, n: cut_inputs(inputs))
    x = X.clone()
    x[5] = math.nan
    with pytest.raises(InputError, match="the first is number 5"):
        la(x)


def cut_inputs(inputs):
    return (inputs.part(start, start + 2) for start in range(0, 6, 2))


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank", "gp"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_what_overflows_in_float32_is_refused(structure, subset):
    """Outputs of size 1 from features of size 1e30: their squares are infinite."""
    model = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight.mul_(1e-30)
    if structure == "gp":  # in float64
        p = Laplace(model, "classification", subset, structure).fit([(1e30 * X, Y)])(1e30 * X)
        assert p.isfinite().all()
    else:
        with pytest.raises(NumericalError, match=r"hold NaN or infinite values|out of range in torch\.float"):
            Laplace(model, "classification", subset, structure).fit([(1e30 * X, Y)])(1e30 * X)
    la = Laplace(model, "classification", subset, structure).fit([(X, Y)])
    for asked in ("call", "predict"):
        with pytest.raises(NumericalError, match="the variance of the outputs is NaN or infinite at 6 inputs"):
            ASKED[asked](la, 1e30 * X)


def test_a_derivative_that_does_not_exist_is_refused():
    model = Net(
        lambda self, x: self.fc(self.inner(x).abs().sqrt()), inner=nn.Linear(4, 4, bias=False), fc=nn.Linear(4, 3)
    )
    x = X.clone()
    x[2] = 0.0
    with pytest.raises(LaplaceError):
        Laplace(model, "classification", "all", "diag").fit([(x, Y)])
    la = Laplace(model, "classification", "all", "diag").fit([(X, Y)])
    with pytest.raises(NumericalError, match="at 1 inputs, the first is number 2"):
        la(x)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prior_precision": 1e-42}, OptionError),
        ({"prior_precision": 1e42}, OptionError),
        ({"prior_mean": 1e200}, NumericalError),
        ({"sigma_noise": 1e-30}, OptionError),
        ({"sigma_noise": 1e30}, OptionError),
        ({"temperature": 1e-60}, OptionError),
        ({"temperature": 1e60}, OptionError),
    ],
)
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_hyperparameters_out_of_range_in_float32_are_refused(options, error, structure):
    la = Laplace(net(), "regression", "all", structure, **options).fit([(X, torch.randn(6, 3))])
    with pytest.raises(error):
        la.log_marginal_likelihood()


def test_rates_that_overflow_are_refused():
    la = Laplace(nn.Sequential(nn.Linear(4, 3)), "poisson", "all", "diag").fit([(X, torch.ones(6, 3))])
    for asked in ("call", "predict", "nn"):
        with pytest.raises(NumericalError, match="NaN or infinite at"):
            ASKED[asked](la, 1e4 * X)


def test_a_nearly_singular_covariance_has_a_lower_root_and_no_negative_variance():
    v = torch.randn(5, 3, 1, generator=torch.Generator().manual_seed(0))
    singular = 1e6 * v @ v.mT - 1e-3 * torch.eye(3)
    root = lower_root(singular)
    assert (root.diagonal(dim1=1, dim2=2) > 0).all()
    assert torch.equal(root, root.tril())
    torch.testing.assert_close(root @ root.mT, singular, rtol=0, atol=10)
    outputs = OutputGaussian(torch.zeros(1, 2), torch.tensor([[-1e-9, 1.0]]))
    assert (outputs.variance >= 0).all()
