"""Scores over the severity of the corruption, and how well unknown images are told apart."""

from __future__ import annotations

from pathlib import Path

from experiments.uq import panels

STYLES = {  # Laplace's lines are solid
    "MAP": ("#222222", "--"),
    "temperature": ("#999999", "--"),
    "ensemble": ("#7570b3", "--"),
    "SWAG": ("#66c2e8", ":"),
    "SWAG temperature": ("#e7298a", ":"),
    "LA": ("#1b9e77", "-"),
    "LA calibrated": ("#66a61e", "-"),
    "LA paper": ("#e6ab02", "-"),
    "LA* paper": ("#d95f02", "-"),
    "LA all weights evidence": ("#1f78b4", "-"),
    "LA all weights": ("#a6761d", "-"),
    "LA all weights calibrated": ("#6a3d9a", "-"),
    "mixture of LA": ("#e7298a", "-"),
}


def draw(table: dict[str, dict], path: Path) -> None:
    """Write the figure."""
    severities = [int(name[1:]) for name in table["MAP"]["sets"]]
    panels.draw(table, STYLES, severities, "severity of the corruption", path)
