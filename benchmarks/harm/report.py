"""The tables of the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

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


BASES = ("network", "temperature")


def named(weights: str, method: str) -> str:
    """Return the name of a row: the network's are shared by the posteriors of a last layer, and by those of all."""
    return f"{weights.split()[0] if method in BASES else weights} / {method}"


class Table:
    """Means over seeds of every task, posterior and method."""

    def __init__(self, rows: Mapping[str, dict]) -> None:
        self.cells: dict[tuple[str, str], list[dict]] = defaultdict(list)  # (task, method) -> a row per seed
        for name, row in rows.items():
            task, seed, method = name.split("/", 2)
            self.cells[task, method].append(row | {"seed": seed})
        self.tasks = sorted({task for task, _ in self.cells})

    def mean(self, task: str, method: str, what: str = "nll") -> float | None:
        """Return the mean of one score over the seeds, None where it was not measured."""
        found = [row[what] for row in self.cells.get((task, method), []) if what in row]
        return fmean(found) if found else None

    def excess(self, task: str, method: str, over: str = "network") -> float | None:
        """Return the NLL minus that of the network or its temperature, on the same examples of the same seeds."""
        others = {row["seed"]: row["nll"] for row in self.cells.get((task, named(method.split(" / ")[0], over)), [])}
        found = [
            row["nll"] - others[row["seed"]] for row in self.cells.get((task, method), []) if row["seed"] in others
        ]
        return fmean(found) if found else None

    def gains(self, task: str, method: str, score: str, base: str = "network") -> dict[str, float]:
        """Return the AUROC by a score minus that by the confidence of a base, on the same inputs of the same seeds."""
        networks = self.cells.get((task, named(method.split(" / ")[0], base)), [])
        others = {row["seed"]: row["ood"] for row in networks}
        found: dict[str, list[float]] = defaultdict(list)
        for row in self.cells.get((task, method), []):
            for outside, scores in row["ood"].items():
                if score in scores and row["seed"] in others:
                    found[outside].append(scores[score] - others[row["seed"]][outside]["confidence"])
        return {outside: fmean(values) for outside, values in found.items()}

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
                methods = [*BASES, *columns]
                lines.append([task, weights, *(self._nll(task, named(weights, method)) for method in methods)])
        return lines

    def _nll(self, task: str, method: str) -> str:
        """Return a mean over seeds; one over fewer seeds than the network's says over how many."""
        found, whole = (
            self.cells.get((task, method), []),
            self.cells.get((task, named(method.split(" / ")[0], "network")), []),
        )
        few = f" ({len(found)} of {len(whole)})" if 0 < len(found) < len(whole) else ""
        return _shown(self.mean(task, method)) + few

    def calibration(self) -> list[list[str]]:
        """Return ECE and Brier score of network, temperature, auto and calibrate with a last layer."""
        columns = [*BASES, "evidence probit", "auto", "calibrate"]
        lines = [["task", *(f"{what} {column}" for what in ("ECE", "Brier") for column in columns)]]
        for task in self.classes:
            scores = (self.mean(task, named("last kron", c), what) for what in ("ece", "brier") for c in columns)
            lines.append([task, *(_shown(score) for score in scores)])
        return lines

    def unknown(self) -> list[list[str]]:
        """Return the AUROC of each pair: confidence of the network, and each score of the posteriors."""
        lines = [["task", "unknown", "posterior", "network, confidence", "network, entropy"]]
        methods = ("evidence one_vs_rest", "auto", "calibrate")
        lines[0] += [f"{COLUMNS[m]}: {score}" for m in methods for score in ("confidence", "entropy", "epistemic")]
        for task in self.classes:
            for outside in self.auroc(task, "last / network", "confidence"):
                for weights in self.posteriors(task):
                    line = [task, outside, weights]
                    network = named(weights, "network")
                    line += [_shown(self.auroc(task, network, s).get(outside), 3) for s in ("confidence", "entropy")]
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
                methods = [*BASES, *columns]
                pairs = [
                    tuple(self.mean(task, named(weights, m), what) for what in ("coverage", "width")) for m in methods
                ]
                lines.append([task, weights, *(f"{_shown(a, 2)} ({_shown(b, 2)})" for a, b in pairs)])
        return lines

    @property
    def classes(self) -> list[str]:
        return [task for task in self.tasks if self.mean(task, "last / network", "ece") is not None]

    @property
    def values(self) -> list[str]:
        return [task for task in self.tasks if self.mean(task, "last / network", "coverage") is not None]

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
