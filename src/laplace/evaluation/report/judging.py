"""Define the rules behind the verdicts. Each looks at some numbers, and yields a verdict or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from laplace.evaluation.report.answers import LEVELS
from laplace.evaluation.report.case import CALIBRATE, Case, calibrate, points, share
from laplace.evaluation.report.comparing import against, outside, selective
from laplace.evaluation.report.verdicts import Verdict

_MANY = 0.05  # share of the test examples from where on a leak spoils all scores


def judge(case: Case) -> list[Verdict]:
    """Return all verdicts, in the order of the rules. On a tiny test set no estimate is graded 'bad'."""
    facts = (_stale, _tiny, _in_common, _degenerate)
    estimates = (_calibration, _coverage, against, _prior, outside, selective)
    found = [verdict for rule in facts for verdict in rule(case)]
    estimated = [verdict for rule in estimates for verdict in rule(case)]
    if case.test.n < case.thresholds.smallest:
        estimated = [replace(each, grade="warn") if each.grade == "bad" else each for each in estimated]
    return found + estimated


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
            "bad" if common / n > _MANY else "warn",
            "leak",
            f"{common:,} of the {n:,} test examples are training examples, too.",
            "Scores on examples that the network was trained on are too good.",
            "Take them out of the test set.",
        )
    elif case.reused:
        fitted = "fitted" in case.reused
        yield Verdict(
            "bad" if fitted else "warn",
            "leak" if fitted else "reuse",
            f"The test data {case.reused}.",
            "Scores on data that was used before are too good.",
            "Take test data that was used neither to train nor to tune.",
        )
    elif case.validating / n > _MANY:
        yield Verdict(
            "warn",
            "reuse",
            f"{case.validating:,} of the {n:,} test examples are validation examples, too.",
            "The network is rescaled on them, and perhaps the posterior was tuned on them, so scores are too good.",
            "Split them: one part to calibrate, another to test.",
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
                f"Its accuracy is {share(accuracy.value)}, and {share(commonest)} of the labels are of one class.",
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
            "Its epistemic uncertainty is zero everywhere, so it cannot detect unknown inputs.",
            "Take a smaller prior precision, or more weights.",
            'Laplace(model, ..., subset_of_weights="all")',
        )


def _calibration(case: Case) -> Iterator[Verdict]:
    if "gap" not in case.mine:
        return
    gap, ece, limits = case.mine["gap"], case.mine["ece"], case.thresholds
    accuracy = case.mine["accuracy"].value
    sure = f"On average it is {share(accuracy + gap.value)} sure, and right {share(accuracy)} of the time."
    action, code = calibrate(case)
    if abs(gap.value) > limits.calibration and gap.excludes(0):
        word = "Overconfident" if gap.value > 0 else "Underconfident"
        grade = "bad" if abs(gap.value) > 2.5 * limits.calibration else "warn"
        text = f"{word} by {points(gap.value)} (between {points(gap.low, gap.high)})."
        yield Verdict(grade, "calibration", text, sure, action, code)
    elif ece.low > limits.ece:
        yield Verdict(
            "warn",
            "calibration",
            f"Right on average, but not at every confidence: ECE {share(ece.value)}.",
            f"{sure} See the reliability diagram for where the gaps are.",
            action,
            code,
        )
    elif max(abs(gap.low), abs(gap.high)) > 2.5 * limits.calibration:
        ends = f"between {100 * gap.low:+.1f} and {100 * gap.high:+.1f} points"
        yield Verdict("note", "calibration", f"Too few examples to judge the confidence: its gap is {ends}.", sure)
    else:
        yield Verdict("good", "calibration", f"The confidence is earned, to within {points(gap.value)}.", sure)


def _coverage(case: Case) -> Iterator[Verdict]:
    if "coverage" not in case.mine:
        return
    level = case.thresholds.level
    held = case.mine["coverage"]
    at = LEVELS.index(level)
    meant = float(case.answers["held"][..., at].mean())
    off = held - meant
    name = f"The {100 * level:g} % interval holds {share(held.value)}"
    detail = f"Between {share(held.low)} and {share(held.high)} of new labels, by the bootstrap."
    if meant > level + 0.005:
        detail += f" Counts are whole numbers, so its intervals should hold {share(meant)}."
    if abs(off.value) > case.thresholds.coverage and off.excludes(0):
        width = "too narrow" if off.value < 0 else "too wide"
        action, _ = calibrate(case)
        yield Verdict(
            "bad" if off.value < -2 * case.thresholds.coverage else "warn",
            "coverage",
            f"{name}: it is {width}.",
            detail,
            f"{action} Or guarantee the coverage with conformal prediction.",
            f"{CALIBRATE}\nla.conformal(cal_loader, level={level:g})",
        )
    elif max(abs(off.low), abs(off.high)) > 3 * case.thresholds.coverage:
        yield Verdict("note", "coverage", f"{name}, of too few examples to judge.", detail)
    else:
        yield Verdict("good", "coverage", f"{name}.", detail)


def _prior(case: Case) -> Iterator[Verdict]:
    curve = case.curve
    if curve is not None and curve["edge"]:
        way = "smaller" if curve["edge"] == "low" else "larger"
        yield Verdict(
            "warn",
            "evidence",
            f"The evidence has its optimum at the edge: it keeps growing towards {way} prior precisions.",
            "So it does not determine the prior. Take validation data for that.",
            *calibrate(case),
        )
