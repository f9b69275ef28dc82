"""Whatever comes: a generated posterior is the oracle's, and a generated mistake is one of our own exceptions.

Every run has a seed of its own, which is printed; pytest shows it where a test fails, and always with `-rP`. The same
cases come again with

    GENERATED_SEED=<seed> python -m pytest tests/test_generated.py

and a single failing one with the `@reproduce_failure` line that hypothesis prints.
"""

from __future__ import annotations

import collections
import copy
import math
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import networks
import oracle
import zoo
from laplace import Laplace
from laplace.errors import LaplaceError, LaplaceWarning

SEED = int(os.environ.get("GENERATED_SEED", random.SystemRandom().randrange(2**32)))
TASKS = {"classification": (2, 4), "regression": (1, 3), "binary": (1, 1), "multilabel": (1, 3), "poisson": (1, 2)}
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-2}


class Tokens(nn.Module):
    """Embedded tokens, normalised, and a scale without a layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, outputs)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.scale * self.norm(self.table(x.long() % 5)).mean(1)))


class Images(nn.Module):
    """A convolution on 4 x 4 images."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.avg_pool2d(self.conv(x.reshape(-1, 1, 4, 4)).tanh(), 2).flatten(1))


def _tiny(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))


def _linear(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, outputs))


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Tensor]]] = {
    "tiny": (_tiny, lambda n: torch.randn(n, 2)),
    "linear": (_linear, lambda n: torch.randn(n, 3)),
    "tokens": (Tokens, lambda n: torch.randint(5, (n, 3)).float()),
    "images": (Images, lambda n: torch.randn(n, 16)),
    "batchnorm": (networks.Residual, lambda n: torch.randn(n, 4)),
    "mapping": (networks.Wrapped, lambda n: torch.randn(n, 4)),
    "tied": zoo.ZOO["tied"],
    "functional": zoo.ZOO["functional"],
    "norms": zoo.ZOO["residual"],
    "recurrent": zoo.ZOO["recurrent"],
}
SMALL = ["tiny", "linear", "tokens", "images", "batchnorm", "mapping"]


@dataclass
class Case:
    """A network, its data in two orders of batches, and options; all of it follows from these few values."""

    network: str
    task: str
    outputs: int
    n: int
    cuts: tuple[list[int], list[int]]
    dtype: torch.dtype
    weighted: bool
    subset: str
    structure: str
    curvature: str
    options: dict[str, Any]
    prior: tuple[str, float]
    seed: int

    def make(self) -> tuple[nn.Module, Tensor, Tensor, Tensor | None]:
        """The network in eval mode, inputs, labels and weights."""
        torch.manual_seed(self.seed)
        build, data = NETWORKS[self.network]
        model, x = build(self.outputs), data(self.n)
        if any(isinstance(m, nn.BatchNorm1d) for m in model.modules()):
            model.train()
            model(data(8))
        y: Tensor = torch.randn(self.n, self.outputs)
        if self.task == "classification":
            y = torch.randint(self.outputs, (self.n,))
        elif self.task in ("binary", "multilabel"):
            y = torch.randint(2, (self.n, self.outputs)).float()
        elif self.task == "poisson":
            y = torch.randint(4, (self.n, self.outputs)).float()
        weights = 2 * torch.rand(self.n) + 0.1 if self.weighted else None
        y = y if self.task == "classification" else y.to(self.dtype)
        return model.eval().to(self.dtype), x.to(self.dtype), y, weights

    def given(self) -> dict[str, Any]:
        """What `Laplace` is told."""
        names = {"subset_of_weights": self.subset, "hessian_structure": self.structure}
        return names | {"curvature": self.curvature} | self.options


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    """Cases that are right, but for combinations that do not exist."""
    task = draw(st.sampled_from(["classification", "regression", *TASKS]))
    least, most = TASKS[task]
    n = draw(st.integers(1, 9))
    structure = draw(st.sampled_from(["full", "kron", "diag", "block", "lowrank", "ekfac", "inf", "gp"]))
    options: dict[str, Any] = {}
    if structure in ("kron", "ekfac", "inf") and draw(st.booleans()):
        options["weight_sharing"] = draw(st.sampled_from(["expand", "reduce"]))
    if structure == "kron":
        options["damping"] = draw(st.sampled_from([False, False, True, "balanced"]))
    if structure in ("lowrank", "inf") and draw(st.booleans()):
        options["rank"] = draw(st.integers(1, 5))
    if task == "regression":
        options["sigma_noise"] = draw(st.floats(0.1, 5.0))
    options["temperature"] = draw(st.floats(0.1, 10.0))
    options["prior_mean"] = draw(st.sampled_from([0.0, 0.0, 0.3]))
    parts = st.lists(st.integers(1, n), min_size=1, max_size=4)
    return Case(
        network=draw(st.sampled_from([*SMALL, *SMALL, *NETWORKS])),
        task=task,
        outputs=draw(st.integers(least, most)),
        n=n,
        cuts=(draw(parts), draw(parts)),
        dtype=draw(st.sampled_from([torch.float64] * 4 + [torch.float32] * 3 + [torch.bfloat16])),
        weighted=draw(st.integers(0, 4)) == 0,
        subset=draw(st.sampled_from(["last_layer", "all"])),
        structure=structure,
        curvature=draw(st.sampled_from(["ggn", "ggn", "ggn", "ef", "mc", "sketch", "hessian"])),
        options=options,
        prior=(draw(st.sampled_from(["scalar", "layerwise", "diag"])), draw(st.floats(0.01, 100.0))),
        seed=draw(st.integers(0, 2**16)),
    )


