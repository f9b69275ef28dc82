"""The lines that the library must keep, and the choice of defaults on half of the tasks, confirmed on the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from .report import COLUMNS, WEIGHTS, Table, aligned, named
from .tasks import TASKS

HARM, HARM_SHARE, CALIBRATED = 0.01, 0.03, 0.005  # nats, of the network's NLL, nats
PAIRS, LOW, HIGH = 0.8, 0.85, 0.95
CHOSEN_ON = sorted(TASKS)[::2]  # every other task in the order of names
CANDIDATES = {
    "without validation data": ("evidence probit", "evidence mc", "evidence one_vs_rest", "evidence", "loo", "auto"),
    "with it": ("calibrate", "calibrate-best"),
}
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def fill(page: Path, table: Table) -> None:
    """Write everything between the two marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    lines = "\n\n".join(f"```text\n{text}\n```" for text in (acceptance(table), halves(table)))
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n### Promises and defaults\n\n{lines}\n\n{table.markdown()}\n\n{END}{after}")


def halves(table: Table) -> str:
    """Choose the best method on one half of the tasks, and show it, and its place, on the other."""
    lines = [["", "", "posterior", "chosen", "NLL - network there", "on the other half", "its place there"]]
    for kind, tasks in (("classes", table.classes), ("regression", table.values)):
        first, second = [t for t in tasks if t in CHOSEN_ON], [t for t in tasks if t not in CHOSEN_ON]
        mean = fmean if kind == "classes" else median  # the network's noise can be absurd, and its NLL with it
        for what, columns in CANDIDATES.items():
            for weights in WEIGHTS:
                scored = {column: _excess(table, first, f"{weights} / {column}") for column in columns}
                known = {column: mean(found) for column, found in scored.items() if found}
                if not known:
                    continue
                others = {column: _excess(table, second, f"{weights} / {column}") for column in known}
                again = {column: mean(found) for column, found in others.items() if found}
                best = min(known, key=lambda column: known[column])
                line = [kind, what, weights, COLUMNS[best], f"{known[best]:+.4f}"]
                if best in again:
                    place = 1 + sum(other < again[best] for other in again.values())
                    line += [f"{again[best]:+.4f}", f"{place} of {len(again)}"]
                lines.append([*line, *[""] * (7 - len(line))])
    chosen = f"Chosen on {', '.join(CHOSEN_ON)}; confirmed on the others.\nMeans over tasks, of regression medians."
    return f"Defaults\n{chosen}\n{aligned(lines)}"


def _excess(table: Table, tasks: Sequence[str], method: str) -> list[float]:
    return [excess for task in tasks if (excess := table.excess(task, method)) is not None]


def acceptance(table: Table) -> str:
    """Check the promised lines, and name what breaks them."""
    lines = ["Acceptance"]
    for weights in WEIGHTS:
        found = {
            t: (table.excess(t, f"{weights} / auto"), table.mean(t, named(weights, "network"))) for t in table.tasks
        }
        known = {t: (e, n) for t, (e, n) in found.items() if e is not None and n is not None}
        worse = {t: e for t, (e, n) in known.items() if e > max(HARM, HARM_SHARE * abs(n))}
        lines.append(_line(f"auto, {weights}: NLL at most {HARM} or 3 % above the network's", known, worse))
        excess = {t: table.excess(t, f"{weights} / calibrate", "temperature") for t in table.tasks}
        measured = {t: e for t, e in excess.items() if e is not None}
        worse = {t: e for t, e in measured.items() if e > CALIBRATED}
        lines.append(_line(f"calibrate, {weights}: NLL at most {CALIBRATED} above temperature's", measured, worse))
    for method in ("evidence one_vs_rest", "auto", "calibrate"):
        lines += [_ranking(table, method, weights, "network", "the network's confidence") for weights in WEIGHTS]
    lines += [
        _ranking(table, "calibrate", weights, "temperature", "temperature scaling's confidence") for weights in WEIGHTS
    ]
    for method in ("auto", "calibrate"):
        for weights in WEIGHTS:
            held = {t: table.mean(t, f"{weights} / {method}", "coverage") for t in table.values}
            known = {t: h for t, h in held.items() if h is not None}
            if known:
                mean = fmean(known.values())
                off = {t: h for t, h in known.items() if not LOW <= h <= HIGH}
                title = f"{method}, {weights}: 90 % intervals hold {LOW} to {HIGH} on average"
                lines.append(f"{_verdict(LOW <= mean <= HIGH)}  {title}: {mean:.3f}{_named(off)}")
    return "\n".join(line for line in lines if line)


def _ranking(table: Table, method: str, weights: str, base: str, said: str) -> str:
    """Say on how many pairs epistemic ranks unknown inputs at least as well as a confidence; nothing if on none."""
    pairs = {
        f"{task}-{outside}": gain
        for task in table.classes
        for outside, gain in table.gains(task, f"{weights} / {method}", "epistemic", base).items()
    }
    if not pairs:
        return ""
    kept = sum(gain >= 0 for gain in pairs.values()) / len(pairs)
    below = {pair: gain for pair, gain in pairs.items() if gain < 0}
    title = f"{COLUMNS[method]}, {weights}: epistemic at least {said}"
    return f"{_verdict(kept >= PAIRS)}  {title}: {kept:.0%} of {len(pairs)} pairs{_named(below)}"


def _line(title: str, known: Mapping[str, object], worse: Mapping[str, float]) -> str:
    if not known:
        return f"none  {title}: not measured"
    return f"{_verdict(not worse)}  {title}: {len(known) - len(worse)} of {len(known)} tasks{_named(worse)}"


def _named(off: Mapping[str, float]) -> str:
    worst = sorted(off, key=lambda name: -abs(off[name]))
    return f" (not: {', '.join(f'{name} {off[name]:+.3f}' for name in worst)})" if off else ""


def _verdict(kept: bool) -> str:
    return "kept" if kept else "MISS"
