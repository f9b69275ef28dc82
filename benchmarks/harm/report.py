"""The tables of the results, the choice of defaults on half of the tasks, and the lines that the library must keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from .tasks import UCI

WEIGHTS = ("last kron", "last full", "all kron")
COLUMNS = {  # what a row's name ends with, and what stands above its column
    "evidence probit": "evidence, probit",
    "evidence mc": "evidence, mc",
    "evidence one_vs_rest": "evidence, ovr",
    "evidence": "evidence",
    "loo": "loo",
    "auto": "auto",
    "calibrate": "calibrate",
    "calibrate-best": "calibrate, best",
}
WITHOUT_VALIDATION = ("evidence probit", "evidence mc", "evidence one_vs_rest", "evidence", "loo", "auto")
WITH_VALIDATION = ("calibrate", "calibrate-best")
HARM, HARM_SHARE, CALIBRATED = 0.01, 0.03, 0.005  # nats, of the network's NLL, nats
PAIRS, LOW, HIGH = 0.8, 0.85, 0.95


class Table:
    """Means over seeds of every task, posterior and method."""

    def __init__(self, rows: Mapping[str, dict]) -> None:
        self.cells: dict[tuple[str, str], list[dict]] = defaultdict(list)  # (task, method) -> a row per seed
        for name, row in rows.items():
            task, _, method = name.split("/", 2)
            self.cells[task, method].append(row)
        self.tasks = sorted({task for task, _ in self.cells})

    def mean(self, task: str, method: str, what: str = "nll") -> float | None:
        """Return the mean of one score over the seeds, None where it was not measured."""
        found = [row[what] for row in self.cells.get((task, method), []) if what in row]
        return fmean(found) if found else None

    def excess(self, task: str, method: str, over: str = "network") -> float | None:
        """Return the NLL minus that of another method."""
        found, other = self.mean(task, method), self.mean(task, over)
        return None if found is None or other is None else found - other

    def auroc(self, task: str, method: str, score: str) -> dict[str, float]:
        """Return the mean over seeds for each kind of unknown input."""
        found: dict[str, list[float]] = defaultdict(list)
        for row in self.cells.get((task, method), []):
            for outside, scores in row.get("ood", {}).items():
                if score in scores:
                    found[outside].append(scores[score])
        return {outside: fmean(values) for outside, values in found.items()}

    def posteriors(self, task: str) -> list[str]:
        """Return which weights and structures were measured for a task."""
        return [w for w in WEIGHTS if any(t == task and m.startswith(f"{w} /") for t, m in self.cells)]

    def nll(self, tasks: Iterable[str], columns: Sequence[str]) -> list[list[str]]:
        """Return the lines of NLL: a task and posterior, the network, its temperature, and every method."""
        lines = [["task", "posterior", "network", "temperature", *(COLUMNS[column] for column in columns)]]
        for task in tasks:
            for weights in self.posteriors(task):
                methods = ["network", "temperature", *(f"{weights} / {column}" for column in columns)]
                lines.append([task, weights, *(_shown(self.mean(task, method)) for method in methods)])
        return lines

    def calibration(self) -> list[list[str]]:
        """Return ECE and Brier score of network, temperature, auto and calibrate with a last layer."""
        columns = ["network", "temperature", "last kron / evidence probit", "last kron / auto", "last kron / calibrate"]
        lines = [["task", *(f"{what} {_short(column)}" for what in ("ECE", "Brier") for column in columns)]]
        for task in self.classes:
            scores = (self.mean(task, column, what) for what in ("ece", "brier") for column in columns)
            lines.append([task, *(_shown(score) for score in scores)])
        return lines

    def unknown(self) -> list[list[str]]:
        """Return the AUROC of each pair: confidence of the network, and each score of the posteriors."""
        lines = [["task", "unknown", "posterior", "network, confidence", "network, entropy"]]
        methods = ("evidence one_vs_rest", "auto", "calibrate")
        lines[0] += [f"{COLUMNS[m]}: {score}" for m in methods for score in ("confidence", "entropy", "epistemic")]
        for task in self.classes:
            for outside in self.auroc(task, "network", "confidence"):
                for weights in self.posteriors(task):
                    line = [task, outside, weights]
                    line += [_shown(self.auroc(task, "network", s).get(outside), 3) for s in ("confidence", "entropy")]
                    for method in methods:
                        for score in ("confidence", "entropy", "epistemic"):
                            line.append(_shown(self.auroc(task, f"{weights} / {method}", score).get(outside), 3))
                    lines.append(line)
        return lines

    def intervals(self) -> list[list[str]]:
        """Return coverage and width of the 90 % interval."""
        columns = ["evidence", "loo", "auto", "calibrate"]
        lines = [["task", "posterior", "network", "temperature", *columns]]
        for task in self.values:
            for weights in self.posteriors(task):
                methods = ["network", "temperature", *(f"{weights} / {column}" for column in columns)]
                pairs = [(self.mean(task, m, "coverage"), self.mean(task, m, "width")) for m in methods]
                lines.append([task, weights, *(f"{_shown(a, 2)} ({_shown(b, 2)})" for a, b in pairs)])
        return lines

    @property
    def classes(self) -> list[str]:
        return [task for task in self.tasks if self.mean(task, "network", "ece") is not None]

    @property
    def values(self) -> list[str]:
        return [task for task in self.tasks if self.mean(task, "network", "coverage") is not None]

    def parts(self) -> list[tuple[str, list[list[str]]]]:
        """Return all tables with their titles."""
        classes = [column for column in COLUMNS if column != "evidence"]
        values = [column for column in COLUMNS if not column.startswith("evidence ")]
        return [
            ("NLL of classes", self.nll(self.classes, classes)),
            ("NLL of regression (temperature: noise of the validation residuals)", self.nll(self.values, values)),
            ("Coverage of the 90 % interval (its mean width)", self.intervals()),
            ("ECE and Brier score, last layer", self.calibration()),
            ("AUROC of unknown inputs", self.unknown()),
        ]

    def terminal(self) -> str:
        return "\n\n".join(f"{title}\n{aligned(lines)}" for title, lines in self.parts() if len(lines) > 1)

    def markdown(self) -> str:
        return "\n\n".join(f"### {title}\n\n{piped(lines)}" for title, lines in self.parts() if len(lines) > 1)


def halves(table: Table) -> str:
    """Choose the best method on every other task in the order of names, and show it on the others."""
    lines = []
    for kind, tasks in (("classes", table.classes), ("regression", table.values)):
        first, second = (
            [t for t in tasks if t in chosen_on(table.tasks)],
            [t for t in tasks if t not in chosen_on(table.tasks)],
        )
        for what, columns in (("without validation data", WITHOUT_VALIDATION), ("with it", WITH_VALIDATION)):
            for weights in WEIGHTS:
                scored = {c: _harm(table, first, f"{weights} / {c}") for c in columns}
                known = {c: score for c, score in scored.items() if score is not None}
                if not known:
                    continue
                best = min(known, key=lambda c: known[c])
                again = _harm(table, second, f"{weights} / {best}")
                others = {c: _harm(table, second, f"{weights} / {c}") for c in known}
                place = 1 + sum(o is not None and again is not None and o < again for o in others.values())
                lines.append(
                    [
                        kind,
                        what,
                        weights,
                        COLUMNS[best],
                        _signed(known[best]),
                        _signed(again),
                        f"{place} of {len(known)}",
                    ]
                )
    header = ["", "", "posterior", "chosen", "NLL - network: chosen on", "confirmed on", "its place there"]
    chosen = f"Chosen on {', '.join(chosen_on(table.tasks))}; confirmed on the others. Regression: median, else mean."
    return f"Defaults\n{chosen}\n{aligned([header, *lines])}"


def chosen_on(tasks: Sequence[str]) -> list[str]:
    """Return every other task in the order of names."""
    return sorted(tasks)[::2]


def _harm(table: Table, tasks: Sequence[str], method: str) -> float | None:
    """Return the mean over tasks of the NLL minus the network's; for regression the median, as noise can be absurd."""
    found = sorted(e for e in (table.excess(task, method) for task in tasks) if e is not None)
    if not found:
        return None
    return found[len(found) // 2] if tasks[0] in UCI else fmean(found)


def acceptance(table: Table) -> str:
    """Check the promised lines, and name what breaks them."""
    lines = ["Acceptance"]
    for weights in WEIGHTS:
        found = {t: (table.excess(t, f"{weights} / auto"), table.mean(t, "network")) for t in table.tasks}
        known = {t: (e, n) for t, (e, n) in found.items() if e is not None and n is not None}
        worse = {t: e for t, (e, n) in known.items() if e > max(HARM, HARM_SHARE * abs(n))}
        lines.append(_line(f"auto, {weights}: NLL at most {HARM} or 3 % above the network's", known, worse))
        excess = {t: table.excess(t, f"{weights} / calibrate", "temperature") for t in table.tasks}
        measured = {t: e for t, e in excess.items() if e is not None}
        worse = {t: e for t, e in measured.items() if e > CALIBRATED}
        lines.append(_line(f"calibrate, {weights}: NLL at most {CALIBRATED} above temperature's", measured, worse))
    for method in ("evidence one_vs_rest", "auto", "calibrate"):
        for weights in WEIGHTS:
            pairs = {
                f"{task}-{outside}": found - table.auroc(task, "network", "confidence")[outside]
                for task in table.classes
                for outside, found in table.auroc(task, f"{weights} / {method}", "epistemic").items()
            }
            if pairs:
                kept = sum(gain >= 0 for gain in pairs.values()) / len(pairs)
                below = {pair: gain for pair, gain in pairs.items() if gain < 0}
                title = f"{COLUMNS[method]}, {weights}: epistemic at least the network's confidence"
                lines.append(f"{_verdict(kept >= PAIRS)}  {title}: {kept:.0%} of {len(pairs)} pairs{_named(below)}")
    for method in ("auto", "calibrate"):
        for weights in WEIGHTS:
            held = {t: table.mean(t, f"{weights} / {method}", "coverage") for t in table.values}
            known = {t: h for t, h in held.items() if h is not None}
            if known:
                mean = fmean(known.values())
                off = {t: h for t, h in known.items() if not LOW <= h <= HIGH}
                title = f"{method}, {weights}: 90 % intervals hold {LOW} to {HIGH} on average"
                lines.append(f"{_verdict(LOW <= mean <= HIGH)}  {title}: {mean:.3f}{_named(off)}")
    return "\n".join(lines)


def _line(title: str, known: Mapping[str, object], worse: Mapping[str, float]) -> str:
    if not known:
        return f"none  {title}: not measured"
    return f"{_verdict(not worse)}  {title}: {len(known) - len(worse)} of {len(known)} tasks{_named(worse)}"


def _named(off: Mapping[str, float]) -> str:
    worst = sorted(off, key=lambda name: -abs(off[name]))
    return f" (not: {', '.join(f'{name} {off[name]:+.3f}' for name in worst)})" if off else ""


def _verdict(kept: bool) -> str:
    return "kept" if kept else "MISS"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return columns for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def piped(lines: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


def _shown(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}f}" if abs(value) < 10 else f"{value:.1f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.4f}"


def _short(column: str) -> str:
    return column.split(" / ")[-1]