def run(examples: int, strategy: st.SearchStrategy[Any], check: Callable[..., None]) -> None:
    """So many generated cases of one check."""
    print(f"GENERATED_SEED={SEED}")  # noqa: T201
    skipped = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    how = settings(max_examples=examples, deadline=None, database=None, print_blob=True, suppress_health_check=skipped)

    def quietly(case: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LaplaceWarning)
            check(case)

    seed(SEED)(how(given(strategy)(quietly)))()


def batches(x: Tensor, y: Tensor, weights: Tensor | None, sizes: list[int]) -> list[tuple[Tensor, ...]]:
    parts = networks.cut(x, y, sizes)
    if weights is None:
        return parts
    return [(*pair, w) for pair, (w, _) in zip(parts, networks.cut(weights, weights, sizes), strict=True)]


def fit(case: Case, sizes: list[int]) -> Laplace:
    """The case's posterior from one way of cutting its data."""
    model, x, y, weights = case.make()
    la = Laplace(model, case.task, **case.given())
    la.fit(batches(x, y, weights, sizes), generator=torch.Generator().manual_seed(1))
    kind, value = case.prior
    count = {"scalar": 1, "layerwise": la.n_layers, "diag": la.n_params}[kind]
    spread = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    la.prior_precision = value * (1 + spread)
    la.log_marginal_likelihood()
    return la


# ---- what the oracle says --------------------------------------------------------------------------------------------


def kept_by(case: Case, la: Laplace, h: Tensor, lam: Tensor, model: nn.Module, x: Tensor) -> Tensor | None:
    """H as the structure keeps it; None where the oracle has no formula for that."""
    layout = la.posterior.fit.layout
    parts = h.split(layout.sizes)
    own = [rows.split(layout.sizes, 1)[i] for i, rows in enumerate(parts)]
    if case.structure in ("full", "gp"):
        return h
    if case.structure == "block":
        return torch.block_diag(*own)
    if case.structure == "diag":
        return h.diagonal().diag()
    if case.structure == "lowrank":
        rank = case.options.get("rank", 20)
        values = torch.linalg.eigvalsh(h).flip(0).clamp(min=0)
        if rank < len(values) and values[rank] > 1e-9 * values[0] and values[rank] > 0.99 * values[rank - 1]:
            return None  # the cut goes through equal eigenvalues
        return oracle.top_eigenpairs(h, rank)[1]
    plain = case.structure == "kron" and not case.options["damping"] and not case.weighted
    if not plain or case.network in ("tied", "recurrent"):
        return None
    sharing = case.options.get("weight_sharing", "expand")
    blocks = oracle.kron_all(model, list(layout.names), x, lam, sharing)
    return torch.block_diag(*[blocks.get(name, block) for name, block in zip(layout.names, own, strict=True)])


