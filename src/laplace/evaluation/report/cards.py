"""Examples on the page: a card for each, with its picture, text or numbers, and what was said of it."""

from __future__ import annotations

from html import escape
from typing import Any

from laplace.evaluation.report.cells import named

_OUTPUTS = 3  # of an example that are shown


def shelf(data: dict[str, Any], name: str, cards: list[dict[str, Any]], pictures: dict[str, list[str]]) -> str:
    """Return the cards of one shelf under its name."""
    images = pictures.get(name, [])
    drawn = [_card(data, card, images[i] if i < len(images) else "") for i, card in enumerate(cards)]
    wide = " wide" if any("text" in card for card in cards) else ""
    title = name if ": " in name else name[:1].upper() + name[1:]  # the name of a data set stays as it is
    return f'<h3>{escape(title)}</h3><div class="shelf{wide}">{"".join(drawn)}</div>'


def _card(data: dict[str, Any], card: dict[str, Any], picture: str) -> str:
    names, features = data["class_names"], data["feature_names"]
    parts = []
    if picture:
        parts.append(f'<img src="{escape(picture)}" alt="example {card["number"]}" width="96" height="96">')
    if "text" in card:
        parts.append(f"<p>{escape(card['text'])}</p>")
    if "row" in card and not picture:
        values = enumerate(card["row"])
        rows = "".join(f"<dt>{escape(named(features, i, 'x'))}</dt><dd>{_short(value)}</dd>" for i, value in values)
        more = f'<p class="small">and {card["more"]:,} more</p>' if card["more"] else ""
        parts.append(f"<dl>{rows}</dl>{more}")
    parts += _said(names, card)
    parts.append(f'<p class="small">number {card["number"]}, epistemic {_small(card["epistemic"])}</p>')
    return f'<div class="card">{"".join(parts)}</div>'


def _said(names: list[str] | None, card: dict[str, Any]) -> list[str]:
    """Return the prediction and the true label, in words."""
    if "confidence" in card:
        sure = "over 99.9" if card["confidence"] >= 0.9995 else f"{100 * card['confidence']:.1f}"
        said = f"<p>says <b>{escape(_classes(names, card['predicted']))}</b>, {sure} % sure</p>"
        return [said, *([f"<p>is {escape(_classes(names, card['label']))}</p>"] if "label" in card else [])]
    if "predicted" not in card:
        return []
    each = list(zip(card["predicted"], card["sd"], card["label"], strict=True))[:_OUTPUTS]
    return [f"<p>says {_short(p)} ± {s:.2g}, is {_short(y)}</p>" for p, s, y in each]


def _classes(names: list[str] | None, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(named(names, index) for index in value) or "none"
    return named(names, value)


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}".replace("-", "−")


def _small(value: float) -> str:
    return f"{value:.2g}" if value >= 0.001 else "below 0.001"
