"""NLL of every method inside and outside of the training distribution, one panel for each task."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {"in": "#9ecae1", "out": "#08519c"}


def draw(found: dict[str, dict[str, dict]], path: Path) -> None:
    """Write the figure: a dot for the NLL inside, one for the NLL under shift, and a line between them.

    Of tables with gaps it is the median over features: a few gaps are hopeless for all methods.
    """
    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    fig = Figure(figsize=(3.6 * columns, 0.6 + 3.0 * lines), layout="constrained")
    FigureCanvasAgg(fig)
    panels = fig.subplots(lines, columns, squeeze=False).flatten()
    for axes, (task, methods) in zip(panels, found.items(), strict=False):
        names = list(methods)[::-1]
        for y, name in enumerate(names):
            values = {w: scores.get("median_nll", scores["nll"]) for w, scores in methods[name]["sets"].items()}
            axes.plot(list(values.values()), [y] * len(values), color="#cccccc", lw=1.5, zorder=1)
            for which, value in values.items():
                axes.scatter([value], [y], color=COLOURS[which], s=18, zorder=2, label=which if y == 0 else None)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_title(task, fontsize=9)
        many = "median_nll" in next(iter(methods[names[0]]["sets"].values()))
        axes.set_xlabel("NLL, median over features" if many else "NLL, nats", fontsize=8)
        axes.tick_params(axis="x", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    fig.savefig(path, dpi=150)