def as_function(case: Case, model: nn.Module) -> tuple[nn.Module, str]:
    """The network in float64 as a function of one tensor, and what its parameters' names begin with."""
    model = copy.deepcopy(model).double()
    return (networks.LogitsOnly(model), "net.") if case.network == "mapping" else (model, "")


def curvature_of(case: Case, model: nn.Module, names: list[str], x: Tensor, y: Tensor, w: Tensor) -> tuple[Any, ...]:
    """Lambda (N, C, C) and H (P, P) at unit noise, log p(D given mean) at the case's noise."""
    f, jac = model(x).detach(), oracle.jacobian_loop(model, names, x)
    score = oracle.score_rows(case.task, f, y)
    ef = case.curvature == "ef"
    lam = score.unsqueeze(2) * score.unsqueeze(1) if ef else oracle.bend_rows(case.task, f, y)
    lam = lam * w[:, None, None]
    sigma = case.options.get("sigma_noise", 1.0)
    if case.task == "regression":
        log_p = torch.distributions.Normal(f, sigma).log_prob(y).sum(-1)
    else:
        log_p = oracle.log_probs(case.task, f, y)
    return lam, torch.einsum("ncp,ncd,ndq->pq", jac, lam, jac), (w * log_p).sum()


def close(got: Tensor, expected: Tensor, tolerance: float, what: str, scale: float = 0.0) -> None:
    assert got.shape == expected.shape, what
    largest = max(float(expected.abs().max()), scale, 1e-12)
    error = float((got.double() - expected.double()).abs().max()) / largest
    assert error <= tolerance, f"{what}: off by {error:.2g} relative to {largest:.3g}"


def compare(case: Case, la: Laplace) -> bool:
    """Evidence and predictions of a fitted posterior against the oracle; False where it has nothing to say."""
    model, x, y, weights = case.make()
    model, prefix = as_function(case, model)
    x, y = x.double(), y if case.task == "classification" else y.double()
    w = torch.ones(case.n, dtype=torch.float64) if weights is None else weights.double()
    layout, tolerance = la.posterior.fit.layout, TOLERANCE[case.dtype]
    if case.subset == "all":
        assert [prefix + k for k in layout.names] == [k for k, p in model.named_parameters() if p.requires_grad]
    names = [prefix + k for k in layout.names]
    lam, h, log_p = curvature_of(case, model, names, x, y, w)
    kept = kept_by(case, la, h, lam, model, x)
    if case.structure in ("ekfac", "inf") and "weight_sharing" not in case.options:
        matrix = la.H.to_matrix()
        close(matrix.trace(), h.trace(), tolerance, "trace of H")
        if case.structure == "inf":
            close(matrix.diagonal(), h.diagonal(), tolerance, "diagonal of H")
    if kept is None:
        return False
    sigma, temperature = case.options.get("sigma_noise", 1.0), case.options["temperature"]
    scale = sigma ** -(4 if case.curvature == "ef" else 2) / temperature
    delta = la.prior_precision_diag.double()
    precision = scale * kept + delta.diag()
    covariance = torch.linalg.inv(precision)
    mean = torch.cat([dict(model.named_parameters())[k].detach().flatten() for k in names])
    scatter = ((mean - case.options["prior_mean"]).square() * delta).sum()
    ratio = torch.linalg.slogdet(precision).logabsdet - delta.log().sum()
    size = float(log_p.abs() / temperature + scatter.abs() + ratio.abs()) + 1
    evidence = log_p / temperature - 0.5 * (scatter + ratio)
    close(la.log_marginal_likelihood(), evidence, tolerance, "log evidence", size)

    new = x[:2]
    jac, f = oracle.jacobian_loop(model, names, new), model(new).detach()
    expected = jac @ covariance @ jac.mT
    floor = 1e-3 * float((jac.square() / delta).sum(-1).max())  # what is left of the prior's variance in float32
    outputs = la.predict(new.to(case.dtype), progress_bar=False).outputs
    close(outputs.mean, f, tolerance, "mean of the outputs")
    close(outputs.covariance, expected, tolerance, "covariance of the outputs", floor)
    if case.task == "classification":
        variance = expected.diagonal(dim1=1, dim2=2)
        p = torch.softmax(f / torch.sqrt(1 + math.pi / 8 * variance), -1)
        close(la(new.to(case.dtype)), p, tolerance, "probabilities", 1.0)
    return True


