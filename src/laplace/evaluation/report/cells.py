"""Small pieces of the page: numbers that name their place in the JSON, names of classes, icons, code, missing parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any, Final

_ICONS: Final = {
    "good": ('<path d="M7 12.5l3.4 3.4L17 8.6"/>', "good"),
    "warn": ('<path d="M12 6.8v6.4M12 16.8v.2"/>', "look at this"),
    "bad": ('<path d="M8 8l8 8M16 8l-8 8"/>', "mend this"),
    "note": ('<path d="M12 11v6M12 7.2v.2"/>', "note"),
}


def estimate(data: dict[str, Any], path: Sequence[Any], share: bool, best: bool) -> str:
    """Return a table cell with a value and its interval."""
    found = at(data, path)
    low, high = found["low"], found["high"]
    ends = "" if low is None or high is None else f'<span class="ci">{bare(low, share)} – {bare(high, share)}</span>'
    return f"<td>{_span(data, [*path, 'value'], share, best)}{ends}</td>"


def number(data: dict[str, Any], path: Sequence[Any], share: bool, best: bool = False) -> str:
    """Return a table cell with a value."""
    return f"<td>{_span(data, path, share, best)}</td>"


def _span(data: dict[str, Any], path: Sequence[Any], share: bool, best: bool) -> str:
    value = at(data, path)
    text = "–" if value is None else f"{bare(value, share)} %" if share else bare(value, share)
    style = ' class="best"' if best else ""
    return f'<span{style} data-path="{escape(json.dumps(list(path)))}">{text}</span>'


def bare(value: float, share: bool) -> str:
    """Return a number as tables show it; a share in per cent, without the sign."""
    if share:
        text = f"{100 * value:.1f}"
    else:
        size = abs(value)
        text = f"{value:.3f}" if size < 10 else f"{value:.2f}" if size < 100 else f"{value:.4g}"
    return text.replace("-", "−")


def best_of(values: dict[str, float | None], better: str, share: bool) -> set[str]:
    """Return the names of the best values, as they are written: those that look the same are equally good."""
    known = {name: value for name, value in values.items() if value is not None}
    if not better or len(known) < 2:
        return set()
    best = bare((max if better == "higher" else min)(known.values()), share)
    found = {name for name, value in known.items() if bare(value, share) == best}
    return found if len(found) < len(known) else set()


def at(data: Any, path: Sequence[Any]) -> Any:
    """Return what stands at a path of keys and indices."""
    for key in path:
        data = data[key]
    return data


def icon(grade: str) -> str:
    """Return the sign of a grade, with words for those who do not see it."""
    drawn, name = _ICONS[grade]
    return (
        f'<svg class="icon" viewBox="0 0 24 24" role="img" aria-label="{name}"><circle cx="12" cy="12" r="10"/>'
        f"{drawn}</svg>"
    )


def missing(what: str, why: str | None) -> str:
    """Return a line that says why something is not there; nothing if it is."""
    return f'<p class="missing">{escape(what)}: {escape(why)}</p>' if why else ""


def table(head: Sequence[str], rows: Sequence[str], key: str = "", left: int = 1) -> str:
    """Return a table that scrolls by itself where it is too wide. The first `left` columns are text."""
    columns = "".join(
        f'<th scope="col"{" class=l" if i < left else ""}>{escape(name)}</th>' for i, name in enumerate(head)
    )
    named = f' id="{key}"' if key else ""
    return (
        f'<div class="scroll" tabindex="0"><table{named}><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def folded(title: str, body: str) -> str:
    """Return a part that opens at a click."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def code(text: str) -> str:
    """Return a few lines of code."""
    return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'


def named(names: list[str] | None, index: int, fallback: str = "") -> str:
    """Return the name of a class, output or feature, or its number."""
    return names[index] if names and 0 <= index < len(names) else f"{fallback}{index}"
