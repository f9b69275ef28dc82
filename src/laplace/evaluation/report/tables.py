"""Write the tables of the page: scores side by side, unknown inputs, and other data."""

from __future__ import annotations

from html import escape
from typing import Any

from laplace.evaluation.report.cards import shelf
from laplace.evaluation.report.cells import best_of, estimate, folded, missing, named, number, table
from laplace.evaluation.report.figures import framed, outside_figures, shift_figure
from laplace.evaluation.report.outside import LABELS, MEASURES
from laplace.evaluation.report.reading import LAPLACE, NETWORK, SCALED

_SHIFTED = ("accuracy", "rmse", "nll", "ece", "coverage")  # the scores that are shown on other data


def scores(data: dict[str, Any]) -> str:
    """Return all scores of all methods, what they mean, and what the methods are."""
    names, info = list(data["scores"]), data["score_info"]
    rows = []
    for key, about in info.items():
        values = {name: data["scores"][name][key]["value"] for name in names}
        best = best_of(values, about["better"], about["share"])
        cells = "".join(estimate(data, ["scores", name, key], about["share"], name in best) for name in names)
        rows.append(f'<tr><th scope="row">{escape(about["label"])}</th>{cells}</tr>')
    methods = "".join(f"<dt>{escape(each['name'])}</dt><dd>{escape(each['about'])}</dd>" for each in data["methods"])
    meanings = "".join(f"<dt>{escape(each['label'])}</dt><dd>{escape(each['note'])}</dd>" for each in info.values())
    return (
        '<p class="why">Bold: the best value. Small: 95 % bootstrap intervals.</p>'
        + table(["", *names], rows, "score-table")
        + f'<dl class="facts">{methods}</dl>'
        + missing(f"No {SCALED}", data["missing"].get(SCALED))
        + missing("No class-wise ECE", data["missing"].get("classwise_ece"))
        + folded("What the scores mean", f'<dl class="facts">{meanings}</dl>')
        + _per_output(data)
    )


def _per_output(data: dict[str, Any]) -> str:
    if not data["per_output"]:
        return ""
    rows = []
    for i, row in enumerate(data["per_output"]):
        cells = [number(data, ["per_output", i, key], key == "coverage") for key in ("rmse", "coverage", "width")]
        name = escape(named(data["class_names"], row["output"]))
        rows.append(f'<tr><th scope="row">{name}</th>{"".join(cells)}</tr>')
    head = ["output", "RMSE", f"in {100 * data['level']:g} % interval", "width"]
    return f"<h3>Each output, by {LAPLACE}</h3>{table(head, rows)}"


def outside(data: dict[str, Any], pictures: dict[str, list[str]]) -> str:
    """Return how well unknown inputs are detected: tables by score, figures, and which are not detected."""
    part = data["outside"]
    failed = "".join(missing(f"{name} is left out", why) for name, why in part["missing"].items())
    if not part["rows"]:
        return failed or missing("Not tested", data["missing"].get("outside"))
    drawn = "".join(map(framed, outside_figures(data)))
    shelves = "".join(shelf(data, name, cards, pictures) for name, cards in part["examples"].items())
    between = "Confidence and entropy notice what lies between known classes; epistemic"
    others = between if data["kind"] in ("classes", "labels") else "The total spread includes the noise; epistemic"
    return (
        f"<p>Which score notices which inputs? {others} uncertainty notices what is unlike the training data.</p>"
        '<p class="why">AUROC: 1 is perfect, 0.5 is guessing. Bold: the best score of each set.</p>'
        f"{_aurocs(data)}{failed}"
        f"{folded('AUROC, AUPR and FPR95 of every method, with intervals', _detection(data))}"
        f'<div class="figures">{drawn}</div>{shelves}'
    )


def _aurocs(data: dict[str, Any]) -> str:
    """Return one line for each set, with the scores of the network and of Laplace."""
    rows = data["outside"]["rows"]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    columns = [
        key for key in dict.fromkeys((row["method"], row["score"]) for row in rows) if key[0] in (NETWORK, LAPLACE)
    ]
    lines = []
    for name in sets:
        places = {(row["method"], row["score"]): i for i, row in enumerate(rows) if row["set"] == name}
        values = {" ".join(key): rows[places[key]]["auroc"]["value"] for key in columns}
        best = best_of(values, "higher", False)
        cells = [
            number(data, ["outside", "rows", places[key], "auroc", "value"], False, " ".join(key) in best)
            for key in columns
        ]
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    return table(["inputs", *(f"{method}: {score}" for method, score in columns)], lines, "outside-table")


def _detection(data: dict[str, Any]) -> str:
    rows, before = [], None
    for i, row in enumerate(data["outside"]["rows"]):
        called = escape(row["set"]) if row["set"] != before else ""
        before = row["set"]
        cells = "".join(estimate(data, ["outside", "rows", i, m], False, row["best"]) for m in MEASURES)
        rows.append(
            f'<tr><th scope="row">{called}</th><td class="l">{escape(row["method"])}</td>'
            f'<td class="l">{escape(row["score"])}</td>{cells}</tr>'
        )
    return (
        '<p class="why">Outside is the positive class. FPR95: the share of test data that is flagged when 95 % of the '
        "outside are caught; lower is better. AUPR depends on how many there are of each.</p>"
        + table(["inputs", "method", "by", *(LABELS[m] for m in MEASURES)], rows, "detection-table", left=3)
    )


def shifts(data: dict[str, Any]) -> str:
    """Return a few scores on the training data and on shifted data."""
    rows, info = data["shifts"], data["score_info"]
    training = missing("Training data is left out", data["missing"].get("training"))
    if not rows:
        return training
    keys, names = [key for key in _SHIFTED if key in info], list(data["scores"])
    figure, lines, drawn_rows = shift_figure(data), [], 0
    for i, row in enumerate(rows):
        drawn_rows += "scores" in row
        at = f"{drawn_rows}. " if figure and "scores" in row else ""  # the number that the figure has
        called = f"{at}{escape(row['name'])}"
        if "missing" in row:
            span = len(keys) + 1
            lines.append(
                f'<tr><th scope="row">{called}</th><td class="l" colspan="{span}">{escape(row["missing"])}</td></tr>'
            )
            continue
        for name in names:
            cells = "".join(number(data, ["shifts", i, "scores", name, key], info[key]["share"]) for key in keys)
            first = called if name == names[0] else ""
            lines.append(f'<tr><th scope="row">{first}</th><td class="l">{escape(name)}</td>{cells}</tr>')
    drawn = f'<div class="figures">{framed(figure)}</div>' if figure else ""
    head = ["data", "method", *(info[key]["label"] for key in keys)]
    return f"{table(head, lines, 'shift-table', left=2)}{_part_of(rows[0])}{drawn}{training}"


def _part_of(row: dict[str, Any]) -> str:
    """Return why only a part of the training data is scored; nothing if it is all."""
    if row.get("of", 0) <= row.get("examples", 0):
        return ""
    return (
        f'<p class="small">Of the training data, {row["examples"]:,} of {row["of"]:,} examples are scored: about as '
        "many as there are test examples, and about 5,000 at most. Whether test examples are among them was looked up "
        "in all.</p>"
    )
