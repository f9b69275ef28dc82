"""Scores over the angle of rotation, and how well unknown images are told apart."""

from __future__ import annotations

from pathlib import Path

from experiments.uq import panels

STYLES = {  # Laplace's lines are solid
    "MAP": ("#222222", "--"),
    "temperature": ("#999999", "--"),
    "DE-5": ("#7570b3", "--"),
    "MC dropout": ("#1f78b4", ":"),
    "SWAG": ("#66c2e8", ":"),
    "VB": ("#b15928", ":"),
    "IVON": ("#33a02c", ":"),
    "CSGHMC": ("#6a3d9a", ":"),
    "LA": ("#1b9e77", "-"),
    "LA calibrated": ("#66a61e", "-."),
    "LA paper": ("#e6ab02", "-"),
    "LA* paper": ("#d95f02", "-"),
    "mixture of LA": ("#e7298a", "-"),
}


def draw(table: dict[str, dict], path: Path) -> None:
    """Write the figure."""
    angles = [int(name[1:]) for name in table["MAP"]["sets"]]
    panels.draw(table, STYLES, angles, "rotation, degrees", path)
