"""The page: one HTML file with its style, its figures and its pictures inside, without scripts.

A content security policy forbids every request. All texts are escaped. Each number of a table names its place in the
JSON, `data-path`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any, Final

from laplace.budget import in_bytes
from laplace.evaluation.report.figures import (
    Figure,
    figures,
    outside_figures,
    prior_figure,
    shift_figure,
)
from laplace.evaluation.report.outside import LABELS, MEASURES
from laplace.evaluation.report.reading import LAPLACE, NETWORK, SCALED
from laplace.evaluation.report.svg import swatch

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_ICONS: Final = {
    "good": ('<path d="M7 12.5l3.4 3.4L17 8.6"/>', "good"),
    "warn": ('<path d="M12 6.8v6.4M12 16.8v.2"/>', "look at this"),
    "bad": ('<path d="M8 8l8 8M16 8l-8 8"/>', "mend this"),
    "note": ('<path d="M12 11v6M12 7.2v.2"/>', "note"),
}
_KINDS: Final = {
    "classes": "classification",
    "labels": "binary labels",
    "regression": "regression",
    "counts": "counts",
    "other": "a likelihood of your own",
}


def page(data: dict[str, Any], pictures: dict[str, list[str]]) -> str:
    """Return the whole page, from the numbers of the JSON and the thumbnails of each shelf."""
    style = files("laplace.evaluation.report").joinpath("page.css").read_text(encoding="utf-8")
    sections = [
        ("next", "What to do next", _next(data)),
        ("findings", "What was found", _findings(data)),
        ("scores", "Side by side", _scores(data)),
        ("figures", "On the test data", _figures(data)),
        ("outside", "Unknown inputs", _outside(data, pictures)),
        ("shifts", "On other data", _shifts(data)),
        ("examples", "Examples", _examples(data, pictures)),
        ("prior", "Prior and evidence", _prior(data)),
        ("cost", "What is kept, and what it costs", _kept(data)),
        ("provenance", "Where this comes from", _provenance(data)),
    ]
    links = "".join(f'<a href="#{key}">{escape(name)}</a>' for key, name, body in sections if body)
    body = "".join(
        f'<section id="{key}"><h2>{escape(name)}</h2>{text}</section>' for key, name, text in sections if text
    )
    head, made = data["headline"], data["provenance"]
    test = made["data"]["test"]["examples"]
    about = f"{made['network']['class']}, {_KINDS[data['kind']]}, {test:,} test examples, {made['made'][:10]}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(data['title'])}</title><style>{style}</style></head><body>"
        f'<header><h1>{escape(data["title"])}</h1><p class="sub">{escape(about)}</p>'
        f'<div class="head {head["grade"]}">{_icon(head["grade"])}<p>{escape(head["text"])}</p></div>'
        f"<nav>{links}</nav></header><main>{body}</main>"
        f'<footer><p class="small">Made with laplace {escape(made["versions"]["laplace"])}. The same numbers are in '
        "the JSON file beside this page.</p></footer></body></html>\n"
    )


def _next(data: dict[str, Any]) -> str:
    if not data["next"]:
        return "<p>Nothing to mend.</p>"
    steps = "".join(
        f"<li>{escape(step['text'])}{_code(step['code']) if step['code'] else ''}</li>" for step in data["next"]
    )
    return f'<ol class="next">{steps}</ol>'


def _findings(data: dict[str, Any]) -> str:
    items = "".join(
        f'<li class="{verdict["grade"]}">{_icon(verdict["grade"])}<div><p>{escape(verdict["text"])}</p>'
        f'<p class="why">{escape(verdict["detail"])}</p></div></li>'
        for verdict in data["verdicts"]
    )
    return f'<ul class="findings">{items}</ul>'


def _scores(data: dict[str, Any]) -> str:
    names, info = list(data["scores"]), data["score_info"]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    rows = []
    for key, about in info.items():
        best = _best({name: data["scores"][name][key]["value"] for name in names}, about["better"])
        cells = "".join(_estimate(data, ["scores", name, key], about["share"], name in best) for name in names)
        hint = f'<span class="hint">{escape(about["note"])}</span>'
        rows.append(f'<tr><th scope="row">{escape(about["label"])}{hint}</th>{cells}</tr>')
    methods = "".join(
        f"<dt>{escape(method['name'])}</dt><dd>{escape(method['about'])}</dd>" for method in data["methods"]
    )
    missing = _missing(f"No {SCALED}", data["missing"].get(SCALED))
    per_output = _per_output(data)
    return (
        f'<div class="scroll"><table id="score-table"><caption>Small numbers: 95 % bootstrap intervals. Bold: the best '
        f"value.</caption><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f'<dl class="facts">{methods}</dl>{missing}{per_output}'
    )


def _per_output(data: dict[str, Any]) -> str:
    if not data["per_output"]:
        return ""
    names = data["class_names"]
    rows = []
    for i, row in enumerate(data["per_output"]):
        name = escape(_name(names, row["output"]))
        cells = "".join(
            _number(data, ["per_output", i, key], key == "coverage") for key in ("rmse", "coverage", "width")
        )
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    level = f"{100 * data['level']:g} %"
    return (
        f'<h3>Each output</h3><div class="scroll"><table><thead><tr><th scope="col">output</th><th scope="col">RMSE</th>'
        f'<th scope="col">in {level} interval</th><th scope="col">width</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _figures(data: dict[str, Any]) -> str:
    drawn = "".join(map(_figure, figures(data)))
    return f'<div class="figures">{drawn}</div>' if drawn else _missing("No figures", data["missing"].get("figures"))


def _outside(data: dict[str, Any], pictures: dict[str, list[str]]) -> str:
    part = data["outside"]
    failed = "".join(_missing(f"{name} is left out", why) for name, why in part["missing"].items())
    if not part["rows"]:
        return failed or _missing("Not tested", data["missing"].get("outside"))
    head = "".join(f'<th scope="col">{LABELS[measure]}</th>' for measure in MEASURES)
    rows, before = [], None
    for i, row in enumerate(part["rows"]):
        new = row["set"] != before
        before = row["set"]
        called = f"{escape(row['set'])}" if new else ""
        cells = "".join(_estimate(data, ["outside", "rows", i, m], False, row["best"]) for m in MEASURES)
        rows.append(
            f'<tr><th scope="row">{called}</th><td class="l">{escape(row["method"])}</td>'
            f'<td class="l">{escape(row["score"])}</td>{cells}</tr>'
        )
    drawn = "".join(map(_figure, outside_figures(data)))
    shelves = "".join(_shelf(data, name, cards, pictures) for name, cards in part["examples"].items())
    return (
        "<p>Which score notices which inputs? A confidence or an entropy is high for what lies between known classes; "
        "epistemic uncertainty is high for what is unlike the training data.</p>"
        '<div class="scroll"><table id="outside-table"><caption>Outside is the positive class: AUROC and AUPR should be '
        "near 1, FPR95 (test data flagged when 95 % of the outside are caught) near 0. Bold: the best score of each "
        f'set.</caption><thead><tr><th scope="col">inputs</th><th class="l" scope="col">method</th>'
        f'<th class="l" scope="col">by</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>{failed}'
        f'<div class="figures">{drawn}</div>{shelves}'
    )


def _shifts(data: dict[str, Any]) -> str:
    rows, info = data["shifts"], data["score_info"]
    training = _missing("Training data is left out", data["missing"].get("training"))
    if not rows:
        return training
    keys = [key for key in ("accuracy", "rmse", "nll", "ece", "coverage") if key in info]
    names = list(data["scores"])
    head = "".join(f'<th scope="col">{escape(info[key]["label"])}</th>' for key in keys)
    lines = []
    for number, row in enumerate(rows):
        if "missing" in row:
            lines.append(
                f'<tr><th scope="row">{escape(row["name"])}</th><td class="l">{escape(row["missing"])}</td></tr>'
            )
            continue
        for name in names:
            called = f"{number + 1}. {escape(row['name'])}" if name == names[0] else ""
            cells = "".join(_number(data, ["shifts", number, "scores", name, key], info[key]["share"]) for key in keys)
            lines.append(f'<tr><th scope="row">{called}</th><td class="l">{escape(name)}</td>{cells}</tr>')
    figure = shift_figure(data)
    drawn = f'<div class="figures">{_figure(figure)}</div>' if figure else ""
    return (
        f'<div class="scroll"><table id="shift-table"><thead><tr><th scope="col">data</th><th class="l" scope="col">'
        f"method</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>{drawn}{training}"
    )


def _examples(data: dict[str, Any], pictures: dict[str, list[str]]) -> str:
    shelves = "".join(_shelf(data, name, cards, pictures) for name, cards in data["examples"].items())
    return shelves or _missing("No examples", data["missing"].get("examples"))


def _shelf(data: dict[str, Any], name: str, cards: list[dict[str, Any]], pictures: dict[str, list[str]]) -> str:
    images = pictures.get(name, [])
    drawn = [_card(data, card, images[i] if i < len(images) else "") for i, card in enumerate(cards)]
    wide = " wide" if any("text" in card for card in cards) else ""
    return f'<h3>{escape(name[:1].upper() + name[1:])}</h3><div class="shelf{wide}">{"".join(drawn)}</div>'


def _card(data: dict[str, Any], card: dict[str, Any], picture: str) -> str:
    names, features = data["class_names"], data["feature_names"]
    parts = []
    if picture:
        parts.append(f'<img src="{escape(picture)}" alt="example {card["number"]}" width="96" height="96">')
    if "text" in card:
        parts.append(f"<p>{escape(card['text'])}</p>")
    if "row" in card and not picture:
        rows = "".join(f"<dt>{escape(_feature(features, i))}</dt><dd>{v:.4g}</dd>" for i, v in enumerate(card["row"]))
        more = f'<p class="small">and {card["more"]:,} more</p>' if card["more"] else ""
        parts.append(f"<dl>{rows}</dl>{more}")
    if "confidence" in card:
        said = _said(names, card["predicted"])
        parts.append(f"<p>says <b>{escape(said)}</b>, {100 * card['confidence']:.1f} % sure</p>")
        if "label" in card:
            parts.append(f"<p>is {escape(_said(names, card['label']))}</p>")
    elif "predicted" in card:
        each = zip(card["predicted"], card["sd"], card["label"], strict=True)
        parts += [f"<p>says {p:.4g} ± {s:.2g}, is {y:.4g}</p>" for p, s, y in list(each)[:3]]
    parts.append(f'<p class="small">number {card["number"]}, epistemic {card["epistemic"]:.2g}</p>')
    return f'<div class="card">{"".join(parts)}</div>'


def _prior(data: dict[str, Any]) -> str:
    if data["prior"] is None:
        return _missing("No evidence curve", data["missing"].get("prior"))
    return f'<div class="figures">{_figure(prior_figure(data["prior"]))}</div>'


def _kept(data: dict[str, Any]) -> str:
    kept, cost = data["kept"], data["cost"]
    options = data["provenance"]["options"]
    each = {name: 1e6 * values["per_example"] for name, values in cost.items() if values["per_example"] is not None}
    times = ", ".join(f"{escape(name)} {value:,.0f} µs" for name, value in each.items())
    ratio = each[LAPLACE] / each[NETWORK] if each.get(NETWORK) else None
    factor = f", {ratio:.1f} times the network alone" if ratio and ratio >= 0.05 else ""
    rows = "".join(
        f'<tr><th scope="row">{escape(row["name"])}</th><td>{"×".join(map(str, row["shape"]))}</td>'
        f'<td>{row["weights"]:,}</td><td class="l">{escape(row["rule"])}</td><td class="l">{escape(row["kept"])}</td>'
        f"<td>{in_bytes(row['bytes'])}</td></tr>"
        for row in kept["rows"]
    )
    more = kept["tensors"] - len(kept["rows"])
    return (
        f"<p>{kept['weights']:,} weights of {kept['tensors']} tensors are uncertain ({escape(str(options['subset_of_weights']))}, "
        f"{escape(options['hessian_structure'])}); what is kept takes {in_bytes(kept['bytes'])}.</p>"
        f"<p>A prediction takes, in CPU time per test example: {times}{factor}.</p>"
        + (f'<p class="missing">{escape(kept["note"])}</p>' if kept["note"] else "")
        + '<div class="scroll"><table><thead><tr><th scope="col">parameter</th><th scope="col">shape</th>'
        '<th scope="col">weights</th><th class="l" scope="col">rule</th><th class="l" scope="col">kept</th>'
        f'<th scope="col">memory</th></tr></thead><tbody>{rows}</tbody></table></div>'
        + (f'<p class="small">and {more:,} more: la.coverage()</p>' if more > 0 else "")
    )


def _provenance(data: dict[str, Any]) -> str:
    made = data["provenance"]
    single = {"made": made["made"], "seed": made["seed"], "bootstrap resamples": made["bootstrap"]}
    parts = {
        "This report": single | {f"CPU seconds, {name}": value for name, value in made["seconds"].items()},
        "Network": made["network"],
        "Posterior": made["options"],
        "Versions": made["versions"],
        "Machine": made["machine"],
        "Verdicts find fault from": data["thresholds"],
    }
    for name, described in made["data"].items():
        parts[f"Data: {name}"] = described
    drawn = "".join(
        f'<div><h3>{escape(name)}</h3><dl class="facts">'
        + "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(_value(value))}</dd>" for key, value in part.items())
        + "</dl></div>"
        for name, part in parts.items()
    )
    return f'<div class="parts">{drawn}</div>'


def _figure(figure: Figure) -> str:
    legend = "".join(f"<li>{swatch(i)}{escape(name)}</li>" for name, i in figure.legend.items())
    shown = f'<ul class="legend">{legend}</ul>' if legend else ""
    return (
        f'<figure id="figure-{figure.name}"><h3>{escape(figure.title)}</h3>{shown}{figure.svg}'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _estimate(data: dict[str, Any], path: Sequence[Any], share: bool, best: bool) -> str:
    """Return a cell with a value and its interval."""
    found = _at(data, path)
    low, high = found["low"], found["high"]
    ends = "" if low is None or high is None else f'<span class="ci">{_bare(low, share)} – {_bare(high, share)}</span>'
    return f"<td>{_span(data, [*path, 'value'], share, best)}{ends}</td>"


def _number(data: dict[str, Any], path: Sequence[Any], share: bool) -> str:
    return f"<td>{_span(data, path, share, False)}</td>"


def _span(data: dict[str, Any], path: Sequence[Any], share: bool, best: bool) -> str:
    value = _at(data, path)
    text = "–" if value is None else f"{_bare(value, share)} %" if share else _bare(value, share)
    style = ' class="best"' if best else ""
    return f'<span{style} data-path="{escape(json.dumps(list(path)))}">{text}</span>'


def _bare(value: float, share: bool) -> str:
    value = 100 * value if share else value
    size = abs(value)
    text = (
        f"{value:.1f}" if share else f"{value:.3f}" if size < 10 else f"{value:.2f}" if size < 100 else f"{value:.4g}"
    )
    return text.replace("-", "−")


def _at(data: Any, path: Sequence[Any]) -> Any:
    for key in path:
        data = data[key]
    return data


def _best(values: dict[str, float | None], better: str) -> set[str]:
    known = {name: value for name, value in values.items() if value is not None}
    if not better or len(known) < 2:
        return set()
    best = (max if better == "higher" else min)(known.values())
    return {name for name, value in known.items() if value == best}


def _icon(grade: str) -> str:
    drawn, name = _ICONS[grade]
    return f'<svg class="icon" viewBox="0 0 24 24" role="img" aria-label="{name}"><circle cx="12" cy="12" r="10"/>{drawn}</svg>'


def _missing(what: str, why: str | None) -> str:
    return f'<p class="missing">{escape(what)}: {escape(why)}</p>' if why else ""


def _code(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>"


def _said(names: list[str] | None, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_name(names, index) for index in value) or "none"
    return _name(names, value)


def _name(names: list[str] | None, index: int) -> str:
    return names[index] if names and 0 <= index < len(names) else str(index)


def _feature(names: list[str] | None, index: int) -> str:
    return names[index] if names and index < len(names) else f"x{index}"


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
