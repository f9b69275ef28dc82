"""A generated mistake, in an option, in a call or in the data, is one of our own exceptions; the posterior stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from generated import Case, batches, cases, fit, run
from laplace import Laplace
from laplace.errors import LaplaceError

NAN, INF = math.nan, math.inf
ODD = [
    None, -1, 0, 3, 2.5, NAN, INF, -INF, 1e300, 1e-300, True, 1j, "x", "", b"x", [], {}, (), [1.0, -1.0], ["x"], object,
    torch.tensor(NAN), torch.tensor([]), torch.ones(2, 2), torch.tensor(1j), torch.tensor(True), torch.tensor(-1),
]  # fmt: skip
KEYWORDS = [
    "hessian_structure", "subset_of_weights", "curvature", "curvature_samples", "sigma_noise", "prior_precision",
    "prior_mean", "prior", "temperature", "softmax_temperature", "last_layer_name", "feature_reduction",
    "subnetwork_indices", "damping",
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
    "set softmax temperature": lambda la, x, odd: setattr(la, "softmax_temperature", odd),
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
    "labels in words": lambda c, x, y: [(x, ["a"] * len(x))],
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
    assert (getattr(out, "rows", out).outputs.variance >= 0).all()


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
            use(la, case, x)  # whose predictions may overflow without any mistake
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
