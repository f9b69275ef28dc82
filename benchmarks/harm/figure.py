"""The figure: how far each method's NLL is from the network's, task by task."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .promises import HARM
from .report import COLUMNS, WEIGHTS, Table, named

MARKS = {  # colour and marker of each method
    "temperature": ("#7f7f7f", "|"),
    "evidence probit": ("#d62728", "X"),
    "evidence mc": ("#ff9896", "P"),
    "evidence one_vs_rest": ("#ff7f0e", "D"),
    "evidence": ("#d62728", "X"),
    "loo": ("#9467bd", "v"),
    "auto": ("#1f77b4", "o"),
    "calibrate": ("#2ca02c", "s"),
    "calibrate-best": ("#98df8a", "s"),
}


def draw(table: Table, path: Path) -> None:
    """Write one panel per posterior: classes above, regression below; left of zero is better than the network."""
    kinds = [("classes", table.classes), ("regression", table.values)]
    kinds = [(kind, tasks) for kind, tasks in kinds if tasks]
    heights = [len(tasks) + 1.5 for _, tasks in kinds]
    figure, grid = plt.subplots(
        len(kinds), len(WEIGHTS), figsize=(15, 1.5 + 0.42 * sum(heights)), squeeze=False, sharey="row",
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for row, (kind, tasks) in zip(grid, kinds, strict=True):
        for axes, weights in zip(row, WEIGHTS, strict=True):
            _panel(axes, table, tasks, weights)
            axes.set_title(f"{kind}, {weights}", fontsize=10, loc="left")
    handles = {label: h for axes in grid.flat for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=5, frameon=False, fontsize=9)
    figure.supxlabel(
        "NLL minus the network's, nats (linear within 0.01, logarithmic beyond); left is better", fontsize=10
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.6 / figure.get_figheight()))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axes: Axes, table: Table, tasks: list[str], weights: str) -> None:
    axes.axvspan(-HARM, HARM, color="#eeeeee", zorder=0)
    axes.axvline(0, color="black", linewidth=0.8, zorder=1)
    present = [m for m in MARKS if any(table.excess(t, named(weights, m)) is not None for t in tasks)]
    for i, method in enumerate(present):
        offset = 0.6 * ((i + 0.5) / len(present) - 0.5)
        points = [(table.excess(task, named(weights, method)), y) for y, task in enumerate(tasks)]
        shown = [(x, y + offset) for x, y in points if x is not None]
        colour, marker = MARKS[method]
        label = "temperature / validation noise" if method == "temperature" else COLUMNS[method]
        axes.scatter(*zip(*shown, strict=True), c=colour, marker=marker, s=34, label=label, zorder=2)
    axes.set_xscale("symlog", linthresh=HARM)
    axes.set_yticks(range(len(tasks)), tasks, fontsize=9)
    axes.set_ylim(len(tasks) - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
