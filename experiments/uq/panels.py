"""The figure of a study of uncertainty: scores over the shift, and how well unknown images are told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.uq.report import SPELT
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SCORES = {"nll": "NLL, nats", "ece": "ECE", "brier": "Brier score"}
Styles = Mapping[str, tuple[str, str]]  # colour and line of each method that is shown


def draw(table: dict[str, dict], styles: Styles, shifts: Sequence[int], label: str, path: Path) -> None:
    """Write the figure.

    Args:
        table: The scores of each method.
        styles: The methods that are shown.
        shifts: How far each labelled set is shifted, in the order of the table.
        label: What the shift is.
        path: The file.
    """
    fig = Figure(figsize=(13, 6.6), layout="constrained")
    FigureCanvasAgg(fig)
    top, bottom = fig.subfigures(2, 1, height_ratios=[1.1, 1])
    shown = [name for name in styles if name in table]
    for axes, (score, title) in zip(top.subplots(1, len(SCORES)), SCORES.items(), strict=True):
        for name in shown:
            values, (colour, line) = [found[score] for found in table[name]["sets"].values()], styles[name]
            axes.plot(shifts, values, line, color=colour, lw=1.6, label=name)
        axes.set(xlabel=label, ylabel=title)
        axes.spines[["top", "right"]].set_visible(False)
    top.legend(*top.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    unknown = list(table["MAP"]["ood"])
    for axes, name in zip(bottom.subplots(1, len(unknown), sharey=True), unknown, strict=True):
        for i, method in enumerate(shown):
            found, colour = table[method]["ood"][name], styles[method][0]
            axes.plot(found["confidence"], i, "o", color=colour)
            if "epistemic" in found:
                axes.plot(found["epistemic"], i, "D", mfc="none", color=colour)
        axes.set_yticks(range(len(shown)), shown, fontsize=8)
        axes.grid(axis="y", lw=0.3)
        axes.set(xlabel="AUROC: dot by confidence, diamond by epistemic", title=f"unknown: {SPELT[name]}")
        axes.spines[["top", "right"]].set_visible(False)
    bottom.axes[0].invert_yaxis()
    fig.savefig(path, dpi=120)
