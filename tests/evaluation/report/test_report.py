"""`laplace.report`: its numbers are those of the library, its verdicts follow from them, bad input breaks nothing."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace
from laplace import Laplace, Ordinal, from_log_prob
from laplace import evaluation as metrics
from laplace.errors import ArgumentError, InputError, NotFittedError, OptionError, UnsupportedError
from laplace.evaluation import Report, Thresholds
from laplace.evaluation.report.answers import Answers
from laplace.evaluation.report.comparing import against, selective
from laplace.evaluation.report.reading import LAPLACE, NETWORK, SCALED
from laplace.evaluation.report.resampling import Estimate
from laplace.rivals import Ensemble

sys.path.insert(0, str(Path(__file__).parent))
from cases import KINDS, given


def made(kind="classes", **options) -> Report:
    case = given(kind)
    return laplace.report(case.la, options.pop("test", case.test), **{"out": None, "n_bootstrap": 40} | options)


def about(report: Report, word: str):
    return next((verdict for verdict in report.verdicts if verdict.about == word), None)


# ---- the numbers ----------------------------------------------------------------------------------------------------


def test_scores_of_classes_are_those_of_the_library():
    case = given("classes")
    report = made(val_loader=case.val)
    with torch.no_grad():
        f = case.la.model(case.x)
    p = case.la.predict(case.x).mean.double()
    for name, probs in {NETWORK: f.double().softmax(-1), LAPLACE: p / p.sum(-1, keepdim=True)}.items():
        for key in ("accuracy", "nll", "brier", "ece", "mce", "adaptive_ece", "classwise_ece"):
            assert report.score(name, key) == pytest.approx(getattr(metrics, key)(probs, case.y), abs=1e-5), key
        aurc = metrics.aurc(probs.argmax(-1) != case.y, 1 - probs.amax(-1))
        assert report.score(name, "aurc") == pytest.approx(aurc, abs=1e-6)
        gap = metrics.confidence(probs) - metrics.accuracy(probs, case.y)
        assert report.score(name, "gap") == pytest.approx(gap, abs=1e-6)


def test_scores_of_a_regression_are_those_of_the_library():
    case, report = given("regression"), made("regression")
    prediction = case.la.predict(case.x)
    lower, upper = prediction.interval(0.9)
    assert report.score(LAPLACE, "rmse") == pytest.approx(metrics.rmse(prediction.mean, case.y), rel=1e-5)
    nll = -prediction.distribution.log_prob(case.y).mean()
    assert report.score(LAPLACE, "nll") == pytest.approx(float(nll), rel=1e-5)
    assert report.score(LAPLACE, "coverage") == metrics.interval_coverage(lower, upper, case.y)
    assert report.score(LAPLACE, "width") == pytest.approx(metrics.interval_width(lower, upper), rel=1e-5)
    score = metrics.interval_score(lower, upper, case.y, 0.9)
    assert report.score(LAPLACE, "interval_score") == pytest.approx(score, rel=1e-5)
    crps = metrics.gaussian_crps(prediction.mean, prediction.variance, case.y)
    assert report.score(LAPLACE, "crps") == pytest.approx(crps, rel=1e-5)
    assert report.score(LAPLACE, "sharpness") == pytest.approx(metrics.sharpness(prediction.variance), rel=1e-5)
    sigma = float(case.la.sigma_noise)
    alone = metrics.gaussian_nll(case.la.model(case.x), torch.full_like(case.y, sigma**2), case.y)
    assert report.score(NETWORK, "nll") == pytest.approx(alone, rel=1e-5)


def test_scores_of_counts_are_those_of_many_draws():
    case, report = given("counts"), made("counts")
    torch.manual_seed(0)
    distribution = case.la.predict(case.x).distribution
    assert report.score(LAPLACE, "crps") == pytest.approx(metrics.crps(distribution.sample((3000,)), case.y), rel=0.02)
    low, high = (distribution.icdf(torch.tensor(q)) for q in (0.05, 0.95))
    score = metrics.interval_score(low, high, case.y, 0.9)
    assert report.score(LAPLACE, "interval_score") == pytest.approx(score, rel=1e-4)
    assert report.score(LAPLACE, "nll") == pytest.approx(float(-distribution.log_prob(case.y).mean()), rel=1e-5)


def test_the_temperature_of_the_scaled_network_is_the_best_one():
    case = given("classes")
    report = made(val_loader=case.val)
    with torch.no_grad():
        val, test = case.la.model(case.val[0][0]).double(), case.la.model(case.x).double()
    grid = torch.logspace(-1, 1, 2000).tolist()
    best = min(grid, key=lambda t: float(nn.functional.cross_entropy(val / t, case.val[0][1])))
    expected = metrics.nll((test / best).softmax(-1), case.y)
    assert report.score(SCALED, "nll") == pytest.approx(expected, abs=1e-3)
    assert SCALED not in made().data["scores"]
    assert "val_loader" in made().data["missing"][SCALED]


def test_the_noise_of_the_scaled_network_is_that_of_the_residuals():
    case = given("regression")
    report = made("regression", val_loader=case.val)
    x, y = case.val[0]
    sigma = float((y - case.la.model(x).detach()).square().mean().sqrt())
    assert f"noise {sigma:.3g}" in next(m["about"] for m in report.data["methods"] if m["name"] == SCALED)


def test_detection_is_that_of_the_library():
    case = given("classes")
    rows = made(ood={"far": case.outside}).data["outside"]["rows"]
    p, q = (1 - case.la.predict(x).mean.amax(-1).double() for x in (case.x, case.outside))
    found = {(row["method"], row["score"]): row["auroc"]["value"] for row in rows}
    assert found[LAPLACE, "confidence"] == pytest.approx(metrics.auroc(p, q), abs=1e-6)
    assert (NETWORK, "epistemic") not in found
    drawn = [case.la.predict(x, generator=torch.Generator().manual_seed(0)) for x in (case.x, case.outside)]
    auroc = metrics.auroc(*(each.epistemic for each in drawn))
    assert found[LAPLACE, "epistemic"] == pytest.approx(auroc, abs=1e-3)


def test_positions_count_as_rows_and_ignored_labels_do_not():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(40, 5, 3)
    y = torch.randint(4, (40, 5))
    y[:, 4] = -100
    la = Laplace(model, "classification").fit([(x, y)])
    report = laplace.report(la, [(x, y)], out=None, n_bootstrap=30)
    rows = y[:, :4].reshape(-1)
    p = la.predict(x).mean[:, :4].reshape(-1, 4).double()
    assert report.score(LAPLACE, "nll") == pytest.approx(float(-p.gather(1, rows[:, None]).log().mean()), rel=1e-4)
    assert report.data["provenance"]["data"]["test"]["examples"] == 40
    assert "positions" in report.data["missing"]["examples"]


def test_a_score_of_too_many_probabilities_is_left_out(monkeypatch):
    monkeypatch.setattr("laplace.evaluation.report.scores._MOST", 100)
    report = made()
    assert "classwise_ece" not in report.data["scores"][LAPLACE]
    assert "No class-wise ECE: there are too many" in report.html


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_whole_page_and_a_json_without_nan(kind, tmp_path):
    case, out = given(kind), tmp_path / "new" / "page.html"
    options = {"ood": {"far": case.outside}, "val_loader": case.val, "train_loader": case.train}
    report = made(kind, out=out, shifts={"noise": {s: [(case.x + s, case.y)] for s in (0.5, 1)}}, **options)
    data = json.loads(out.with_suffix(".json").read_text())
    assert data == report.data
    assert out.read_text() == report.html
    assert data["kind"] == kind
    assert set(data["scores"]) == {NETWORK, LAPLACE} | ({SCALED} if kind != "counts" else set())
    assert [row["name"] for row in data["shifts"][1:]] == ["noise 0.5", "noise 1"]
    for figure in ("risk", "error", "prior", "outside-epistemic", "shifts"):
        assert f'id="figure-{figure}"' in report.html
    for figure in ("pit", "coverage", "scatter") if kind in ("regression", "counts") else ("reliability",):
        assert f'id="figure-{figure}"' in report.html
    assert report.headline in repr(report)
    assert "<iframe" in report._repr_html_()


@pytest.mark.parametrize("name", ["binary", "heteroscedastic", "given_noise", "ordinal"])
def test_the_other_likelihoods_have_a_page_too(name):
    torch.manual_seed(0)
    x, noise = torch.randn(240, 3), 0.1 + torch.rand(240, 1)
    y = {
        "binary": (x[:, :1] > 0).float(),
        "heteroscedastic": x[:, :1] + 0.2 * torch.randn(240, 1),
        "given_noise": x[:, :1] + noise * torch.randn(240, 1),
        "ordinal": (x[:, 0] > 0).long() + (x[:, 0] > 1).long(),
    }[name]
    batch = (x, y, noise) if name == "given_noise" else (x, y)
    model = nn.Linear(3, 2 if name == "heteroscedastic" else 1)
    la = Laplace(model, Ordinal(3) if name == "ordinal" else name).fit([batch])
    report = laplace.report(la, [batch], ood={"far": 5 * x}, val_loader=[batch], out=None, n_bootstrap=20)
    assert report.data["kind"] == {"binary": "labels", "ordinal": "classes"}.get(name, "regression")
    assert (SCALED in report.data["scores"]) == (name in ("binary", "given_noise"))
    f = model(x).detach().double()
    if name == "given_noise":
        expected = -torch.distributions.Normal(f, noise.double()).log_prob(y.double()).mean()
        assert report.score(NETWORK, "nll") == pytest.approx(float(expected), rel=1e-5)
        assert report.score(NETWORK, "sharpness") == pytest.approx(float(noise.square().mean().sqrt()), rel=1e-5)
    if name == "binary":
        assert report.score(NETWORK, "ece") == pytest.approx(metrics.binary_ece(f.sigmoid(), y), abs=1e-6)
        assert report.score(NETWORK, "brier") == pytest.approx(metrics.binary_brier(f.sigmoid(), y), abs=1e-6)


def test_a_report_does_not_depend_on_the_batches_and_repeats_itself():
    case = given("classes")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    reports = [made(test=test, ood={"far": case.outside}).data for test in (case.test, case.test, [(case.x, case.y)])]
    assert torch.equal(torch.get_rng_state(), state)
    for data in reports:
        data["provenance"] = {k: v for k, v in data["provenance"].items() if k not in ("made", "seconds")}
        data.pop("seconds_per_example")
    assert reports[0] == reports[1]
    assert reports[0]["provenance"] == reports[2]["provenance"]
    one, two = (np.array([v["value"] for v in d["scores"][LAPLACE].values()]) for d in (reports[0], reports[2]))
    assert np.allclose(one, two, atol=1e-6)


def test_another_posterior_stands_beside_as_a_source():
    case = given("classes")
    wide = copy.copy(case.la)
    wide.prior_precision = case.la.prior_precision / 100
    report = made(sources={"wide": wide})
    p = wide.predict(case.x).mean.double()
    assert report.score("wide", "nll") == pytest.approx(metrics.nll(p / p.sum(-1, keepdim=True), case.y), abs=1e-5)
    with pytest.raises(OptionError, match="taken"):
        made(sources={"Laplace": wide})
    with pytest.raises(OptionError, match="Source is needed"):
        made(sources={"net": nn.Linear(2, 2)})


@pytest.mark.parametrize("kind", KINDS)
def test_an_ensemble_stands_beside_as_a_source(kind):
    case = given(kind)
    noise = {"sigma_noise": float(case.la.sigma_noise)} if kind == "regression" else {}
    report = made(kind, sources={"two networks": Ensemble([case.la.model] * 2, KINDS[kind], **noise)})
    mine, alone = report.data["scores"]["two networks"], report.data["scores"][NETWORK]
    for key in mine:  # of one network twice, it is that network
        if key not in ("mce", "aurc", "pit"):
            assert mine[key]["value"] == pytest.approx(alone[key]["value"], rel=1e-3, abs=1e-4), key


# ---- the verdicts ---------------------------------------------------------------------------------------------------


def classifier(scale: float, n: int = 3000):
    """A network whose logits are those of the truth, times a factor: 1 is calibrated, 3 overconfident."""
    torch.manual_seed(0)
    x = 1.5 * torch.randn(2 * n, 3)
    y = torch.distributions.Categorical(logits=x).sample()
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.copy_(scale * torch.eye(3))
        model.bias.zero_()
    la = Laplace(model, "classification", prior_precision=1e6).fit([(x[:n], y[:n])])
    return la, [(x[n:], y[n:])]


@pytest.mark.parametrize(("scale", "word"), [(3.0, "Overconfident by"), (0.4, "Underconfident by"), (1.0, "earned")])
def test_calibration_is_said_in_words_and_points(scale, word):
    la, test = classifier(scale)
    report = laplace.report(la, test, out=None, n_bootstrap=60)
    verdict = about(report, "calibration")
    assert word in verdict.text
    gap = report.score(LAPLACE, "gap")
    assert f"{abs(100 * gap):.1f} points" in verdict.text
    assert (verdict.grade == "good") == (scale == 1.0)
    if scale != 1.0:
        assert verdict.code == "la.calibrate(val_loader)"
        assert report.data["next"][0]["code"] == verdict.code
        assert verdict.grade == "bad"
        assert "Do not rely" in report.headline


def test_thresholds_may_be_set():
    la, test = classifier(3.0)
    calm = laplace.report(la, test, out=None, n_bootstrap=40, thresholds=Thresholds(calibration=0.9, ece=0.9))
    assert about(calm, "calibration").grade != "bad"
    for wrong in ({"level": 0.42}, {"ece": -1}, {"smallest": "many"}, {"worse": True}):
        with pytest.raises(OptionError, match="Thresholds"):
            Thresholds(**wrong)
    with pytest.raises(OptionError, match="Thresholds"):
        laplace.report(la, test, out=None, thresholds={"ece": 1})


@pytest.mark.parametrize(("noise", "word"), [(0.15, "too narrow"), (1.0, "too wide"), (0.3, "holds")])
def test_the_coverage_of_the_interval_is_said_in_words(noise, word):
    case = given("regression")
    la = copy.copy(case.la)
    la.sigma_noise = noise
    verdict = about(laplace.report(la, case.test, out=None, n_bootstrap=60), "coverage")
    assert verdict.text.startswith("The 90 % interval holds")
    assert word in verdict.text
    if noise != 0.3:
        assert "la.calibrate" in verdict.code
        assert "la.conformal" in verdict.code


def test_a_worse_posterior_is_called_worse():
    case = given("classes")
    few = [(case.x[:8], case.y[:8])]  # a posterior of eight examples is far too wide
    la = Laplace(case.la.model, "classification", prior_precision=1e-3).fit(few)
    report = laplace.report(la, case.test, val_loader=case.val, out=None, n_bootstrap=60)
    assert about(report, f"against {NETWORK}").grade == "bad"
    assert about(report, f"against {SCALED}").grade == "warn"
    assert "worse" in about(report, f"against {NETWORK}").text


def compared(value: float, low: float, high: float):
    """Return what is said of a gain over the scaled network."""
    case = given("classes")
    gains = {SCALED: {"nll": Estimate(value, low, high)}}
    stand_in = SimpleNamespace(
        la=case.la, measured=SimpleNamespace(gains=gains), thresholds=Thresholds(), validated=True
    )
    (verdict,) = against(stand_in)
    return verdict


def test_the_interval_of_a_difference_is_that_of_its_sentence():
    assert (
        "It is worse by 0.013 nats per example (95 % interval -0.007 to +0.033)"
        in compared(-0.013, -0.033, 0.007).detail
    )
    assert (
        "It is better by 0.013 nats per example (95 % interval -0.007 to +0.033)"
        in compared(0.013, -0.007, 0.033).detail
    )
    assert "By 0.020 nats per example (95 % interval 0.007 to 0.033)" in compared(-0.02, -0.033, -0.007).detail
    assert "By 0.020 nats per example (95 % interval 0.007 to 0.033)" in compared(0.02, 0.007, 0.033).detail


def test_a_small_difference_is_named_as_what_it_is():
    assert compared(-0.004, -0.006, -0.002).text == "Laplace is within 0.005 nats of temperature scaling."
    assert "worse than temperature scaling cannot be told" in compared(-0.013, -0.033, 0.007).text
    assert "better than temperature scaling cannot be told" in compared(0.013, -0.007, 0.033).text


@pytest.mark.parametrize(("sign", "words"), [(1, "lowers the error from"), (0, "hardly"), (-1, "does not lower")])
def test_what_handing_over_brings_is_said_as_it_is(sign, words):
    total, wrong = np.linspace(0, 1, 100), np.zeros(100)
    wrong[{1: slice(80, 100), 0: slice(0, 100, 2), -1: slice(0, 40)}[sign]] = 1
    wrong[-1] = max(wrong[-1], sign == 0)  # a little more among those that are handed over
    columns = {"total": total, "error": wrong}
    case = SimpleNamespace(answers=Answers("classes", columns), test=SimpleNamespace(n=100))
    (verdict,) = selective(case)
    assert words in verdict.text


def test_a_calibrated_posterior_is_not_told_to_calibrate():
    la, test = classifier(3.0)
    la.softmax_temperature = 1.2
    report = laplace.report(la, test, out=None, n_bootstrap=40)
    assert about(report, "calibration").code == "la.conformal(cal_loader, level=0.9)"
    assert "la.calibrate" not in repr(report)


def test_a_stale_posterior_is_noticed():
    case = given("classes")
    model = copy.deepcopy(case.la.model)
    la = Laplace(model, "classification").fit(case.train)
    with torch.no_grad():
        model[0].weight.mul_(1.01)
    with pytest.warns(laplace.errors.StaleWarning):
        report = laplace.report(la, case.test, out=None, n_bootstrap=20)
    assert about(report, "stale").grade == "bad"
    assert report.verdicts[0].about == "stale"


def test_test_examples_among_the_training_data_are_noticed():
    case = given("classes")
    mixed = [(torch.cat([case.x, case.train[0][0][:7]]), torch.cat([case.y, case.train[0][1][:7]]))]
    assert "7 of the 207 test examples" in about(made(test=mixed, train_loader=case.train), "leak").text
    assert about(made(train_loader=case.train), "leak") is None


def test_test_data_that_was_fitted_or_tuned_on_is_noticed():
    la, test = classifier(3.0)
    again = Laplace(la.model, "classification").fit(test)
    found = laplace.report(again, test, out=None, n_bootstrap=20)
    assert about(found, "leak").text == "The test data is the loader that la was fitted on."
    x, y = test[0]
    tests, held_out = [(x[:150], y[:150])], TensorDataset(x[150:], y[150:])
    la.calibrate(DataLoader(held_out, 50))
    found = laplace.report(la, DataLoader(held_out, 90), out=None, n_bootstrap=20)
    assert about(found, "reuse").text == "The test data has the dataset that la was tuned on."
    assert "can rely" not in str(found).splitlines()[0]
    found = laplace.report(la, tests, val_loader=DataLoader(held_out, 50), out=None, n_bootstrap=20)
    assert about(found, "reuse") is None


def test_test_examples_among_the_validation_data_are_noticed():
    la, test = classifier(3.0)
    x, y = test[0]
    found = laplace.report(la, test, val_loader=[(x[:1000].clone(), y[:1000])], out=None, n_bootstrap=20)
    assert "1,000 of the 3,000 test examples are validation examples" in about(found, "reuse").text


def test_an_evidence_with_its_optimum_at_the_edge_is_noticed():
    la = Laplace(nn.Linear(3, 2, bias=False), "classification", prior_precision=1e-9)
    with torch.no_grad():
        la.model.weight.zero_()  # zero weights: the narrower the prior, the better
    report = laplace.report(la.fit([(torch.randn(50, 3), torch.randint(2, (50,)))]), given_test(), out=None)
    assert "edge" in about(report, "evidence").text
    assert report.data["prior"]["edge"] == "high"


def given_test():
    return [(torch.randn(30, 3), torch.randint(2, (30,)))]


def test_which_score_notices_which_inputs_is_said():
    case = given("regression")
    report = made("regression", ood={"far": case.outside, "same": case.train[0][0]})
    assert about(report, "outside:far").grade == "good"
    assert "rank inputs by the epistemic uncertainty of Laplace" in about(report, "outside:far").text
    same = about(report, "outside:same")
    assert same.grade == "warn"
    assert "nothing here tells it" in same.text
    assert 'subset_of_weights="all"' in same.code


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_three_examples_give_a_page_that_says_so():
    case = given("classes")
    report = made(test=[(case.x[:3], case.y[:3])], ood={"far": case.outside[:2]}, val_loader=case.val)
    assert "only 3 examples" in about(report, "tiny").text
    assert "too few test examples" in report.headline
    json.dumps(report.data, allow_nan=False)


@pytest.mark.parametrize("kind", KINDS)
def test_one_example_gives_a_page(kind):
    case = given(kind)
    report = made(kind, test=[(case.x[:1], case.y[:1])])
    assert "only 1 example." in about(report, "tiny").text


def test_one_class_only_is_said():
    case = given("classes")
    same = case.y == 1
    report = made(test=[(case.x[same], case.y[same])])
    assert "one class only" in about(report, "one class").text


def test_constant_predictions_are_said():
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.zero_()
    x, y = torch.zeros(60, 3), torch.arange(60) % 2
    report = laplace.report(Laplace(model, "classification").fit([(x, y)]), [(x, y)], ood={"same": x}, out=None)
    assert about(report, "constant").grade == "bad"
    assert [row["auroc"]["value"] for row in report.data["outside"]["rows"]] == [0.5] * 5


def test_an_empty_test_loader_is_one_clear_error(tmp_path):
    for empty in ([], [(torch.empty(0, 4), torch.empty(0, dtype=torch.long))]):
        with pytest.raises(InputError, match="test has no example"):
            made(test=empty, out=tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_nan_in_the_test_data_is_one_clear_error():
    case = given("classes")
    x = case.x.clone()
    x[5] = torch.nan
    with pytest.raises(InputError, match=r"test batch 0.*NaN"):
        made(test=[(x, case.y)])


def test_what_cannot_be_used_is_left_out_with_the_reason():
    case = given("classes")
    nans = torch.full((4, 4), torch.nan)
    report = made(
        val_loader=[],
        train_loader=[],
        ood={"empty": [], "another shape": torch.randn(6, 9), "nan": nans, "far": case.outside},
        shifts={"short": [(case.x[:, :2], case.y)], "fine": [(case.x, case.y)]},
    )
    data = report.data
    assert "no example" in data["missing"][SCALED]
    assert "no example" in data["missing"]["training"]
    assert set(data["outside"]["missing"]) == {"empty", "another shape", "nan"}
    assert {row["set"] for row in data["outside"]["rows"]} == {"far"}
    assert "failed" in data["shifts"][0]["missing"]
    assert data["shifts"][1]["scores"][LAPLACE]["nll"] == pytest.approx(report.score(LAPLACE, "nll"))
    for reason in ("another shape is left out", "No scaled network", "Training data is left out"):
        assert reason in report.html
    written = " ".join(str(report).split())
    for name in ("empty", "another shape", "nan", "short", "The training data"):
        assert f"{name} is left out: " in written
    assert "far is left out" not in written


def test_a_part_of_the_training_data_is_called_a_part():
    case = given("classes")
    train = list(zip(*(part.split(50) for part in case.train[0]), strict=True))
    report = made(train_loader=train)
    assert "training data, the first 200 of 300 examples" in report.html
    assert "200 of 300 examples are scored: about as many as there are test examples" in report.html
    assert "1. training data" not in report.html
    whole = made(train_loader=case.train, shifts={"bad": [(case.x[:, :2], case.y)], "fine": [(case.x, case.y)]})
    assert "1. training data, 300 examples" in whole.html
    assert ">bad</th>" in whole.html
    assert "2. fine" in whole.html  # the second point of the figure
    assert "are scored" not in whole.html


@pytest.mark.parametrize(
    ("kind", "what", "count"), [("classes", "class", 3), ("labels", "label", 3), ("regression", "output", 2)]
)
def test_class_names_are_as_many_as_there_are_classes(kind, what, count):
    for wrong in (count - 1, count + 1):
        with pytest.raises(OptionError, match=rf"one name for each {what} .*{wrong} names.* of {count}\."):
            made(kind, class_names=list("abcde")[:wrong])
    made(kind, class_names=list("abcde")[:count])


def test_what_is_no_posterior_is_refused_with_what_to_write():
    case = given("classes")
    for wrong in (case.la.model, [case.la], "la", None):
        with pytest.raises(OptionError, match=rf"fitted Laplace first, and got a {type(wrong).__name__}\. Write la ="):
            laplace.report(wrong, case.test, out=None)
    with pytest.raises(OptionError, match=r"got a Ensemble\. It goes beside one: sources="):
        laplace.report(Ensemble([case.la.model] * 2, "classification"), case.test, out=None)


def test_inputs_and_labels_are_given_as_one_tuple():
    case = given("classes")
    for x, y in ((case.x, case.y), (case.x.numpy(), case.y.numpy())):
        for given_so in ((x,), (x, y)):
            with pytest.raises(OptionError, match=r"as one tuple: laplace\.report\(la, \(x, y\)\)"):
                laplace.report(case.la, *given_so, out=None)


def test_unknown_options_are_refused_by_the_name_of_the_function():
    case = given("classes")
    with pytest.raises(
        ArgumentError, match=r"^laplace\.report has no option 'ood_loader'\. Write ood=\{\"name\": loader\}"
    ):
        made(ood_loader=case.outside)
    with pytest.raises(ArgumentError, match=r"^laplace\.report has no option 'tite'\. Did you mean 'title'"):
        made(tite="x")
    with pytest.raises(ArgumentError, match=r"Write laplace\.report\(la, test_loader\)"):
        laplace.report(case.la)


def test_a_likelihood_of_ones_own_has_its_log_probability():
    laplacian = from_log_prob(lambda f, y: -((y - f) ** 2 + 0.01).sqrt().sum(-1))
    torch.manual_seed(0)
    x = torch.randn(80, 3)
    y = x[:, :1] + 0.1 * torch.randn(80, 1)
    la = Laplace(nn.Linear(3, 1), laplacian).fit([(x[:40], y[:40])])
    report = laplace.report(la, [(x[40:], y[40:])], ood={"far": 3 * x}, val_loader=[(x, y)], out=None, n_bootstrap=20)
    assert list(report.data["scores"][LAPLACE]) == ["nll"]
    assert "log-probabilities" in report.data["missing"]["figures"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"out": "page.txt"}, "html"),
        ({"ood": [1]}, "mapping"),
        ({"shifts": {1: []}}, "mapping"),
        ({"class_names": "abc"}, "list of names"),
        ({"examples": 3}, "texts"),
        ({"n_bootstrap": 3}, "at least 20"),
        ({"title": 3}, "title"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(options, word):
    def never():
        raise AssertionError
        yield

    with pytest.raises(OptionError, match=word):
        made(test=never(), **options)


def test_scores_and_files_with_wrong_names_are_refused(tmp_path):
    report = made()
    with pytest.raises(OptionError, match="'nll'"):
        report.score(LAPLACE, "nil")
    with pytest.raises(OptionError, match="'Laplace'"):
        report.score("laplace", "nll")
    with pytest.raises(OptionError, match="html"):
        report.save(tmp_path / "page.json")
    assert report.save(tmp_path / "new" / "page.html").read_text() == report.html


def test_what_has_no_report_is_refused():
    with pytest.raises(NotFittedError):
        laplace.report(Laplace(nn.Linear(2, 2), "classification"), [])
    pairs = Laplace(nn.Linear(2, 1), "reward_modeling").fit([(torch.randn(6, 2, 2), torch.ones(6, dtype=torch.long))])
    with pytest.raises(UnsupportedError, match="pairs"):
        laplace.report(pairs, [], out=None)


def test_matplotlib_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "<svg" in made().html