# ---- what holds for every posterior ----------------------------------------------------------------------------------


def assert_valid(case: Case, la: Laplace) -> None:
    """Finite evidence, variances that are not negative, probabilities that sum to one."""
    _, x, _, _ = case.make()
    new, sampler = x[:3], torch.Generator().manual_seed(3)
    assert la.log_marginal_likelihood().isfinite()
    links = [None, "mc", "bridge", "delta"] if case.task == "classification" else [None]
    for link in links:
        prediction = la.predict(new, link_approx=link, n_samples=5, generator=sampler, progress_bar=False)
        assert prediction.mean.isfinite().all()
        assert (prediction.outputs.variance >= 0).all()
        assert prediction.epistemic.isfinite().all()
        assert (prediction.aleatoric >= 0).all()
        if case.task == "classification":
            assert (prediction.mean >= 0).all()
            close(prediction.mean.sum(-1), torch.ones(len(new)), 1e-5, "sum of probabilities")
    assert la.functional_samples(new, n_samples=3, generator=sampler).isfinite().all()
    if case.structure != "gp":
        assert la.sample(3, generator=sampler).isfinite().all()
        assert la.functional_samples(new, "nn", n_samples=3, generator=sampler).isfinite().all()


def assert_same(case: Case, la: Laplace, other: Laplace) -> None:
    """Two ways of cutting the data into batches, one posterior."""
    _, x, _, _ = case.make()
    tolerance = {torch.float64: 1e-7, torch.float32: 1e-2, torch.bfloat16: 0.3}[case.dtype]
    a, b = la.posterior, other.posterior
    size = float(a.log_likelihood.abs() + a.scatter.abs() + a.log_det_ratio.abs()) + 1
    close(a.log_evidence, b.log_evidence, tolerance, "log evidence of other batches", size)
    one, two = (each.predict(x[:3], progress_bar=False).outputs.variance for each in (la, other))
    close(one, two, tolerance, "variance of other batches")


@pytest.mark.parametrize("examples", [40, pytest.param(1200, marks=pytest.mark.slow)])
def test_a_generated_posterior_is_the_oracles(examples):
    seen: collections.Counter[str] = collections.Counter()

    def check(case: Case) -> None:
        try:
            la = fit(case, case.cuts[0])
        except LaplaceError:
            seen["refused"] += 1
            return
        assert_valid(case, la)
        assert_same(case, la, fit(case, case.cuts[1]))
        exact = case.dtype in TOLERANCE and case.curvature in ("ggn", "ef")
        seen["compared" if exact and compare(case, la) else "valid"] += 1

    run(examples, cases(), check)
    print(dict(seen))  # noqa: T201
    assert seen["compared"] >= max(1, 0.25 * examples - 12)
    assert seen["refused"] <= 0.3 * examples + 12


