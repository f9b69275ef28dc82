"""One point for each configuration: NLL against AUROC, coloured by each component in turn.

Most NLLs of a task lie close to the least one, a few far off: the axis is the logarithm of what they are above it.
"""

from __future__ import annotations

from pathlib import Path

from experiments.configurations.tasks import PARTS
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a")
LEAST = 1e-4  # nats above the best that the axis begins at
TITLES = {"cifar10": "CIFAR-10", "fmnist": "Fashion-MNIST"}


def draw(tasks: dict[str, dict], references: dict[str, dict], file: Path) -> None:
    """Write the figure: a row for each task, a panel for each component; crosses are networks without a posterior."""
    fig = Figure(figsize=(3 * len(PARTS), 3.1 * len(tasks)), layout="constrained")
    FigureCanvasAgg(fig)
    grid = fig.subplots(len(tasks), len(PARTS), squeeze=False, sharey="row", sharex="row")
    for panels, (task, points) in zip(grid, tasks.items(), strict=True):
        best = min(row["nll"] for row in (*points.values(), *references[task].values()))
        for i, (axes, (part, values)) in enumerate(zip(panels, PARTS.items(), strict=True)):
            for value, colour in zip(values, COLOURS, strict=False):
                own = [row for name, row in points.items() if name.split("/")[i] == value]
                if own:
                    xy = zip(*(_place(row, best) for row in own), strict=True)
                    axes.plot(*xy, "o", ms=4, alpha=0.7, mew=0, color=colour, label=value.replace("_", " "))
            for mark, (name, row) in zip("xP", references[task].items(), strict=False):
                axes.plot(*_place(row, best), mark, ms=6, color="#222222", label=None if i else name)
            axes.set(title=f"{TITLES[task]}: {part}", xlabel=f"NLL above {best:.3f}, nats", xscale="log")
            axes.legend(frameon=False, fontsize=7)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel("AUROC by confidence")
    fig.savefig(file, dpi=130)


def _place(row: dict, best: float) -> tuple[float, float]:
    return max(row["nll"] - best, LEAST), row["auroc_confidence"]
