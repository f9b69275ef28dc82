"""Say in words what the numbers mean, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from laplace.checks import shown
from laplace.errors import OptionError
from laplace.evaluation.report.answers import LEVELS

GRADES: Final = ("bad", "warn", "good", "note")  # the order in which they are told


@dataclass(frozen=True)
class Thresholds:
    """Holds the limits beyond which a report criticises. Each can be set: `Thresholds(calibration=0.01, level=0.95)`.

    A difference counts only if its bootstrap interval also excludes zero.

    Args:
        calibration: Gap of mean confidence and accuracy, as a share: 0.02 is two points.
        ece: Expected calibration error.
        coverage: Gap between the level of an interval and the share of labels that it holds.
        level: The level of that interval: one of 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99.
        worse: By how many nats per example Laplace may be worse than the network, or than the rescaled network.
        detection: AUROC below which inputs from outside count as unnoticed.
        smallest: Fewer test examples than this are a tiny test set.
        in_common: Share of the test examples that may be among the training data.
    """

    calibration: float = 0.02
    ece: float = 0.05
    coverage: float = 0.03
    level: float = 0.9
    worse: float = 0.005
    detection: float = 0.75
    smallest: int = 200
    in_common: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise OptionError(f"Thresholds({field.name}={shown(value)}): a number from 0 up is needed.")
        if self.level not in LEVELS:
            raise OptionError(f"Thresholds(level={self.level:g}): one of {', '.join(map(str, LEVELS))} is needed.")


@dataclass(frozen=True)
class Verdict:
    """States one finding, in words.

    Attributes:
        grade: 'bad' (fix it before you rely on the numbers), 'warn', 'good' or 'note'.
        about: What it is about: 'calibration', 'coverage', 'network', 'outside:<name>', ...
        text: The finding, in one short sentence.
        detail: The numbers behind it.
        action: What to do, or ''.
        code: What to write, or ''.
    """

    grade: str
    about: str
    text: str
    detail: str = ""
    action: str = ""
    code: str = ""


def ordered(verdicts: list[Verdict]) -> list[Verdict]:
    """Return the verdicts with the gravest first."""
    return sorted(verdicts, key=lambda verdict: GRADES.index(verdict.grade))


def headline(verdicts: list[Verdict]) -> tuple[str, str]:
    """Return the grade of the whole, and one sentence."""
    grades = [verdict.grade for verdict in verdicts]
    if bad := grades.count("bad"):
        return "bad", f"Do not rely on these uncertainties yet: {_count(bad + grades.count('warn'), 'thing')} to mend."
    if any(verdict.about == "tiny" for verdict in verdicts):
        return "warn", "There are too few test examples for a verdict."
    if warn := grades.count("warn"):
        return "warn", f"Usable, with {_count(warn, 'thing')} to look at."
    return "good", "You can rely on these uncertainties, on data like the test set."


def next_steps(verdicts: list[Verdict], refer: dict[str, Any] | None) -> list[dict[str, str]]:
    """Return what to do, each thing once, the gravest first."""
    steps: dict[str, dict[str, str]] = {}
    for verdict in ordered(verdicts):
        if verdict.action and verdict.grade in ("bad", "warn", "note"):
            key = verdict.code or verdict.action
            steps.setdefault(key, {"text": verdict.action, "why": verdict.text, "code": verdict.code})
    if refer and not any(verdict.grade == "bad" for verdict in verdicts):
        steps["refer"] = {
            "text": "To hand unusual inputs to a person, refuse those with more epistemic uncertainty than 95 % of the "
            "test data have.",
            "why": "",
            "code": f"la.predict(x).epistemic > {refer['epistemic']:.3g}",
        }
    return list(steps.values())


def _count(n: int, what: str) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return f"{words[n] if n < len(words) else n} {what}{'' if n == 1 else 's'}"
