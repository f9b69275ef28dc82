"""What each kind of part from outside shows, in at most 40 lines: it fits, predicts, prints, saves and loads."""

from __future__ import annotations

from pathlib import Path

import pytest

KINDS = ["structure", "likelihood", "layer_rule", "link", "tuning_method", "subset", "prior"]
DONE = [".fit([(", "la(x", "repr(la)", "la.coverage()", "la.save(", "Laplace.load("]


@pytest.mark.parametrize("kind", KINDS)
def test_forty_lines_are_enough(kind):
    text = (Path(__file__).parent / f"test_{kind}.py").read_text()
    assert len(text.splitlines()) <= 40
    assert [what for what in DONE if what not in text] == []
