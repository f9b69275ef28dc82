"""NLL and ECE over the angle of rotation, and how well unknown images are told apart."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

STYLES = {  # colour, line: Laplace's are solid
    "MAP": ("#222222", "--"),
    "temperature": ("#999999", "--"),
    "DE-5": ("#7570b3", "--"),
    "MC dropout": ("#1f78b4", ":"),
    "SWAG": ("#66c2e8", ":"),
    "VB": ("#b15928", ":"),
    "CSGHMC": ("#6a3d9a", ":"),
    "LA": ("#1b9e77", "-"),
    "LA paper": ("#e6ab02", "-"),
    "LA* paper": ("#d95f02", "-"),
    "mixture of LA": ("#e7298a", "-"),
}
SCORES = {"nll": "NLL, nats", "ece": "ECE", "brier": "Brier score"}


def draw(table: dict[str, dict], path: Path) -> None:
    """Write the figure: three scores over the angle, and one AUROC by the best score of each method."""
    fig = Figure(figsize=(13, 6.4), layout="constrained")
    FigureCanvasAgg(fig)
    top, bottom = fig.subfigures(2, 1, height_ratios=[1.1, 1])
    shown = [name for name in STYLES if name in table]
    for axes, (score, label) in zip(top.subplots(1, len(SCORES)), SCORES.items(), strict=True):
        for name in shown:
            sets, (colour, line) = table[name]["sets"], STYLES[name]
            angles, values = [int(key[1:]) for key in sets], [found[score] for found in sets.values()]
            axes.plot(angles, values, line, color=colour, lw=1.6, label=name)
        axes.set(xlabel="rotation, degrees", ylabel=label, xticks=range(0, 181, 30))
        axes.spines[["top", "right"]].set_visible(False)
    top.legend(*top.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    unknown = list(table["MAP"]["ood"])
    for axes, name in zip(bottom.subplots(1, len(unknown), sharey=True), unknown, strict=True):
        for i, method in enumerate(shown):
            found, colour = table[method]["ood"][name], STYLES[method][0]
            axes.plot(found["confidence"], i, "o", color=colour)
            if "epistemic" in found:
                axes.plot(found["epistemic"], i, "D", mfc="none", color=colour)
        axes.set_yticks(range(len(shown)), shown, fontsize=8)
        axes.grid(axis="y", lw=0.3)
        axes.set(xlabel="AUROC: dot by confidence, diamond by epistemic", title=f"unknown: {name}")
        axes.spines[["top", "right"]].set_visible(False)
    bottom.axes[0].invert_yaxis()
    fig.savefig(path, dpi=120)
