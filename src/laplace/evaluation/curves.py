"""Curves that compare models in one panel: risk against coverage, and coverage against level.

They return a figure, or draw into axes of yours (`ax=`), in the style of the other figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from laplace.checks import shown
from laplace.errors import InputError
from laplace.evaluation.arrays import Values
from laplace.evaluation.pit import coverage_at
from laplace.evaluation.plots import COLOURS, INK, MUTED, figure_of, new_figure, style
from laplace.evaluation.selective import RiskCoverage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def risk_coverage_diagram(
    models: Mapping[str, RiskCoverage], title: str | None = None, ax: Axes | None = None
) -> Figure:
    """Plot the risk among the most certain examples against their share, one line per model.

    A line that falls to the left means that the uncertainty knows which answers are wrong. The names carry the area
    under the line (AURC).

    Args:
        models: Maps the name of each model to what `risk_coverage(loss, uncertainty)` returned.
        title: Title above the panel.
        ax: Axes of yours to draw into.

    Returns:
        A matplotlib figure; that of `ax` if it is given.

    Raises:
        InputError: there is no model, or a value is not a `RiskCoverage`.
        ImportError: matplotlib is not installed.
    """
    _require(models, RiskCoverage, "risk_coverage(loss, uncertainty)")
    axes = _panel(title, ax)
    for number, (name, curve) in enumerate(models.items()):
        label = f"{name}, AURC {curve.aurc:.3g}"
        axes.plot(curve.coverage.cpu(), curve.risk.cpu(), color=_colour(number), linewidth=1.8, label=label)
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of examples answered", color=INK)
    axes.set_ylabel("mean loss of these", color=INK)
    return _finished(axes)


def coverage_diagram(models: Mapping[str, Values], title: str | None = None, ax: Axes | None = None) -> Figure:
    """Plot the share of targets inside central intervals against their level, one line per model.

    Below the diagonal, intervals are too narrow; above it, too wide.

    Args:
        models: Maps the name of each model to what `gaussian_pit` or `sample_pit` returned.
        title: Title above the panel.
        ax: Axes of yours to draw into.

    Returns:
        A matplotlib figure; that of `ax` if it is given.

    Raises:
        InputError: there is no model, or a value lies outside [0, 1].
        ImportError: matplotlib is not installed.
    """
    _require(models, object, "gaussian_pit(mean, variance, y)")
    levels = np.linspace(0.01, 0.99, 99)
    lines = {name: coverage_at(pit, levels).cpu() for name, pit in models.items()}
    axes = _panel(title, ax)
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.text(0.03, 0.975, "too wide", color=MUTED, fontsize=9, va="top")
    axes.text(0.99, 0.03, "too narrow", color=MUTED, fontsize=9, ha="right")
    for number, (name, found) in enumerate(lines.items()):
        axes.plot(levels, found, color=_colour(number), linewidth=1.8, label=str(name))
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set_xlabel("level of the interval", color=INK)
    axes.set_ylabel("share of targets inside", color=INK)
    return _finished(axes)


def _require(models: Any, kind: type, made_by: str) -> None:
    named = isinstance(models, Mapping) and all(isinstance(one, kind) for one in models.values())
    if not named or not models:
        came = "" if named else f", not {shown(models)}"
        raise InputError(f"no model to draw: pass a mapping from a name to what {made_by} returns{came}.")


def _panel(title: str | None, ax: Axes | None) -> Axes:
    axes = ax
    if axes is None:
        axes = new_figure(width=4.8, height=4.4).add_subplot()
        axes.figure.subplots_adjust(left=0.14, right=0.97, bottom=0.12, top=0.9 if title else 0.97)  # type: ignore[union-attr]
    if title:
        axes.set_title(title, loc="left", color=INK, fontsize=12.5, pad=8)
    style(axes)
    return axes


def _finished(axes: Axes) -> Figure:
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure_of(axes)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
