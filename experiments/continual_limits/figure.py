"""Accuracy over all tasks seen, for every variant: one panel for each number of training images."""

from __future__ import annotations

from pathlib import Path

from experiments.continual_limits.report import Found
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw(found: Found, paper: list[float], path: Path) -> None:
    """Write the figure: priors over weights as lines, those over functions dashed, the paper's black and dotted.

    The prior per tensor is dotted, too: its line lies on that of `kron`.
    """
    sizes = sorted({examples for examples, _ in found})
    fig = Figure(figsize=(1.5 + 4.8 * len(sizes), 4.4), layout="constrained")
    FigureCanvasAgg(fig)
    names = list(dict.fromkeys(name for _, name in found))
    for axes, size in zip(fig.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        for (examples, name), means in found.items():
            if examples == size:
                style = "s--" if name.startswith("FROMP") else "D:" if "per tensor" in name else "o-"
                colour = f"C{names.index(name)}"
                axes.plot(range(1, len(means) + 1), means, style, ms=3, lw=1.2, color=colour, label=name)
        if size == max(sizes) and size == 60_000:
            axes.plot(range(1, len(paper) + 1), paper, "k:", lw=1.5, label="paper, kron, 100 epochs")
        axes.set(xlabel="tasks seen", title=f"{size:,} images a task")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7, loc="lower left")
    fig.axes[0].set_ylabel("accuracy over all of them")
    fig.savefig(path, dpi=150)
