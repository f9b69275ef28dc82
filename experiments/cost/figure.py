"""Training time, prediction time and megabytes of each method, relative to the network alone."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

TITLES = {"lenet": "LeNet, MNIST", "resnet20": "ResNet-20, CIFAR-10"}
COLUMNS = {"training": "training", "mean": "probabilities", "mb": "memory"}


def draw(rows: dict[str, dict], file: Path) -> None:
    """Write the figure: bars on a logarithmic axis, with their values."""
    fig = Figure(figsize=(11, 3.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(fig)
    for panels, (case, found) in zip(fig.subplots(len(rows), len(COLUMNS), squeeze=False), rows.items(), strict=True):
        methods = list(found["methods"])[::-1]
        for axes, (key, title) in zip(panels, COLUMNS.items(), strict=True):
            one = found["methods"]["MAP"][key] if key == "mb" else 1.0
            values = [found["methods"][name][key] / one for name in methods]
            colours = ["#1b9e77" if "LA" in name else "#888888" for name in methods]
            axes.barh(methods, values, color=colours)
            for i, value in enumerate(values):
                axes.text(value * 1.05, i, f"{value:.1f}" if value >= 10 else f"{value:.2f}", va="center", fontsize=8)
            axes.set_xscale("log")
            axes.set(title=f"{TITLES[case]}: {title}", xlim=(0.9, 3 * max(values)), xlabel="times the network alone")
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
            if axes is not panels[0]:
                axes.set_yticklabels([])
    fig.savefig(file, dpi=120)
