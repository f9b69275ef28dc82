"""NLL of every method inside and outside of the training distribution, one panel for each task."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

TICKS = (-2, -1, -0.5, 0, 0.5, 1, 2, 5, 20, 50, 200)
COLOURS = {"in": "#9ecae1", "out": "#08519c"}
Methods = dict[str, dict]


def draw(found: dict[str, Methods], path: Path) -> None:
    """Write the figure: a dot for the NLL inside, one for the NLL under shift, and a line between them.

    Classifiers are in the upper row, tables with gaps in the lower one. Of these it is the median over features,
    because a few gaps are hopeless for all methods; their axis is logarithmic beyond 1, because MAP is far off.
    """
    rows = [{k: v for k, v in found.items() if k.startswith("gaps") == many} for many in (False, True)]
    rows = [row for row in rows if row]
    fig = Figure(figsize=(12.5, 0.3 + 3.1 * len(rows)), layout="constrained")
    FigureCanvasAgg(fig)
    for part, row in zip(fig.subfigures(len(rows), 1, squeeze=False).flatten(), rows, strict=True):
        panels = part.subplots(1, len(row), sharey=True, squeeze=False).flatten()
        for axes, (task, methods) in zip(panels, row.items(), strict=True):
            _panel(axes, task, methods)
        part.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    fig.savefig(path, dpi=130)


def _panel(axes: Axes, task: str, methods: Methods) -> None:
    names, gaps = list(methods), task.startswith("gaps")
    for y, name in enumerate(names):
        values = {w: scores.get("median_nll", scores["nll"]) for w, scores in methods[name]["sets"].items()}
        axes.plot(list(values.values()), [y] * len(values), color="#cccccc", lw=1.5, zorder=1)
        for which, value in values.items():
            label = which if y == 0 else None
            axes.plot(value, y, "o", ms=5, clip_on=False, color=COLOURS[which], zorder=2, label=label)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(task, fontsize=9)
    axes.set_xlabel("NLL, median over features; logarithmic beyond 1" if gaps else "NLL, nats", fontsize=8)
    if gaps:
        axes.set_xscale("symlog", linthresh=1)
        low, high = axes.get_xlim()
        axes.set_xticks([tick for tick in TICKS if low <= tick <= high], minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", lw=0.3)
    axes.spines[["top", "right"]].set_visible(False)
