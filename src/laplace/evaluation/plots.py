"""Draw figures: reliability, a regression band with its uncertainties, coverage of intervals, risk against coverage.

Each returns a `matplotlib.figure.Figure` to save or show, or draws into axes of yours (`ax=`). No global state of
matplotlib is changed, and no display is needed. The colours are Okabe and Ito's, which colour-blind readers can tell
apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np

from laplace.checks import shown
from laplace.errors import InputError
from laplace.evaluation.arrays import Values, real_of, tensor_of
from laplace.evaluation.calibration import Reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, FAINT = "#222222", "#6b6b6b", "#d9d9d9"
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
COLOURS = (VERMILION, BLUE, GREEN, PURPLE)


def reliability_diagram(
    models: Mapping[str, Reliability] | Reliability, title: str | None = None, ax: Axes | None = None
) -> Figure:
    """Plot accuracy against confidence, one panel per model, with a histogram of the confidences below.

    The area of a dot shows the share of examples in its bin. The thin bar is the 95 % Wilson interval of the accuracy;
    it is wide if the bin holds few examples. The shaded gap to the diagonal, weighted by those shares, is the ECE. More
    than four models go into further rows.

        reliability_diagram({"MAP": reliability(p_map, y), "Laplace": reliability(p_la, y)}).savefig("reliability.png")

    Args:
        models: Maps the name of each model to what `reliability(probs, y)` returned.
        title: Title above all panels.
        ax: Axes of yours to draw one model into, without the histogram. A `Reliability` needs no name here.

    Returns:
        A matplotlib figure; that of `ax` if it is given.

    Raises:
        InputError: there is no model, a value is not a `Reliability`, or there are several for one `ax`.
        ImportError: matplotlib is not installed.
    """
    if ax is not None and isinstance(models, Reliability):
        models = {"": models}
    named = isinstance(models, Mapping) and all(isinstance(bins, Reliability) for bins in models.values())
    if not models or not isinstance(models, Mapping) or not named:
        came = "" if named else f", not {shown(models)}"
        raise InputError(f"no model to draw: pass a mapping from a name to what reliability(probs, y) returns{came}.")
    if ax is not None:
        if len(models) > 1:
            raise InputError(
                f"ax= takes one model, got {len(models)}. Leave it out, or call once for each of your axes."
            )
        ((name, bins),) = models.items()
        _draw_calibration(ax, bins, BLUE)
        _name_panel(ax, str(name), bins, BLUE, title)
        ax.set_xlabel("confidence", color=INK)
        ax.set_ylabel("accuracy", color=INK)
        return figure_of(ax)
    columns = min(len(models), 4)
    rows = -(-len(models) // columns)
    figure = new_figure(width=0.6 + 3.7 * columns, height=5.2 * rows)
    width, height = figure.get_figwidth(), figure.get_figheight()
    top = 0.78 if title else 0.42
    outer = figure.add_gridspec(
        rows, columns, hspace=0.22, wspace=0.12, left=0.62 / width, right=0.985, bottom=0.52 / height,
        top=1 - top / height,
    )  # fmt: skip
    largest_share = max((bins.count.max() / bins.count.sum()).item() for bins in models.values())
    for number, (name, bins) in enumerate(models.items()):
        inner = outer[number // columns, number % columns].subgridspec(2, 1, height_ratios=(4, 1), hspace=0.08)
        calibration = figure.add_subplot(inner[0])
        histogram = figure.add_subplot(inner[1], sharex=calibration)
        colour = COLOURS[number % len(COLOURS)]
        _draw_calibration(calibration, bins, colour)
        calibration.tick_params(labelbottom=False)
        _draw_histogram(histogram, bins, colour)
        histogram.set_ylim(0, 1.1 * largest_share)
        _name_panel(calibration, str(name), bins, colour, None)
        if number % columns == 0:
            calibration.set_ylabel("accuracy", color=INK)
            histogram.set_ylabel("share", color=INK)
        else:
            calibration.tick_params(labelleft=False)
            histogram.tick_params(labelleft=False)
    if title:
        figure.suptitle(title, x=0.62 / width, y=1 - 0.13 / height, ha="left", color=INK, fontsize=12.5)
    return figure


def regression_band(
    x: Values,  # (N,)
    mean: Values,  # (N,)
    epistemic: Values,  # (N,) standard deviation of the network's output
    noise: Values,  # () or (N,) standard deviation of the observations around it
    data: tuple[Values, Values] | None = None,  # (M,), (M,)
    truth: Values | None = None,  # (N,) the function that the data came from, if it is known
    title: str | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Plot the prediction over x with bands of two standard deviations, and the two uncertainties separately below.

    The inner band is what the network does not know, and more data would reduce it. The outer band adds the noise,
    which no amount of data removes: total variance = epistemic variance + noise variance.

    Args:
        x: Inputs, (N,).
        mean: Predictions, (N,).
        epistemic: Standard deviations of the network's output, (N,).
        noise: Standard deviation of the observations around the output, a number or (N,).
        data: Inputs and targets of the training data, (M,) each.
        truth: The function that the data came from, if it is known, (N,).
        title: Title above the figure.
        ax: Axes of yours to draw the bands into, without the panel of the two uncertainties.

    Returns:
        A matplotlib figure; that of `ax` if it is given.

    Raises:
        InputError: lengths differ, standard deviations are negative, or values are not finite.
        ImportError: matplotlib is not installed.
    """
    grid_x = vector_of(x, "x")
    order = np.argsort(grid_x)
    noise = real_of(noise, "noise")
    columns = {"mean": mean, "epistemic": epistemic, "noise": noise.expand(len(grid_x)) if noise.dim() == 0 else noise}
    if truth is not None:
        columns["truth"] = truth
    curves = {name: vector_of(values, name) for name, values in columns.items()}
    for name, values in curves.items():
        if len(values) != len(grid_x):
            raise InputError(f"{name} has {len(values)} values for {len(grid_x)} values of x.")
        if name in ("epistemic", "noise") and values.min() < 0:
            raise InputError(f"{name} is a standard deviation, and {values.min():.3g} is negative.")
    points = None if data is None else _points(data)
    curves = {name: values[order] for name, values in curves.items()}
    if ax is not None:
        _draw_band(ax, grid_x[order], curves, points)
        ax.set_xlabel("x", color=INK)
        if title:
            ax.set_title(title, loc="left", color=INK, fontsize=12.5, pad=10)
        return figure_of(ax)
    figure = new_figure(width=7.6, height=5.4)
    grid = figure.add_gridspec(2, 1, height_ratios=(3.4, 1), hspace=0.1)
    grid.update(left=0.085, right=0.83, bottom=0.095, top=0.9 if title else 0.97)
    band = figure.add_subplot(grid[0])
    apart = figure.add_subplot(grid[1], sharex=band)
    _draw_band(band, grid_x[order], curves, points)
    band.tick_params(labelbottom=False)
    _draw_deviations(apart, grid_x[order], curves)
    if title:
        band.set_title(title, loc="left", color=INK, fontsize=12.5, pad=10)
    return figure


