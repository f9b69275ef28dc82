"""Draw the figures of a report, each with a caption of one sentence, from the numbers of its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from laplace.evaluation.report.reading import LAPLACE, NETWORK, SCALED
from laplace.evaluation.report.svg import SERIES, Chart, swatch

_DEEPEST: Final = 60.0  # nats below the best evidence that are shown


@dataclass(frozen=True)
class Figure:
    """Holds a drawn figure.

    Attributes:
        name: Its key, for links and tests.
        title: Its heading.
        svg: The drawing.
        legend: The names of the series, each with the number of its style.
        caption: What to see in it, in one sentence.
    """

    name: str
    title: str
    svg: str
    legend: dict[str, int]
    caption: str


def framed(figure: Figure) -> str:
    """Return the figure as it stands on the page: with its heading, legend and caption."""
    legend = "".join(f"<li>{swatch(i)}{escape(name)}</li>" for name, i in figure.legend.items())
    shown = f'<ul class="legend">{legend}</ul>' if legend else ""
    return (
        f'<figure id="figure-{figure.name}"><h3>{escape(figure.title)}</h3>{shown}{figure.svg}'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def styles(names: Any) -> dict[str, int]:
    """Return the style of each series: the same method looks the same in all figures."""
    own = {NETWORK: 0, SCALED: 1, LAPLACE: 2}
    free = [i for i in range(SERIES) if i not in own.values()]
    others = [name for name in names if name not in own]
    return {name: own[name] if name in own else free[others.index(name) % len(free)] for name in names}


def figures(data: dict[str, Any]) -> Iterator[Figure]:
    """Yield the figures on the test data."""
    drawn = data["figures"]
    if "reliability" in drawn:
        yield _reliability(drawn["reliability"], data["kind"])
    if "pit" in drawn:
        yield _pit(drawn["pit"])
        yield _coverage(drawn["coverage"])
        yield _scatter(drawn["scatter"], data["level"])
    if "risk" in drawn:
        yield _risk(drawn["risk"], data["kind"])
    if drawn.get("error"):
        yield _error(drawn["error"], data["kind"])


def outside_figures(data: dict[str, Any]) -> Iterator[Figure]:
    """Yield the figures on inputs from outside."""
    drawn = data["outside"]["figures"]
    if "confidence" in drawn:
        yield _histogram(
            drawn["confidence"],
            "confidence",
            "Confidence of the network",
            "Where the curves overlap, the network's confidence does not tell unknown inputs from known ones.",
        )
    if "epistemic" in drawn:
        yield _histogram(
            drawn["epistemic"],
            "epistemic",
            "Epistemic uncertainty of Laplace",
            "Unknown inputs should lie further to the right than the test data.",
        )


def shift_figure(data: dict[str, Any]) -> Figure | None:
    """Return the figure of a score on shifted data, or None if there are fewer than two kinds."""
    rows = [row for row in data["shifts"] if "scores" in row]
    if len(rows) < 2:
        return None
    names = list(rows[0]["scores"])
    legend = styles(names)
    values = {name: [row["scores"][name]["nll"] for row in rows] for name in names}
    known = [v for each in values.values() for v in each if v is not None]
    chart = Chart((0.5, len(rows) + 0.5), _around(known), ("row of the table", "NLL"))
    at = list(range(1, len(rows) + 1))
    for name, each in values.items():
        points = [(x, v) for x, v in zip(at, each, strict=True) if v is not None]
        chart.line([x for x, _ in points], [v for _, v in points], legend[name])
        chart.dots([x for x, _ in points], [v for _, v in points], legend[name])
    return Figure(
        "shifts",
        "Loss on changed data",
        chart.svg("Loss on changed data", "Negative log-likelihood on each set, by method."),
        legend,
        "Lower is better; a method that knows what it does not know rises more slowly.",
    )


def prior_figure(curve: dict[str, Any]) -> Figure:
    """Return the figure of the evidence along the prior precision, near its optimum and this posterior."""
    x, best = curve["precision"], max(curve["log_evidence"])
    y = [value - best for value in curve["log_evidence"]]
    here = min(range(len(x)), key=lambda i: abs(curve["factor"][i] - 1))
    low = max(min(y), 2 * y[here], -_DEEPEST) if y[here] > -_DEEPEST / 2 else 1.3 * y[here]
    shown = [i for i, value in enumerate(y) if value >= low]
    first, last = max(shown[0] - 1, 0), min(shown[-1] + 1, len(x) - 1)
    what = "factor of the prior precisions" if curve["several"] else "prior precision"
    chart = Chart((x[first], x[last]), (low, -0.06 * low), (what, "log evidence below the best"), log_x=True)
    chart.guide([curve["present"]] * 2, [low, 0])
    chart.line(x[first : last + 1], y[first : last + 1], 2)
    chart.dots([curve["best"]], [0], 2)
    right = curve["present"] > (x[first] * x[last]) ** 0.5
    chart.note(curve["present"] * (0.87 if right else 1.15), 0.93 * low, "this posterior", end=right)
    return Figure(
        "prior",
        "Evidence",
        chart.svg("Log evidence along the prior precision", f"Largest at {curve['best']:.3g}."),
        {},
        f"The evidence is largest at {curve['best']:.3g}, and this posterior is at {curve['present']:.3g}"
        + (": the optimum is at the edge." if curve["edge"] else "; calibration may prefer another place."),
    )


def _reliability(drawn: Mapping[str, Any], kind: str) -> Figure:
    legend = styles(drawn)
    labels = ("probability of the label", "share that holds") if kind == "labels" else ("confidence", "accuracy")
    chart = Chart((0, 1), (0, 1), labels, per_cent="xy")
    chart.guide([0, 1], [0, 1])
    chart.note(0.03, 0.93, "underconfident")
    chart.note(0.99, 0.04, "overconfident", end=True)
    for name, curve in drawn.items():
        total = sum(curve["count"])
        if name == LAPLACE:
            chart.bars(curve["confidence"], curve["low"], curve["high"], legend[name], faint=True)
        chart.line(curve["confidence"], curve["accuracy"], legend[name], thin=True)
        sizes = [2.2 + 5 * (count / total) ** 0.5 for count in curve["count"]]
        chart.dots(curve["confidence"], curve["accuracy"], legend[name], sizes)
    return Figure(
        "reliability",
        "Is the confidence earned?",
        chart.svg("Reliability diagram", "Share of right predictions against confidence, by method."),
        legend,
        "On the dashed line a prediction made with 80 % confidence is right 80 % of the time; larger dots hold more "
        "examples.",
    )


def _pit(drawn: Mapping[str, Any]) -> Figure:
    shown = {name: curve for name, curve in drawn.items() if name in (NETWORK, LAPLACE)}
    legend = styles(shown)
    top = max(max(curve["share"]) for curve in shown.values())
    chart = Chart((0, 1), (0, max(0.2, 1.1 * top)), ("quantile of the truth in its prediction", "share"), per_cent="y")
    mine = drawn[LAPLACE]
    chart.band(mine["low"], mine["high"])
    for name, curve in shown.items():
        chart.steps(curve["edges"], curve["share"], legend[name])
    return Figure(
        "pit",
        "Are the predictions as wide as they should be?",
        chart.svg("PIT histogram", "Share of labels by their quantile in the predicted distribution."),
        legend,
        "Flat within the band is right; high at both ends means too narrow, high in the middle too wide.",
    )


def _coverage(drawn: Mapping[str, Any]) -> Figure:
    legend = styles(drawn)
    lowest = min(0.4, *(min(curve["held"]) - 0.05 for curve in drawn.values()))
    ends = (max(0.0, lowest), 1.0)
    chart = Chart((0.45, 1), ends, ("level of the interval", "share it holds"), per_cent="xy")
    chart.guide([0.45, 1], [0.45, 1])
    chart.note(0.47, ends[1] - 0.06 * (1 - ends[0]), "too wide")
    chart.note(0.99, ends[0] + 0.04 * (1 - ends[0]), "too narrow", end=True)
    for name, curve in drawn.items():
        chart.line(curve["level"], curve["held"], legend[name], thin=True)
        chart.dots(curve["level"], curve["held"], legend[name])
    return Figure(
        "coverage",
        "Do the intervals hold what they promise?",
        chart.svg("Coverage of intervals", "Share of labels inside the central interval against its level."),
        legend,
        "On the dashed line a 90 % interval holds 90 % of the labels.",
    )


def _scatter(curve: Mapping[str, Any], level: float) -> Figure:
    values = [*curve["y"], *curve["mean"]]
    ends = _around(values)
    chart = Chart(ends, ends, ("truth", "prediction"))
    chart.guide(list(ends), list(ends))
    chart.bars(curve["y"], curve["lower"], curve["upper"], 2, faint=True)
    chart.dots(curve["y"], curve["mean"], 2, [2.2] * len(curve["y"]), faint=True)
    return Figure(
        "scatter",
        "Prediction and truth",
        chart.svg("Prediction against truth", f"Up to 250 examples with their {100 * level:g} % intervals."),
        {},
        f"Bars are {100 * level:g} % intervals of Laplace, of up to 250 examples and the first output.",
    )


def _risk(drawn: Mapping[str, Any], kind: str) -> Figure:
    legend = styles(drawn)
    shares = kind in ("classes", "labels")
    top = max(max(curve["risk"]) for curve in drawn.values())
    what = "error of those answered" if shares else "their mean absolute error"
    chart = Chart((0, 1), (0, 1.08 * top or 1), ("share answered", what), per_cent="xy" if shares else "x")
    for name, curve in drawn.items():
        chart.line(curve["coverage"], curve["risk"], legend[name])
        chart.dots(curve["coverage"][::12], curve["risk"][::12], legend[name])
    return Figure(
        "risk",
        "What if the unsure ones go to a person?",
        chart.svg("Risk-coverage curve", "Error of the most certain share of the examples, against that share."),
        legend,
        "Only the most certain share is answered: the lower the curve stays, the better the uncertainty finds errors.",
    )


def _error(drawn: Mapping[str, Any], kind: str) -> Figure:
    legend = styles(drawn)
    shares = kind in ("classes", "labels")
    points = [x for curve in drawn.values() for x in curve["epistemic"] if x > 0]
    top = max(max(curve["high"]) for curve in drawn.values())
    log_x = bool(points) and max(points) > 30 * min(points)
    low = min(points) / 1.3 if log_x else 0.0
    high = 1.3 * max(points) if log_x else 1.05 * max(points, default=1.0)
    labels = ("epistemic uncertainty", "error" if shares else "mean absolute error")
    chart = Chart((low, high), (0, 1.05 * top or 1), labels, log_x=log_x, per_cent="y" if shares else "")
    for name, curve in drawn.items():
        kept = [i for i, x in enumerate(curve["epistemic"]) if x > 0 or not log_x]
        x, y = ([curve[key][i] for i in kept] for key in ("epistemic", "loss"))
        chart.bars(x, [curve["low"][i] for i in kept], [curve["high"][i] for i in kept], legend[name], faint=True)
        chart.line(x, y, legend[name], thin=True)
        chart.dots(x, y, legend[name])
    return Figure(
        "error",
        "Is it wrong where it does not know?",
        chart.svg("Error against epistemic uncertainty", "Mean error of groups of examples by epistemic uncertainty."),
        legend,
        "Ten groups of equally many examples: the error should rise with the uncertainty.",
    )


def _histogram(curve: Mapping[str, Any], name: str, title: str, caption: str) -> Figure:
    sets = list(curve["share"])
    legend = {each: (2, 0, 3, 4, 1, 5)[i % SERIES] for i, each in enumerate(sets)}
    top = max(max(each) for each in curve["share"].values())
    ends, logarithmic = (curve["edges"][0], curve["edges"][-1]), curve["logarithmic"]
    per_cent = "y" if logarithmic else "xy"
    chart = Chart(ends, (0, 1.08 * top), (name, "share of the inputs"), log_x=logarithmic, per_cent=per_cent)
    for each, share in curve["share"].items():
        chart.steps(curve["edges"], share, legend[each])
    described = f"Histograms of {', '.join(sets)}."
    return Figure(f"outside-{name}", title, chart.svg(title, described), legend, caption)


def _around(values: Any) -> tuple[float, float]:
    """Return ends a little outside of some numbers."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.5
    return low - room, high + room
