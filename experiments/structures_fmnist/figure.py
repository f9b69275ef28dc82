"""Test log-likelihood, AUROC and CPU seconds of each structure, beside the paper's."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANELS = (("log_likelihood", "test log-likelihood", 0), ("accuracy", "accuracy", 1), ("auroc", "AUROC", 2))


def draw(table: dict[str, dict], paper: dict[str, tuple], file: Path) -> None:
    """Write the figure."""
    fig = Figure(figsize=(11, 3.2), layout="constrained")
    FigureCanvasAgg(fig)
    names = [name for name in table if "temperature" not in name]
    for axes, (key, title, at) in zip(fig.subplots(1, len(PANELS)), PANELS, strict=True):
        axes.plot(names, [table[name][key] for name in names], "o", color="#1b9e77", label="here")
        beside = [name for name in names if name in paper]
        axes.plot(beside, [paper[name][at] for name in beside], "x", color="#d95f02", label="paper (another CNN)")
        axes.set(title=title)
        axes.margins(y=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", lw=0.4)
    fig.axes[0].legend(frameon=False, fontsize=8)
    fig.savefig(file, dpi=130)