def _draw_calibration(axes: Axes, bins: Reliability, colour: str) -> None:
    held = bins.count > 0
    confidence, accuracy = vector_of(bins.confidence[held], "confidence"), vector_of(bins.accuracy[held], "accuracy")
    count = vector_of(bins.count[held], "count")
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=2)
    axes.text(0.03, 0.975, "underconfident", color=MUTED, fontsize=9, va="top")
    axes.text(0.99, 0.03, "overconfident", color=MUTED, fontsize=9, ha="right")
    axes.fill_between(confidence, confidence, accuracy, color=colour, alpha=0.13, linewidth=0, zorder=1)
    lower, upper = _wilson_interval(accuracy, count)
    axes.vlines(confidence, lower, upper, color=colour, linewidth=1, alpha=0.45, zorder=3)
    axes.plot(confidence, accuracy, color=colour, linewidth=1.2, alpha=0.6, zorder=3)
    area = 16 + 200 * count / count.sum()
    axes.scatter(confidence, accuracy, s=area, color=colour, edgecolor="white", linewidth=0.8, zorder=4)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), yticks=np.linspace(0, 1, 6))
    style(axes)


def _name_panel(axes: Axes, name: str, bins: Reliability, colour: str, title: str | None) -> None:
    axes.set_title(name or title or "", loc="left", color=colour, fontweight="bold", fontsize=12, pad=7)
    axes.set_title(f"ECE {100 * bins.ece:.1f} %", loc="right", color=INK, fontsize=10.5, pad=7)


def _draw_histogram(axes: Axes, bins: Reliability, colour: str) -> None:
    edges, count = vector_of(bins.edges, "edges"), vector_of(bins.count, "count")
    width = np.diff(edges)
    axes.bar(edges[:-1], count / count.sum(), 0.86 * width, align="edge", color=colour, alpha=0.85)
    axes.set(xticks=np.linspace(0, 1, 6))
    axes.set_xlabel("confidence", color=INK)
    style(axes)


