"""Verdicts on what the posterior is good for: against the network, for unknown inputs, and for selective prediction."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from laplace.evaluation.report.case import Case, calibrate, share
from laplace.evaluation.report.outside import Detected
from laplace.evaluation.report.reading import LAPLACE, NETWORK, SCALED
from laplace.evaluation.report.scores import loss_of
from laplace.evaluation.report.verdicts import Verdict

_GUESSING = 0.6  # an AUROC up to here is as good as guessing
_REFERRED = 0.2  # share of the examples that selective prediction hands to a person


def against(case: Case) -> Iterator[Verdict]:
    """Compare Laplace with the network, and with the rescaled network."""
    worse = case.thresholds.worse
    called = {NETWORK: "the network alone", SCALED: _scaled_name(case)}
    rescales = case.la.likelihood.has_logits or case.la.likelihood.has_noise
    if rescales and not case.validated:
        yield Verdict(
            "note",
            "validation",
            f"{_scaled_name(case).capitalize()} is not in the comparison.",
            "It needs validation data, and without it the comparison is not fair.",
            "Give validation data that is neither training nor test data.",
            "laplace.report(la, test_loader, val_loader=val_loader)",
        )
    for method in (NETWORK, SCALED):
        if method not in case.measured.gains:
            continue
        gain = case.measured.gains[method]["nll"]
        better, sign = ("better", 1) if gain.value > 0 else ("worse", -1)
        ends = sorted([sign * gain.low, sign * gain.high])  # of what the sentence tells: how much better, or worse
        written = [f"{end:.3f}" if ends[0] > 0 else f"{end:+.3f}" for end in ends]
        size = f"{abs(gain.value):.3f} nats per example (95 % interval {' to '.join(written)})."
        if gain.value < -worse and gain.high < 0:
            yield Verdict(
                "bad" if method == NETWORK else "warn",
                f"against {method}",
                f"Laplace predicts worse than {called[method]}.",
                f"By {size}",
                *calibrate(case),
            )
        elif gain.value > worse and gain.low > 0:
            yield Verdict("good", f"against {method}", f"Laplace predicts better than {called[method]}.", f"By {size}")
        else:
            within = f"Laplace is within {worse:g} nats of {called[method]}."
            unclear = f"Whether Laplace predicts {better} than {called[method]} cannot be told from this data."
            yield Verdict(
                "good" if method == NETWORK else "note",
                f"against {method}",
                within if abs(gain.value) <= worse else unclear,
                f"It is {better} by {size}",
            )


def outside(case: Case) -> Iterator[Verdict]:
    """Say which score detects which unknown inputs."""
    for each in case.detected:
        recommended = (LAPLACE, "epistemic") if (LAPLACE, "epistemic") in each.equal else each.best
        method, score = recommended
        best = each.values[recommended]["auroc"]
        plain = next(key for key in each.values if key[0] == NETWORK)
        usual = each.values[plain]["auroc"]
        by = f"the {_score_name(score)} of {_method_name(method)}"
        others = f"the network's {_score_name(plain[1])} has {usual.value:.3f}"
        if best.value < case.thresholds.detection:
            anything = "hardly anything" if best.value > _GUESSING else "nothing"
            every = case.la.runner.spec.weights.label == "all"
            yield Verdict(
                "warn",
                f"outside:{each.name}",
                f"{each.name}: {anything} here tells it from the test data.",
                f"The best AUROC is {best.value:.3f}, by {by}; {others}. 0.5 is guessing.",
                "Do not count on being warned." if every else "Make all weights uncertain: they notice more.",
                "" if every else 'Laplace(model, ..., subset_of_weights="all")',
            )
            continue
        same = plain in each.equal or best.value - usual.value < 0.01
        text = f"the network's {_score_name(plain[1])} will do" if same else f"rank inputs by {by}"
        compared = f"AUROC {best.value:.3f} by {by}; {others}."
        yield Verdict(
            "good", f"outside:{each.name}", f"{each.name}: {text}.", f"{compared} {_which_kind(each)}".strip()
        )


def _which_kind(each: Detected) -> str:
    """Say what kind of inputs these are, judging by the scores that detect them."""
    scores = {score for _, score in each.equal}
    if scores >= {"entropy", "epistemic"} or "entropy" not in {score for _, score in each.values}:
        return ""
    if (LAPLACE, "epistemic") in each.equal:
        return "It is unlike the training data: that is what epistemic uncertainty sees."
    return "It looks like known classes, or lies between them: more data of the known kind would not help."


def selective(case: Case) -> Iterator[Verdict]:
    """Say what is gained if a person answers where the method is least sure."""
    if case.answers.kind == "other" or case.test.n < 20:
        return
    losses, total = loss_of(case.answers), case.answers["total"]
    kept = np.argsort(total, kind="stable")[: max(1, round((1 - _REFERRED) * len(total)))]
    before, after = float(losses.mean()), float(losses[kept].mean())
    shares = case.answers.kind in ("classes", "labels")
    ends = [share(v) if shares else f"{v:.3g}" for v in (before, after)]
    what = "error" if shares else "mean absolute error"
    refer = f"Handing the least sure {100 * _REFERRED:g} % to a person"
    if after < 0.9 * before:
        yield Verdict(
            "good",
            "selective",
            f"{refer} lowers the {what} from {ends[0]} to {ends[1]}.",
            "See the risk-coverage curve.",
        )
    elif before > 0:
        lowers = "hardly lowers" if after < before else "does not lower"
        yield Verdict(
            "note",
            "selective",
            f"{refer} {lowers} the {what} ({ends[0]} to {ends[1]}).",
            "The uncertainty says little about where the errors are.",
        )


def _scaled_name(case: Case) -> str:
    return "the network with a noise from validation data" if case.la.likelihood.has_noise else "temperature scaling"


def _method_name(method: str) -> str:
    return f"the {method}" if method in (NETWORK, SCALED) else method


def _score_name(score: str) -> str:
    return {"total": "predictive spread", "epistemic": "epistemic uncertainty"}.get(score, score)
