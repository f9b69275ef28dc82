"""`benchmarks/scaling.py`: which growth is a failure, and that the page shows what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = str(ROOT / "benchmarks")
sys.path.append(BENCHMARKS)  # behind the others, because its files share names with tests
import scaling  # noqa: E402

sys.path.remove(BENCHMARKS)

MB = 2**20


@pytest.fixture
def growing(monkeypatch, tmp_path):
    """The exit code of a run in which time, the plain pass and memory grow with these powers of the size."""
    monkeypatch.setattr(scaling, "WORKS", {"fit kron, exact": scaling.WORKS["fit kron, exact"]})

    def run(axis: str, time: float, plain: float = 1.0, memory: float = 0.0) -> int:
        def apart(command: list[str]) -> SimpleNamespace:
            *_, size, _, file = command
            n = int(size)
            Path(file).write_text(json.dumps([1e-3 * n**time, 1e-4 * n**plain]))
            return SimpleNamespace(code=0, peak=300 * MB * n**memory)

        monkeypatch.setattr(scaling, "run_apart", apart)
        monkeypatch.setattr(sys, "argv", ["scaling.py", "--axis", axis, "--out", str(tmp_path / "rows.json")])
        return scaling.main()

    return run


@pytest.mark.parametrize("axis", scaling.AXES)
def test_an_exponent_of_time_above_1_15_fails(axis, growing):
    assert growing(axis, 1.14) == 0
    assert growing(axis, 1.16) == 1


def test_along_a_sequence_only_what_grows_faster_than_the_network_fails(growing):
    assert growing("T", 1.3, plain=1.2) == 0
    assert growing("T", 1.4, plain=1.2) == 1
    assert growing("N", 1.3, plain=1.2) == 1


def test_memory_may_grow_with_all_but_the_examples(growing):
    assert growing("P", 1.0, memory=0.5) == 0
    assert growing("N", 1.0, memory=0.06) == 0  # 1.09 over the axis
    assert growing("N", 1.0, memory=0.08) == 1


def test_the_page_shows_the_committed_growth_and_all_of_it_passes():
    rows = [row for rows in json.loads(scaling.RESULTS.read_text())["rows"].values() for row in rows]
    assert len(rows) == len(scaling.AXES) * len(scaling.WORKS)
    page = (ROOT / "docs" / "scaling.md").read_text()
    for row in rows:
        assert row["verdict"] == "ok"
        assert row["exponent"] <= row["limit"]
        peaks = ", ".join(f"{peak:.0f}" for peak in row["peaks"])
        sizes = ", ".join(f"{size:,}" for size in row["sizes"])
        line = next(one for one in page.splitlines() if one.startswith(f"| {row['axis']} | {row['work']} | {sizes} |"))
        assert line.endswith(f"| {row['exponent']:.2f} | {row['plain']:.2f} | {peaks} |")