def _draw_band(
    axes: Axes,
    x: np.ndarray,
    curves: dict[str, np.ndarray],
    data: tuple[np.ndarray, np.ndarray] | None,
) -> None:
    mean, epistemic = curves["mean"], curves["epistemic"]
    total = np.hypot(epistemic, curves["noise"])
    lower, upper = mean - 2 * epistemic, mean + 2 * epistemic
    axes.fill_between(x, mean - 2 * total, lower, color=VERMILION, alpha=0.2, linewidth=0, zorder=1)
    axes.fill_between(x, upper, mean + 2 * total, color=VERMILION, alpha=0.2, linewidth=0, zorder=1)
    axes.fill_between(x, lower, upper, color=BLUE, alpha=0.3, linewidth=0, zorder=1)
    axes.plot(x, mean, color=BLUE, linewidth=2, zorder=4)
    labels = [
        (mean[-1] + 2 * total[-1], "with noise, ±2 sd", VERMILION),
        (upper[-1], "epistemic, ±2 sd", BLUE),
        (mean[-1], "mean", BLUE),
    ]
    if "truth" in curves:
        axes.plot(x, curves["truth"], color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=3)
        labels.append((curves["truth"][-1], "truth", INK))
    if data is not None:
        axes.scatter(*data, s=13, color=INK, edgecolor="white", linewidth=0.4, alpha=0.9, zorder=5)
    axes.set_xlim(x[0], x[-1])
    axes.set_ylabel("y", color=INK)
    style(axes)
    _label_right(axes, labels, gap=0.052)


def _draw_deviations(axes: Axes, x: np.ndarray, curves: dict[str, np.ndarray]) -> None:
    axes.plot(x, curves["epistemic"], color=BLUE, linewidth=1.8)
    axes.plot(x, curves["noise"], color=VERMILION, linewidth=1.8)
    axes.set_ylim(0, 1.12 * max(curves["epistemic"].max(), curves["noise"].max()))
    axes.set_xlabel("x", color=INK)
    axes.set_ylabel("sd", color=INK)
    style(axes)
    labels = [(curves["epistemic"][-1], "epistemic", BLUE), (curves["noise"][-1], "noise", VERMILION)]
    _label_right(axes, labels, gap=0.18)


def _label_right(axes: Axes, labels: list[tuple[float, str, str]], gap: float) -> None:
    """Write the names of the curves at their right ends, at least `gap` of the panel's height apart."""
    bottom, top = axes.get_ylim()
    labels = sorted(labels, key=lambda label: label[0])
    places = [(value - bottom) / (top - bottom) for value, _, _ in labels]
    for above in range(1, len(places)):
        places[above] = max(places[above], places[above - 1] + gap)
    for below in range(len(places)):
        ceiling = 1 - gap * (len(places) - 1 - below)
        axes.text(
            1.012, min(places[below], ceiling), labels[below][1], color=labels[below][2], fontsize=9, va="center",
            transform=axes.transAxes,
        )  # fmt: skip


def style(axes: Axes) -> None:
    """Give axes the look that all figures share."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def _wilson_interval(accuracy: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a 95 % interval of a proportion that stays inside [0, 1], even for a handful of examples."""
    z2 = 1.96**2
    centre = (accuracy + z2 / (2 * count)) / (1 + z2 / count)
    half = np.sqrt(z2 * (accuracy * (1 - accuracy) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return centre - half, centre + half


def figure_of(axes: Axes) -> Figure:
    """Return the figure that holds the axes."""
    found = axes.get_figure()
    while found is not None and getattr(found, "canvas", None) is None:  # a subfigure
        found = found.figure
    return cast("Figure", found)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that no display is needed for."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'laplace-redux[plots]'") from error
    return Figure(figsize=(width, height), dpi=160, facecolor="white")


def _points(data: tuple[Values, Values]) -> tuple[np.ndarray, np.ndarray]:
    try:
        at, y = data
    except (TypeError, ValueError) as error:
        raise InputError(f"data={shown(data)} must be a pair of inputs and targets, (x, y).") from error
    points = vector_of(at, "data[0]"), vector_of(y, "data[1]")
    if len(points[0]) != len(points[1]):
        raise InputError(f"data has {len(points[0])} inputs and {len(points[1])} targets.")
    return points


def vector_of(values: Values, name: str) -> np.ndarray:  # (N,)
    """Return numbers, (N,) or (N, 1), as an array."""
    vector = tensor_of(values, name).cpu().double().numpy()
    if vector.ndim == 2 and vector.shape[1] == 1:
        vector = vector[:, 0]
    if vector.ndim != 1 or len(vector) == 0:
        raise InputError(f"{name} must have shape (N,) or (N, 1) with N > 0, got {vector.shape}.")
    return real_of(vector, name).numpy()
