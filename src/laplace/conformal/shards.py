"""Calibrate on many processes, each of which has a part of the examples: all get the scores of all."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laplace.conformal.rules import IntervalRule, SetRule
from laplace.distributed import Reduce


@dataclass(frozen=True)
class Found:
    """Holds what a process has found in its part of the examples.

    Attributes:
        rule: The score. None without an example.
        kind: What is predicted: 'classes', 'labels', 'regression' or 'counts'.
        n_classes: How many classes there are; 0 for numbers.
        kept: By batch, what is kept of each example: (n, G, K) of numbers, the scores (n, G) of classes.
        labels: By batch, the true classes, (n, G).
    """

    rule: IntervalRule | SetRule | None
    kind: str
    n_classes: int
    kept: list[Tensor]
    labels: list[Tensor]


def of_all_ranks(own: Found, reduce: Reduce) -> Found:
    """Return what all processes have found together, rank after rank. The order of scores does not matter."""
    reports = [report for report in reduce.agree(lambda: own) if report.rule is not None]
    if not reports:
        return own
    first = reports[0]
    kept = [part for report in reports for part in report.kept]
    labels = [part for report in reports for part in report.labels]
    return Found(first.rule, first.kind, first.n_classes, kept, labels)