# ---- mistakes --------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
ODD = [
    None, -1, 0, 3, 2.5, NAN, INF, -INF, 1e300, 1e-300, True, 1j, "x", "", b"x", [], {}, (), [1.0, -1.0], ["x"], object,
    torch.tensor(NAN), torch.tensor([]), torch.ones(2, 2), torch.tensor(1j), torch.tensor(True), torch.tensor(-1),
]  # fmt: skip
KEYWORDS = [
    "hessian_structure", "subset_of_weights", "curvature", "curvature_samples", "sigma_noise", "prior_precision",
    "prior_mean", "prior", "temperature", "last_layer_name", "feature_reduction", "subnetwork_indices", "damping",
    "weight_sharing", "rank", "tol", "n_subset", "seed", "independent_outputs", "functional_approximation",
    "memory_budget", "class_dim", "backend", "backend_kwargs", "likelihood", "model",
]  # fmt: skip
CALLS: dict[str, Callable[[Laplace, Tensor, Any], Any]] = {
    "la(odd)": lambda la, x, odd: la(odd),
    "predict(odd)": lambda la, x, odd: la.predict(odd),
    "pred_type": lambda la, x, odd: la(x, pred_type=odd),
    "link_approx": lambda la, x, odd: la(x, link_approx=odd),
    "n_samples": lambda la, x, odd: la(x, pred_type="nn", n_samples=odd),
    "outputs": lambda la, x, odd: la(x, outputs=odd),
    "generator": lambda la, x, odd: la.predict(x, generator=odd),
    "samples": lambda la, x, odd: la.functional_samples(x, n_samples=odd),
    "sample": lambda la, x, odd: la.sample(odd),
    "sample generator": lambda la, x, odd: la.sample(2, generator=odd),
    "evidence": lambda la, x, odd: la.log_marginal_likelihood(prior_precision=odd),
    "evidence noise": lambda la, x, odd: la.log_marginal_likelihood(sigma_noise=odd),
    "set precision": lambda la, x, odd: setattr(la, "prior_precision", odd),
    "set mean": lambda la, x, odd: setattr(la, "prior_mean", odd),
    "set noise": lambda la, x, odd: setattr(la, "sigma_noise", odd),
    "set temperature": lambda la, x, odd: setattr(la, "temperature", odd),
    "square_norm": lambda la, x, odd: la.square_norm(odd),
    "log_prob": lambda la, x, odd: la.log_prob(odd),
    "functional_variance": lambda la, x, odd: la.functional_variance(odd),
    "fit(odd)": lambda la, x, odd: la.fit(odd),
    "fit generator": lambda la, x, odd: la.fit([], generator=odd),
    "quantile": lambda la, x, odd: la.predict(x).quantile(odd),
    "interval": lambda la, x, odd: la.predict(x).interval(odd),
    "load_state_dict": lambda la, x, odd: la.load_state_dict(odd),
    "tuning method": lambda la, x, odd: la.optimize_prior_precision(method=odd),
    "tuning structure": lambda la, x, odd: la.optimize_prior_precision(prior_structure=odd),
    "tuning steps": lambda la, x, odd: la.optimize_prior_precision(n_steps=odd),
}


