"""Accuracy over all tasks seen, for every variant."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw(found: dict[str, list[float]], paper: list[float], path: Path) -> None:
    """Write the figure: priors over weights as lines, those over functions dashed, the paper's dotted."""
    fig = Figure(figsize=(8, 3.8), layout="constrained")
    FigureCanvasAgg(fig)
    axes = fig.subplots()
    for name, means in found.items():
        style = "s--" if name.startswith("FROMP") else "o-"
        axes.plot(range(1, len(means) + 1), means, style, ms=3, lw=1.2, label=name)
    axes.plot(range(1, len(paper) + 1), paper, "k:", lw=1.5, label="paper, kron, 100 epochs")
    axes.set(xlabel="tasks seen", ylabel="accuracy over all of them", xticks=range(1, len(paper) + 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    fig.savefig(path, dpi=150)
