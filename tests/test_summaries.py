"""`print(la)` and `la.coverage()` stay readable, from one tensor to five hundred."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import OptionError
from laplace.inference.coverage import Coverage, Row
from laplace.likelihoods import Categorical


def rows(n: int, name: str = "layers.{}.weight") -> Coverage:
    return Coverage(tuple(Row(name.format(i), (3, i + 1), 3 * (i + 1), "linear", "diag", 24) for i in range(n)))


@pytest.mark.parametrize("n", [1, 10, 30])
def test_few_tensors_are_all_shown(n):
    text = repr(rows(n))
    assert len(text.splitlines()) == n + 4
    assert all(row.name in text for row in rows(n))
    assert text == rows(n).table(all=True)
    assert text.splitlines()[-1].split() == ["total", f"{sum(r.weights for r in rows(n)):,}", f"{24 * n:,}"]


def test_many_tensors_are_shown_from_both_ends():
    coverage = rows(500)
    lines = repr(coverage).splitlines()
    assert len(lines) == 2 + 10 + 1 + 10 + 2 + 1
    assert lines[12] == "... 480 more: la.coverage().rows, or print(la.coverage().table(all=True))"
    assert lines[11].startswith("layers.9.weight ")
    assert lines[13].startswith("layers.490.weight ")
    assert lines[-1] == "500 tensors by rule: linear 500"
    assert lines[-2].split() == ["total", f"{3 * 500 * 501 // 2:,}", "12,000"]
    whole = coverage.table(all=True).splitlines()
    assert len(whole) == 504
    assert all(row.name in line for row, line in zip(coverage, whole[2:], strict=False))
    with pytest.raises(OptionError, match=r"^all='yes'"):
        coverage.table(all="yes")  # type: ignore[arg-type]


def test_long_names_are_cut_in_their_parts_and_keep_their_numbers():
    coverage = rows(40, "language_model.transformer.encoder_layers.{}.self_attention.query_projection.weight")
    text = repr(coverage)
    assert max(map(len, text.splitlines())) <= 80
    assert "~.37." in text
    assert coverage.rows[0].name in coverage.table(all=True)
    assert max(map(len, coverage.table(width=120).splitlines())) <= 120


def test_a_summary_of_much_is_short():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(250)))
    names = [name for name, _ in model.named_parameters()]
    la = Laplace(model, Categorical(class_weights=[1.0] * 3), names, "diag")
    for _ in range(2):
        lines = repr(la).splitlines()
        assert len(lines) < 14
        assert max(map(len, lines)) <= 80
        la.fit([(torch.randn(4, 3), torch.arange(4) % 3)])
    assert "500 tensors, 0.weight to 249.bias (3,000 weights)" in " ".join(repr(la).split())
    wide = Laplace(nn.Linear(3, 300), Categorical(class_weights=[1.25] * 300))
    assert max(map(len, repr(wide).splitlines())) <= 80