def _one_bad(values: Tensor, bad: float) -> Tensor:
    values = values.clone() if values.is_floating_point() else values.float()
    values.reshape(-1)[len(values.reshape(-1)) // 2] = bad
    return values


# Each makes batches that no posterior can be fitted on: (x, y, n_outputs) -> batches.
BAD_DATA: dict[str, Callable[[Case, Tensor, Tensor], Any]] = {
    "NaN input": lambda c, x, y: [(torch.full_like(x, NAN), y)],
    "infinite label": lambda c, x, y: [(x, _one_bad(y, INF))],
    "NaN label": lambda c, x, y: [(x, _one_bad(y, NAN))],
    "NaN weight": lambda c, x, y: [(x, y, _one_bad(torch.ones(len(x)), NAN))],
    "infinite weight": lambda c, x, y: [(x, y, _one_bad(torch.ones(len(x)), INF))],
    "negative weight": lambda c, x, y: [(x, y, _one_bad(torch.ones(len(x)), -1.0))],
    "no weight": lambda c, x, y: [(x, y, torch.zeros(len(x)))],
    "complex weight": lambda c, x, y: [(x, y, torch.ones(len(x)) * 1j)],
    "too many weights": lambda c, x, y: [(x, y, torch.ones(len(x) + 1))],
    "too few labels": lambda c, x, y: [(torch.cat([x, x]), y)],
    "labels in a list": lambda c, x, y: [(x, y.tolist())],
    "labels in three dimensions": lambda c, x, y: [(x, y.reshape(-1, 1, 1).expand(-1, 2, 2))],
    "complex labels": lambda c, x, y: [(x, y * 1j)],
    "four elements": lambda c, x, y: [(x, y, y, y)],
    "one element": lambda c, x, y: [(x,)],
    "a tensor": lambda c, x, y: [x],
    "no batch": lambda c, x, y: [],
    "an empty batch": lambda c, x, y: [(x[:0], y[:0])],
    "an empty mapping": lambda c, x, y: [{}],
    "wrong width": lambda c, x, y: [(x.reshape(len(x), -1).repeat(1, 2)[:, :-1], y)],
    "no loader": lambda c, x, y: None,
    "a number": lambda c, x, y: 3,
    "overflow": lambda c, x, y: [(x * INF, y)],
}


def use(la: Laplace, case: Case, x: Tensor) -> None:
    """A posterior that got this far gives numbers, or says why not."""
    assert la.log_marginal_likelihood().isfinite()
    out = la.predict(x[:2], progress_bar=False)
    assert out.mean.isfinite().all()
    assert out.epistemic.isfinite().all()
    assert (out.outputs.variance >= 0).all()


def odd_options() -> st.SearchStrategy[Any]:
    return st.tuples(cases(), st.sampled_from(KEYWORDS), st.sampled_from(ODD))


@pytest.mark.parametrize("examples", [25, pytest.param(600, marks=pytest.mark.slow)])
def test_an_odd_option_is_refused_by_us_or_works(examples):
    refused = 0

    def check(drawn: tuple[Case, str, Any]) -> None:
        nonlocal refused
        case, key, odd = drawn
        model, x, y, weights = case.make()
        given = {"model": model, "likelihood": case.task} | case.given() | {key: odd}
        try:
            la = Laplace(**given)
            la.fit(batches(x, y, weights, case.cuts[0]))
            use(la, case, x)
        except LaplaceError:
            refused += 1

    run(examples, odd_options(), check)
    assert refused > 0


@pytest.mark.parametrize("examples", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_an_odd_call_is_refused_by_us_and_the_posterior_stays(examples):
    refused = 0

    def check(drawn: tuple[Case, str, Any]) -> None:
        nonlocal refused
        case, call, odd = drawn
        _, x, _, _ = case.make()
        try:
            la = fit(case, case.cuts[0])
        except LaplaceError:
            return
        try:
            CALLS[call](la, x[:2], odd)
        except LaplaceError:
            refused += 1
        try:
            use(la, case, x)
        except LaplaceError:
            assert call.startswith(("set", "evidence", "tuning"))  # a value that is right by itself

    run(examples, st.tuples(cases(), st.sampled_from(sorted(CALLS)), st.sampled_from(ODD)), check)
    assert refused > 0


@pytest.mark.parametrize("examples", [25, pytest.param(300, marks=pytest.mark.slow)])
def test_bad_data_is_refused_by_us_and_the_posterior_stays(examples):
    def check(drawn: tuple[Case, str]) -> None:
        case, name = drawn
        _, x, y, _ = case.make()
        try:
            la = fit(case, case.cuts[0])
        except LaplaceError:
            return
        before = float(la.log_marginal_likelihood())
        if name == "wrong width" and case.network not in ("tiny", "linear", "batchnorm", "mapping", "functional"):
            return
        if name in ("NaN input", "overflow") and case.network in ("tokens", "tied"):
            return  # its inputs are numbers of tokens
        if name == "NaN label" and case.task in ("binary", "multilabel", "poisson"):
            name = "infinite label"
        with pytest.raises(LaplaceError):
            la.fit(BAD_DATA[name](case, x, y))
        assert float(la.log_marginal_likelihood()) == before

    run(examples, st.tuples(cases(), st.sampled_from(sorted(BAD_DATA))), check)
