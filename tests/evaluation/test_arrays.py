"""Scores and figures of numpy arrays and lists are those of tensors; what is no number is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laplace.errors import InputError
from laplace.evaluation import (
    accuracy,
    adaptive_ece,
    aupr,
    aurc,
    auroc,
    binary_accuracy,
    binary_brier,
    binary_ece,
    binary_nll,
    bootstrap,
    brier,
    classwise_ece,
    confidence,
    coverage_at,
    crps,
    ece,
    excess_aurc,
    fpr95,
    fpr_at_tpr,
    gaussian_crps,
    gaussian_nll,
    gaussian_pit,
    interval_coverage,
    interval_score,
    interval_width,
    mce,
    nll,
    quantile_calibration_error,
    regression_band,
    reliability,
    reliability_diagram,
    risk_coverage,
    rmse,
    sample_pit,
    selective_accuracy,
    sharpness,
)

torch.manual_seed(0)
P, Y = torch.randn(20, 3).softmax(-1), torch.arange(20) % 3
M, V, T = torch.randn(20, 2), torch.rand(20, 2) + 0.1, torch.randn(20, 2)
DRAWS, LABELS = torch.randn(7, 20, 2), (torch.rand(20, 3) > 0.5).long()
COVARIANCE = torch.diag_embed(V) + 0.05

CALLS = {
    "accuracy": (accuracy, (P, Y)),
    "nll": (nll, (P, Y)),
    "brier": (brier, (P, Y)),
    "confidence": (confidence, (P,)),
    "ece": (ece, (P, Y)),
    "ece of reliability": (lambda p, y: reliability(p, y, n_bins=np.int64(7)).ece, (P, Y)),
    "auroc": (auroc, (M[:, 0], T[:, 0])),
    "rmse": (rmse, (M, T)),
    "gaussian_nll": (gaussian_nll, (M, V, T)),
    "gaussian_nll, covariance": (gaussian_nll, (M, COVARIANCE, T)),
    "adaptive_ece": (adaptive_ece, (P, Y)),
    "classwise_ece": (classwise_ece, (P, Y)),
    "mce": (mce, (P, Y)),
    "binary_accuracy": (binary_accuracy, (P, LABELS)),
    "binary_nll": (binary_nll, (P, LABELS)),
    "binary_brier": (binary_brier, (P[:, 0], LABELS[:, 0])),
    "binary_ece": (binary_ece, (P, LABELS)),
    "aupr": (aupr, (M[:, 0], T[:, 0])),
    "fpr95": (fpr95, (M[:, 0], T[:, 0])),
    "fpr_at_tpr": (lambda a, b: fpr_at_tpr(a, b, tpr=0.5), (M[:, 0], T[:, 0])),
    "gaussian_crps": (gaussian_crps, (M, V, T)),
    "crps": (crps, (DRAWS, T)),
    "sharpness": (sharpness, (V,)),
    "mean of gaussian_pit": (lambda m, v, t: gaussian_pit(m, v, t).mean().item(), (M, V, T)),
    "mean of sample_pit": (lambda s, t: sample_pit(s, t).mean().item(), (DRAWS, T)),
    "coverage_at": (lambda u: coverage_at(u, 0.5).item(), (P,)),
    "quantile_calibration_error": (quantile_calibration_error, (P,)),
    "interval_coverage": (interval_coverage, (M - V, M + V, T)),
    "interval_width": (interval_width, (M - V, M + V)),
    "interval_score": (lambda low, high, t: interval_score(low, high, t, 0.9), (M - V, M + V, T)),
    "aurc": (aurc, (M[:, 0], T[:, 0])),
    "excess_aurc": (excess_aurc, (M[:, 0], T[:, 0])),
    "aurc of risk_coverage": (lambda loss, u: risk_coverage(loss, u).aurc, (M[:, 0], T[:, 0])),
    "selective_accuracy": (lambda p, y, u: selective_accuracy(p, y, 0.4, u), (P, Y, T[:, 0])),
    "bootstrap": (lambda p, y: bootstrap(brier, p, y, n_resamples=20).upper, (P, Y)),
}


def backwards(t):
    """A view that torch cannot take."""
    return t.flip(0).numpy()[::-1]


def read_only(t):
    array = t.numpy().copy()
    array.flags.writeable = False
    return array


FORMS = {
    "numpy": lambda t: t.numpy(),
    "lists": lambda t: t.tolist(),
    "backwards": backwards,
    "read-only": read_only,
    "big-endian": lambda t: t.numpy().astype(">i4" if t.dtype is torch.int64 else ">f4"),
    "small": lambda t: t.numpy().astype(np.uint16 if t.dtype is torch.int64 else np.float32),
    "long": lambda t: t.numpy().astype(np.uint64 if t.dtype is torch.int64 else np.longdouble),
    "with a graph": lambda t: t if t.dtype is torch.int64 else t.clone().requires_grad_(),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_scores_do_not_depend_on_what_holds_the_numbers(name, form):
    score, arguments = CALLS[name]
    assert score(*map(FORMS[form], arguments)) == pytest.approx(score(*arguments), rel=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, "words", None, 1j])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_number_is_refused(name, place, bad):
    score, arguments = CALLS[name]
    if place >= len(arguments):
        return
    given = [t.tolist() for t in arguments]
    at = given[place]
    while isinstance(at[0], list):
        at = at[0]
    at[0] = bad
    with pytest.raises(InputError):
        score(*given)


@pytest.mark.parametrize("empty", [[], np.zeros((0, 3)), torch.zeros(0, 2)])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_refused(name, empty):
    score, arguments = CALLS[name]
    with pytest.raises(InputError):
        score(*[empty] * len(arguments))


@pytest.mark.parametrize("values", [[[1.0], [1.0, 2.0]], object(), {"a": 1}, "0.5"])
def test_what_is_no_array_is_refused(values):
    for score, arguments in CALLS.values():
        with pytest.raises(InputError):
            score(values, *arguments[1:])


@pytest.mark.parametrize("n_bins", [2.5, 0, -1, "ten", None, True, np.float64(3.0)])
def test_bins_are_a_whole_number(n_bins):
    for score in (reliability, ece, adaptive_ece, classwise_ece, mce):
        with pytest.raises(InputError, match=r"n_bins=.* must be a whole number of at least 1"):
            score(P, Y, n_bins=n_bins)


def test_infinite_values_are_refused_but_for_ends_of_intervals_and_scores():
    far = T.clone()
    far[0, 0] = torch.inf
    with pytest.raises(InputError, match="y holds infinite values"):
        rmse(M, far)
    with pytest.raises(InputError, match="mean holds infinite values"):
        gaussian_nll(far, V, M)
    with pytest.raises(InputError, match="variance holds infinite values"):
        gaussian_nll(M, far.abs(), M)
    assert interval_coverage(-far, far.abs() + 100, M) == pytest.approx(float((-far <= M).double().mean()))
    assert auroc(M[:, 0], far[:, 0]) >= auroc(M[:, 0], T[:, 0])


def test_figures_take_arrays_and_lists():
    x = np.linspace(0, 1, 9)
    regression_band(x[::-1], x.tolist(), x, 0.1, data=(x[:3], [0.0, 1.0, 2.0]), truth=torch.tensor(x), title="t")
    regression_band(x, x[:, None], x, x.astype(np.float32))
    reliability_diagram({"MAP": reliability(P.numpy(), Y.tolist())})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mean": [torch.nan] * 9}, "mean holds nan"),
        ({"x": [np.inf] * 9}, "x holds infinite"),
        ({"epistemic": [-1.0] * 9}, "epistemic is a standard deviation"),
        ({"noise": -0.1}, "noise is a standard deviation"),
        ({"noise": [0.1, 0.2]}, "noise has 2 values"),
        ({"noise": "loud"}, "noise='loud'"),
        ({"data": ([1.0, 2.0], [1.0])}, "data has 2 inputs and 1 targets"),
        ({"data": [1.0]}, "data=.* must be a pair"),
        ({"truth": [[1.0, 2.0]] * 9}, "truth must have shape"),
        ({"x": []}, "x must have shape"),
    ],
)
def test_bad_figures_are_refused(change, match):
    given = {"x": np.linspace(0, 1, 9), "mean": np.zeros(9), "epistemic": np.ones(9), "noise": 0.1}
    with pytest.raises(InputError, match=match):
        regression_band(**(given | change))


@pytest.mark.parametrize("models", [reliability(P, Y), [reliability(P, Y)], {"MAP": P}, {"MAP": 0.1}, None])
def test_diagrams_of_other_things_are_refused(models):
    with pytest.raises(InputError, match=r"reliability\(probs, y\)"):
        reliability_diagram(models)
