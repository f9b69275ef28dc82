"""Write the page: one HTML file with its style, its figures and its pictures inside, without scripts.

A content security policy forbids every request. All texts are escaped. Each number of a table names its place in the
JSON, `data-path`.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import Any, Final

from laplace.budget import in_bytes
from laplace.evaluation.report import tables
from laplace.evaluation.report.cards import shelf
from laplace.evaluation.report.cells import code, icon, missing, table
from laplace.evaluation.report.figures import figures, framed, prior_figure
from laplace.evaluation.report.reading import LAPLACE, NETWORK

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
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
        ("scores", "Side by side", tables.scores(data)),
        ("figures", "On the test data", _figures(data)),
        ("outside", "Unknown inputs", tables.outside(data, pictures)),
        ("shifts", "On other data", tables.shifts(data)),
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
        f'<div class="head {head["grade"]}">{icon(head["grade"])}<p>{escape(head["text"])}</p></div>'
        f'<nav aria-label="Sections">{links}</nav></header><main>{body}</main>'
        f'<footer><p class="small">Made with laplace {escape(made["versions"]["laplace"])}. The same numbers are in '
        "the JSON file beside this page.</p></footer></body></html>\n"
    )


def _next(data: dict[str, Any]) -> str:
    if not data["next"]:
        return "<p>Nothing to mend.</p>"
    steps = []
    for step in data["next"]:
        why = f' <span class="why">{escape(step["why"])}</span>' if step["why"] else ""
        steps.append(f"<li>{escape(step['text'])}{why}{code(step['code']) if step['code'] else ''}</li>")
    return f'<ol class="next">{"".join(steps)}</ol>'


def _findings(data: dict[str, Any]) -> str:
    items = "".join(
        f'<li class="{verdict["grade"]}">{icon(verdict["grade"])}<div><p>{escape(verdict["text"])}</p>'
        f'<p class="why">{escape(verdict["detail"])}</p></div></li>'
        for verdict in data["verdicts"]
    )
    return f'<ul class="findings">{items}</ul>'


def _figures(data: dict[str, Any]) -> str:
    drawn = "".join(map(framed, figures(data)))
    return f'<div class="figures">{drawn}</div>' if drawn else missing("No figures", data["missing"].get("figures"))


def _examples(data: dict[str, Any], pictures: dict[str, list[str]]) -> str:
    shelves = "".join(shelf(data, name, cards, pictures) for name, cards in data["examples"].items())
    return shelves or missing("No examples", data["missing"].get("examples"))


def _prior(data: dict[str, Any]) -> str:
    if data["prior"] is None:
        return missing("No evidence curve", data["missing"].get("prior"))
    return f'<div class="figures">{framed(prior_figure(data["prior"]))}</div>'


def _kept(data: dict[str, Any]) -> str:
    kept, options = data["kept"], data["provenance"]["options"]
    each = {name: 1e6 * value for name, value in data["seconds_per_example"].items()}
    times = ", ".join(f"{escape(name)} {value:,.0f} µs" for name, value in each.items())
    factor = f": {each[LAPLACE] / each[NETWORK]:.1f} times the network alone" if each[NETWORK] > 0 else ""
    rows = [
        f'<tr><th scope="row">{escape(row["name"])}</th><td>{"×".join(map(str, row["shape"]))}</td>'
        f'<td>{row["weights"]:,}</td><td class="l">{escape(row["rule"])}</td><td class="l">{escape(row["kept"])}</td>'
        f"<td>{in_bytes(row['bytes'])}</td></tr>"
        for row in kept["rows"]
    ]
    more = kept["tensors"] - len(kept["rows"])
    what = f"{escape(str(options['subset_of_weights']))}, {escape(options['hessian_structure'])}"
    return (
        f"<p>{kept['weights']:,} weights of {kept['tensors']} tensors are uncertain ({what}); what is kept of their "
        f"curvature takes {in_bytes(kept['bytes'])}.</p><p>CPU time per test example: {times}{factor}.</p>"
        + (f'<p class="missing">{escape(kept["note"])}</p>' if kept["note"] else "")
        + table(["parameter", "shape", "weights", "rule", "kept", "memory"], rows)
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
    parts |= {f"Data: {name}": described for name, described in made["data"].items()}
    drawn = "".join(
        f'<div><h3>{escape(name)}</h3><dl class="facts">'
        + "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(_value(value))}</dd>" for key, value in part.items())
        + "</dl></div>"
        for name, part in parts.items()
    )
    return f'<div class="parts">{drawn}</div>'


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
