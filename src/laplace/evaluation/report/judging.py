"""The rules behind the verdicts: each looks at some numbers, and says something or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from laplace.evaluation.report.answers import LEVELS, Answers
from laplace.evaluation.report.bootstrap import Estimate
from laplace.evaluation.report.outside import Detected
from laplace.evaluation.report.reading import LAPLACE, NETWORK, SCALED, Reading, Reported
from laplace.evaluation.report.scores import Measured, loss_of
from laplace.evaluation.report.verdicts import Thresholds, Verdict

_CALIBRATE = "la.calibrate(val_loader)"
_REFERRED = 0.2  # share of the examples that selective prediction hands to a person


@dataclass(frozen=True)
class Case:
    """All that a verdict may look at.

    Attributes:
        la: The posterior.
        test: What all methods say of the test data.
        measured: Their scores.
        thresholds: From where on there is fault.
        validated: Whether there was validation data.
        changed: What has changed in the network since the fit, or None.
        in_common: How many test examples are among the training data; None if unknown.
        curve: The evidence along the prior precision, or None.
        detected: How well inputs from outside are noticed.
    """

    la: Reported
    test: Reading
    measured: Measured
    thresholds: Thresholds
    validated: bool
    changed: str | None
    in_common: int | None
    curve: dict[str, Any] | None
    detected: list[Detected]

    @property
    def mine(self) -> dict[str, Estimate]:
        """Return the scores of Laplace."""
        return self.measured.values[LAPLACE]

    @property
    def answers(self) -> Answers:
        """Return the answers of Laplace."""
        return self.test.answers[LAPLACE]


def judge(case: Case) -> list[Verdict]:
    """Return all verdicts, in the order of the rules."""
    rules = (_stale, _tiny, _in_common, _degenerate, _calibration, _coverage, _against, _prior, _outside, _selective)
    return [verdict for rule in rules for verdict in rule(case)]


def _stale(case: Case) -> Iterator[Verdict]:
    if case.changed:
        yield Verdict(
            "bad",
            "stale",
            "The posterior belongs to other weights than the network has now.",
            f"Since fit, {case.changed}.",
            "Fit again, then make this report again.",
            "la.fit(train_loader)",
        )


def _tiny(case: Case) -> Iterator[Verdict]:
    n, least = case.test.n, case.thresholds.smallest
    if n < least:
        yield Verdict(
            "warn",
            "tiny",
            f"The test set has only {n} example{'' if n == 1 else 's'}.",
            f"The intervals are wide, and bootstrap intervals of so few examples are too narrow. Take {least} or more.",
            "Collect more test examples before you decide anything.",
        )


def _in_common(case: Case) -> Iterator[Verdict]:
    common, n = case.in_common, case.test.n
    if common and common / n > case.thresholds.in_common:
        yield Verdict(
            "bad",
            "leak",
            f"{common:,} of the {n:,} test examples are training examples, too.",
            "Scores on examples that the network was trained on are too good.",
            "Take them out of the test set.",
        )


def _degenerate(case: Case) -> Iterator[Verdict]:
    answers = case.answers
    if answers.kind == "classes":
        y = answers["y"]
        classes = np.unique(y)
        if len(classes) == 1:
            yield Verdict(
                "warn",
                "one class",
                "The test set has one class only.",
                f"Every label is {int(classes[0])}: accuracy and calibration say nothing about the other classes.",
                "Take a test set with all classes.",
            )
        commonest = float(np.bincount(y.astype(np.int64)).max() / len(y))
        accuracy = case.mine["accuracy"]
        if len(classes) > 1 and accuracy.value <= commonest:
            yield Verdict(
                "warn",
                "useless",
                "The network is no better than always answering the commonest class.",
                f"Its accuracy is {_share(accuracy.value)}, and {_share(commonest)} of the labels are of one class.",
                "Look at the training, not at the uncertainty.",
            )
    column = answers.columns.get("p", answers.columns.get("mean"))
    if column is not None and len(column) > 1 and float(np.ptp(column, axis=0).max()) < 1e-9:
        yield Verdict(
            "bad",
            "constant",
            "The predictions are the same for every input.",
            "A network that ignores its input has nothing to be uncertain about.",
            "Look at the network and at the test inputs.",
        )
    elif float(answers["epistemic"].max()) <= 1e-9:
        yield Verdict(
            "note",
            "narrow",
            "The posterior is so narrow that it is the network itself.",
            "Nothing is epistemic: unknown inputs cannot be told by it.",
            "Take a smaller prior precision, or more weights.",
            'Laplace(model, ..., subset_of_weights="all")',
        )


def _calibration(case: Case) -> Iterator[Verdict]:
    if "gap" not in case.mine:
        return
    gap, ece, limits = case.mine["gap"], case.mine["ece"], case.thresholds
    accuracy = case.mine["accuracy"].value
    sure = f"On average it is {_share(accuracy + gap.value)} sure, and right {_share(accuracy)} of the time."
    action, code = _calibrate(case)
    if abs(gap.value) > limits.calibration and gap.excludes(0):
        word = "Overconfident" if gap.value > 0 else "Underconfident"
        grade = "bad" if abs(gap.value) > 2.5 * limits.calibration else "warn"
        points = f"{word} by {_points(gap.value)} (between {_points(gap.low, gap.high)})."
        yield Verdict(grade, "calibration", points, sure, action, code)
    elif ece.low > limits.ece:
        yield Verdict(
            "warn",
            "calibration",
            f"Right on average, but not at every confidence: ECE {_share(ece.value)}.",
            f"{sure} See the reliability diagram for where the gaps are.",
            action,
            code,
        )
    elif max(abs(gap.low), abs(gap.high)) > 2.5 * limits.calibration:
        ends = f"between {100 * gap.low:+.1f} and {100 * gap.high:+.1f} points"
        yield Verdict("note", "calibration", f"Too few examples to judge the confidence: its gap is {ends}.", sure)
    else:
        yield Verdict("good", "calibration", f"The confidence is earned, to within {_points(gap.value)}.", sure)


def _coverage(case: Case) -> Iterator[Verdict]:
    if "coverage" not in case.mine:
        return
    level = case.thresholds.level
    held = case.mine["coverage"]
    at = LEVELS.index(level)
    meant = float(case.answers["held"][..., at].mean())
    off = held - meant
    name = f"The {100 * level:g} % interval holds {_share(held.value)}"
    detail = f"Between {_share(held.low)} and {_share(held.high)} of new labels, by the bootstrap."
    if meant > level + 0.005:
        detail += f" Counts jump, so that its intervals should hold {_share(meant)}."
    if abs(off.value) > case.thresholds.coverage and off.excludes(0):
        width = "too narrow" if off.value < 0 else "too wide"
        action, _ = _calibrate(case)
        yield Verdict(
            "bad" if off.value < -2 * case.thresholds.coverage else "warn",
            "coverage",
            f"{name}: it is {width}.",
            detail,
            f"{action} Or guarantee the coverage with conformal prediction.",
            f"{_CALIBRATE}\nla.conformal(cal_loader, level={level:g})",
        )
    elif max(abs(off.low), abs(off.high)) > 3 * case.thresholds.coverage:
        yield Verdict("note", "coverage", f"{name}, of too few examples to judge.", detail)
    else:
        yield Verdict("good", "coverage", f"{name}.", detail)


def _against(case: Case) -> Iterator[Verdict]:
    """Compare with the network, and with its rescaled self: whichever is the harder one."""
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
        size = f"{abs(gain.value):.3f} nats per example (from {gain.low:+.3f} to {gain.high:+.3f})"
        if gain.value < -worse and gain.high < 0:
            yield Verdict(
                "bad" if method == NETWORK else "warn",
                f"against {method}",
                f"Laplace predicts worse than {called[method]}.",
                f"By {size}.",
                *_calibrate(case),
            )
        elif gain.value > worse and gain.low > 0:
            yield Verdict("good", f"against {method}", f"Laplace predicts better than {called[method]}.", f"By {size}.")
        else:
            yield Verdict(
                "good" if method == NETWORK else "note",
                f"against {method}",
                f"Laplace predicts as well as {called[method]}.",
                f"The difference is {size}.",
            )


def _prior(case: Case) -> Iterator[Verdict]:
    curve = case.curve
    if curve is not None and curve["edge"]:
        way = "smaller" if curve["edge"] == "low" else "larger"
        yield Verdict(
            "warn",
            "evidence",
            f"The evidence has its optimum at the edge: it keeps growing towards {way} prior precisions.",
            "So it does not determine the prior. Take validation data for that.",
            *_calibrate(case),
        )


def _outside(case: Case) -> Iterator[Verdict]:
    for each in case.detected:
        recommended = (LAPLACE, "epistemic") if (LAPLACE, "epistemic") in each.equal else each.best
        method, score = recommended
        best = each.values[recommended]["auroc"]
        plain = next(key for key in each.values if key[0] == NETWORK)
        usual = each.values[plain]["auroc"]
        by = f"{'the network' if method == NETWORK else method}'s {_score_name(score)}"
        others = f"the network's {_score_name(plain[1])} has {usual.value:.3f}"
        if best.value < case.thresholds.detection:
            every = case.la.runner.spec.weights.label == "all"
            yield Verdict(
                "warn",
                f"outside:{each.name}",
                f"{each.name}: nothing here tells it from the test data.",
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
    """Say what kind of inputs these are, from which score finds them."""
    scores = {score for _, score in each.equal}
    if scores >= {"entropy", "epistemic"} or "entropy" not in {score for _, score in each.values}:
        return ""
    if (LAPLACE, "epistemic") in each.equal:
        return "It is unlike the training data: that is what epistemic uncertainty sees."
    return "It looks like known classes, or lies between them: more data of the known kind would not help."


def _selective(case: Case) -> Iterator[Verdict]:
    if case.answers.kind == "other" or case.test.n < 20:
        return
    losses, total = loss_of(case.answers), case.answers["total"]
    kept = np.argsort(total, kind="stable")[: max(1, round((1 - _REFERRED) * len(total)))]
    before, after = float(losses.mean()), float(losses[kept].mean())
    shares = case.answers.kind in ("classes", "labels")
    ends = [_share(v) if shares else f"{v:.3g}" for v in (before, after)]
    what = "error" if shares else "mean absolute error"
    if after < 0.9 * before:
        yield Verdict(
            "good",
            "selective",
            f"Handing the least sure {100 * _REFERRED:g} % to a person lowers the {what} from {ends[0]} to {ends[1]}.",
            "See the risk-coverage curve.",
        )
    elif before > 0:
        yield Verdict(
            "note",
            "selective",
            f"Handing the least sure {100 * _REFERRED:g} % to a person hardly lowers the {what}: {ends[0]} to {ends[1]}.",
            "The uncertainty does not tell where the errors are.",
        )


def _calibrate(case: Case) -> tuple[str, str]:
    """Return what to do about predictions that do not fit, and what to write."""
    if case.validated or case.la.softmax_temperature == 1:
        return "Calibrate on validation data.", _CALIBRATE
    return "Calibrate on validation data that is like the test data.", _CALIBRATE


def _scaled_name(case: Case) -> str:
    return "the network with a noise from validation data" if case.la.likelihood.has_noise else "temperature scaling"


def _score_name(score: str) -> str:
    return {"total": "predictive spread", "epistemic": "epistemic uncertainty"}.get(score, score)


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _points(*values: float) -> str:
    text = " and ".join(f"{abs(100 * value):.1f}" for value in sorted(values, key=abs))
    return f"{text} points"
