"""`Report`, which `laplace.report` returns: verdicts, numbers, and the page."""

from __future__ import annotations

import json
import os
from functools import cached_property
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from laplace.checks import choice, path_of, shown
from laplace.errors import OptionError
from laplace.evaluation.report.verdicts import Verdict

_MARKS = {"bad": "[!!]", "warn": "[! ]", "good": "[ok]", "note": "[  ]"}
_WIDTH = 88


class Report:
    """Says how far a network can be trusted. Prints as a summary; a notebook shows the page.

    Attributes:
        data: All numbers, as in the JSON.
        html: The page, a complete HTML document.
    """

    def __init__(self, data: dict[str, Any], html: str) -> None:
        self.data, self.html = data, html

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the findings, the gravest first."""
        return tuple(Verdict(**verdict) for verdict in self.data["verdicts"])

    @property
    def headline(self) -> str:
        """Return the overall verdict in one sentence."""
        return self.data["headline"]["text"]

    def score(self, method: str, key: str) -> float:
        """Return a score, such as `report.score("Laplace", "nll")`.

        Args:
            method: A method's name.
            key: The score's key in the JSON.

        Raises:
            OptionError: there is no such method or score.
        """
        scores = self.data["scores"]
        of = scores[choice(method, scores, "method")]
        return of[choice(key, of, "key")]["value"]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page, and the numbers as JSON beside it. Missing folders are made.

        Args:
            path: The HTML file; the JSON gets the same name with `.json`.

        Returns:
            The path of the page.

        Raises:
            OptionError: the name does not end in .html.
        """
        target = page_path(path, "path")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.html, encoding="utf-8")
        text = json.dumps(self.data, indent=1, ensure_ascii=False, allow_nan=False)
        target.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
        return target

    def __repr__(self) -> str:
        lines = [self.headline, ""]
        for verdict in self.verdicts:
            text = verdict.text if not verdict.code else f"{verdict.text} Write {verdict.code.splitlines()[0]}"
            first, *rest = wrap(text, _WIDTH - 5, break_long_words=False)
            lines += [f"{_MARKS[verdict.grade]} {first}", *(f"     {line}" for line in rest)]
        for name, why in self._left_out().items():
            lines += wrap(f"{name} is left out: {why}", _WIDTH, subsequent_indent="     ", break_long_words=False)
        return "\n".join([*lines, "", *self._table()])

    def _left_out(self) -> dict[str, str]:
        """Return the data that was given and could not be used, with the reason."""
        found = dict(self.data["outside"]["missing"])
        found |= {row["name"]: row["missing"] for row in self.data["shifts"] if "missing" in row}
        training = self.data["missing"].get("training")
        return found | ({"The training data": training} if training else {})

    def _table(self) -> list[str]:
        names, info = list(self.data["scores"]), self.data["score_info"]
        rows = [["", *names]]
        for key, about in info.items():
            values = (self.data["scores"][name][key]["value"] for name in names)
            rows.append([about["label"], *("-" if v is None else f"{v:.4g}" for v in values)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return [
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]

    def _repr_html_(self) -> str:
        """Return the page in a frame, for notebooks."""
        return f'<iframe srcdoc="{escape(self.html)}" style="width:100%;height:640px;border:0"></iframe>'


def page_path(path: Any, what: str) -> Path:
    """Return where a page is written. Refuse names that do not end in .html: the JSON beside it could be the same."""
    found = Path(path_of(path, what))
    if found.suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"{what}={shown(str(path))}: a file that ends in .html is needed.")
    return found
