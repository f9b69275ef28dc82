"""NLL and ECE over the angle of rotation, and how well unknown images are told apart."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {
    "MAP": "#888888",
    "temperature": "#d95f02",
    "DE-5": "#7570b3",
    "LA": "#1b9e77",
    "LA paper": "#e6ab02",
    "mixture of LA": "#e7298a",
    "MC dropout": "#1f78b4",
    "SWAG": "#a6cee3",
    "VB": "#b15928",
    "CSGHMC": "#6a3d9a",
}


def draw(table: dict[str, dict], path: Path) -> None:
    """Write the figure."""
    fig = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(fig)
    axes = fig.subplots(1, 3)
    shown = [name for name in COLOURS if name in table]
    for name in shown:
        sets = table[name]["sets"]
        angles = [int(key[1:]) for key in sets]
        for axis, score in zip(axes, ("nll", "ece"), strict=False):
            axis.plot(angles, [found[score] for found in sets.values()], "o-", ms=3, color=COLOURS[name], label=name)
    axes[0].set(xlabel="rotation, degrees", ylabel="NLL, nats", title="Rotated MNIST")
    axes[1].set(xlabel="rotation, degrees", ylabel="ECE", title="Rotated MNIST")
    axes[0].legend(frameon=False, fontsize=7)
    width, unknown = 0.8 / len(shown), list(table["MAP"]["ood"])
    for i, name in enumerate(shown):
        best = [max(v for k, v in table[name]["ood"][s].items() if k != "mean_confidence") for s in unknown]
        axes[2].bar([k + i * width for k in range(len(unknown))], best, width * 0.9, color=COLOURS[name])
    axes[2].set_xticks([k + 0.4 for k in range(len(unknown))], unknown)
    axes[2].set(ylim=(0.85, 1.0), ylabel="AUROC, best of three scores", title="Unknown images")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=150)
