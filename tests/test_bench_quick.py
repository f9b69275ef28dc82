"""`make bench-quick`: what counts as slower, and when a run fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
sys.path.append(BENCHMARKS)  # behind the others, because its files share names with tests
import machine  # noqa: E402
import quick  # noqa: E402

sys.path.remove(BENCHMARKS)

QUIET, BUSY = 1.01, 3.0


@pytest.fixture
def committed(tmp_path):
    """Two lines: one that never varies, and one with a noise of 4 %."""
    lines = {
        "steady": {"ratio": 2.0, "noise": 0.0, "processes": 5},
        "noisy": {"ratio": 3.0, "noise": 0.04, "processes": 5},
    }
    path = tmp_path / "quick.json"
    path.write_text(json.dumps({"machine": {"cpu": machine.describe().cpu}, "lines": lines}))
    return path


def code(monkeypatch, path, *runs, waited=QUIET, lenient=False):
    """The exit code after runs that give these ratios, in this order."""
    given = iter([quick.Measured(dict(zip(("steady", "noisy"), run, strict=True)), waited) for run in runs])
    monkeypatch.setattr(quick, "_process", lambda: next(given))
    return quick.compare(path, lenient)


def test_a_line_may_vary_by_three_times_its_noise_or_five_percent(monkeypatch, committed):
    assert code(monkeypatch, committed, (2.09, 3.35)) == 0
    assert code(monkeypatch, committed, (2.11, 3.0), (2.11, 3.0)) == 1
    assert code(monkeypatch, committed, (2.0, 3.37), (2.0, 3.37)) == 1


def test_only_what_is_slower_in_two_processes_counts(monkeypatch, committed, capsys):
    assert code(monkeypatch, committed, (2.5, 3.0), (2.0, 3.0)) == 0
    assert "No line is slower" in capsys.readouterr().out
    assert code(monkeypatch, committed, (2.5, 3.0), (2.5, 3.0)) == 1
    assert "steady" in next(line for line in capsys.readouterr().out.splitlines() if "SLOWER" in line)


def test_a_busy_machine_fails_only_if_no_report_was_asked_for(monkeypatch, committed, capsys):
    assert code(monkeypatch, committed, (2.5, 3.0), waited=BUSY, lenient=True) == 0
    assert "1 of 2 lines" in capsys.readouterr().out  # it is said all the same
    assert code(monkeypatch, committed, (2.5, 3.0), waited=BUSY) == 1
    assert code(monkeypatch, committed, (2.5, 3.0), (2.5, 3.0), lenient=True) == 1


def test_another_machine_gets_a_report(monkeypatch, committed, capsys):
    found = json.loads(committed.read_text())
    committed.write_text(json.dumps(found | {"machine": {"cpu": "another"}}))
    assert code(monkeypatch, committed, (2.5, 3.0), (2.5, 3.0), lenient=True) == 0
    assert "of another machine" in capsys.readouterr().out


def test_noise_is_the_spread_over_processes():
    assert quick.line_of([2.0, 2.0, 2.0]) == quick.Line(2.0, 0.0, 3)
    line = quick.line_of([1.0, 1.1, 1.21])
    assert line.ratio == 1.1
    assert line.noise == pytest.approx(0.0953, abs=1e-3)  # log 1.1


def test_every_line_is_committed():
    named = {f"{case}: {work}" for case, works in quick.WORKS.items() for work in works}
    assert set(json.loads(quick.RESULTS.read_text())["lines"]) == named
