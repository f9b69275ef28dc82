"""NLL over the severity of the corruption, and how well unknown images are told apart."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {
    "MAP": "#888888",
    "temperature": "#d95f02",
    "ensemble": "#7570b3",
    "LA": "#1b9e77",
    "LA calibrated": "#66a61e",
    "LA paper": "#e6ab02",
    "LA* paper": "#a6761d",
    "mixture of LA": "#e7298a",
}


def draw(table: dict[str, dict], path: Path) -> None:
    """Write the figure."""
    fig = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(fig)
    left, right = fig.subplots(1, 2, width_ratios=[1.2, 1])
    shown = [name for name in COLOURS if name in table]
    for name in shown:
        sets = table[name]["sets"]
        left.plot(
            range(len(sets)), [found["nll"] for found in sets.values()], "o-", ms=3, color=COLOURS[name], label=name
        )
    left.set(xlabel="severity of the corruption", ylabel="NLL, nats", title="CIFAR-10-C")
    left.legend(frameon=False, fontsize=8)
    width, unknown = 0.8 / len(shown), list(table["MAP"]["ood"])
    for i, name in enumerate(shown):
        best = [max(v for k, v in table[name]["ood"][s].items() if k != "mean_confidence") for s in unknown]
        right.bar([k + i * width for k in range(len(unknown))], best, width * 0.9, color=COLOURS[name])
    right.set_xticks([k + 0.4 for k in range(len(unknown))], unknown)
    right.set(ylim=(0.8, 1.0), ylabel="AUROC, best of three scores", title="Unknown images")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=150)
